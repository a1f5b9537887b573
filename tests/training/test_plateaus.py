"""What is done once validations get no better: when, by what, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import autoaccum
from autoaccum import StopTraining
from autoaccum.callbacks import EarlyStopping, ReduceOnPlateau
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.events import Finished, Started, StepReport, Validated
from tests.models import classes, mlp


def validated(loss: float, **metrics: float) -> Validated:
    return Validated(step=1, epoch=0, loss=loss, metrics=metrics, num_samples=8, micro_batch=8, seconds=0.0)


def trainer_with(*rates: Any, step: int = 0) -> Any:
    return SimpleNamespace(step=step, optimizer=SimpleNamespace(param_groups=[{"lr": rate} for rate in rates]))


def started() -> Started:
    return Started(num_steps=1, num_samples=1, device="cpu", limit_bytes=1, used_bytes=0)


def stops_after(callback: EarlyStopping, losses: list[float]) -> int | None:
    callback(started(), trainer_with())
    for number, loss in enumerate(losses, start=1):
        try:
            callback(validated(loss, accuracy=-loss), trainer_with())
        except StopTraining:
            return number
    return None


class TestEarlyStopping:
    @pytest.mark.parametrize(
        ("options", "losses", "expected"),
        [
            ({"patience": 2}, [3, 2, 1, 1, 1], 5),
            ({"patience": 2}, [3, 4, 2, 4, 1, 2], None),
            ({"patience": 1}, [3, 3], 2),
            ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.0], 3),
            ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 1.8], None),
            ({"patience": 2, "metric": "accuracy", "mode": "max"}, [3, 2, 4, 4], 4),
            ({"patience": 2, "mode": "max"}, [3, 2, 1], 3),
            ({"patience": 2}, [float("nan"), float("nan"), 1], 2),
            ({"patience": 2}, [float("inf"), 3, float("nan"), 2, 2, 2], 6),
        ],
    )
    def test_comes_after_so_many_without_an_improvement(
        self, options: Any, losses: list[float], expected: int | None
    ) -> None:
        callback = EarlyStopping(**options)
        assert stops_after(callback, losses) == expected
        assert stops_after(callback, losses) == expected, "a new run begins anew"

    def test_ends_a_run_which_stays_ended_until_there_is_more_patience(self, tmp_path: Path) -> None:
        def fit(patience: int) -> autoaccum.FitResult:
            return autoaccum.fit(
                mlp(), classes(16), effective_batch=8, micro_batch=8, epochs=20, loss_fn=cross_entropy, device="cpu",
                progress=False, cache=False, validation_data=classes(8), run_dir=tmp_path, verify=False,
                # With a rate of 0 nothing gets better after the first.
                optimizer=lambda p: torch.optim.SGD(p, lr=0.0), callbacks=[EarlyStopping(patience)],
            )  # fmt: skip

        result = fit(2)
        assert (result.num_steps, result.events[-1].reason) == (6, "stopped")  # type: ignore[union-attr]
        assert isinstance(result.events[-1], Finished)
        told = r"was stopped by a callback, after 6 steps\. Nothing is trained\. Let the callback allow more"
        with pytest.warns(autoaccum.AutoaccumWarning, match=told):
            assert fit(2).num_steps == 6
        assert fit(4).num_steps == 10

    def test_goes_by_what_validations_report(self) -> None:
        callback = EarlyStopping(metric="f1", mode="max")
        callback(started(), trainer_with())
        with pytest.raises(ArgumentError, match=r"^metric='f1': expected one of accuracy, loss"):
            callback(validated(1.0, accuracy=0.5), trainer_with())


class TestReduceOnPlateau:
    @pytest.mark.parametrize(
        ("options", "losses", "expected"),
        [
            ({"factor": 0.5, "patience": 1}, [1, 1, 1, 1, 1], [1, 1, 0.5, 0.5, 0.25]),
            ({"factor": 0.5, "patience": 0, "min_lr": 0.4}, [1, 1, 1], [1, 0.5, 0.4]),
            ({"factor": 0.5, "patience": 0, "cooldown": 2}, [1, 1, 1, 1, 1], [1, 0.5, 0.5, 0.5, 0.25]),
            ({"factor": 0.5, "patience": 1}, [1, 1, 0.5, 1, 0.4], [1, 1, 1, 1, 1]),
        ],
    )
    def test_multiplies_each_rate(self, options: Any, losses: list[float], expected: list[float]) -> None:
        callback, trainer = ReduceOnPlateau(**options), trainer_with(1.0, torch.tensor(2.0))
        held = trainer.optimizer.param_groups[1]["lr"]
        callback(started(), trainer)
        rates = []
        for loss in losses:
            callback(validated(loss), trainer)
            rates.append(trainer.optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx(expected)
        least = options.get("min_lr", 0)
        assert held.item() == pytest.approx(max(2 * expected[-1], least)) or least
        assert trainer.optimizer.param_groups[1]["lr"] is held, "an optimizer may hold the tensor itself"

    @pytest.mark.parametrize("seed", range(40))
    def test_counts_as_pytorchs_does(self, seed: int) -> None:
        draw = random.Random(seed)
        options: dict[str, Any] = {"factor": draw.choice([0.1, 0.5]), "patience": draw.randrange(4)}
        options |= {"cooldown": draw.randrange(3), "mode": draw.choice(["min", "max"]), "min_lr": draw.choice([0, 0.2])}
        min_delta = draw.choice([0.0, 0.3])
        callback, trainer = ReduceOnPlateau(**options, min_delta=min_delta), trainer_with(1.0)
        callback(started(), trainer)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        theirs = ReduceLROnPlateau(optimizer, **options, threshold=min_delta, threshold_mode="abs", eps=0)
        for _ in range(30):
            loss = float(draw.randrange(8))
            callback(validated(loss), trainer)
            theirs.step(loss)
            assert trainer.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]

    def test_never_raises_a_rate(self) -> None:
        callback, trainer = ReduceOnPlateau(patience=1, min_lr=0.1), trainer_with(0.01)
        callback(started(), trainer)
        for _ in range(3):
            callback(validated(1.0), trainer)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.01

    def test_beside_a_scheduler_it_is_refused(self) -> None:
        with pytest.raises(ConflictingArgumentsError, match=r"lr_scheduler and callbacks=\[ReduceOnPlateau\]"):
            autoaccum.fit(
                mlp(), classes(8), effective_batch=8, loss_fn=cross_entropy, validation_data=classes(8),
                lr_scheduler=lambda optimizer, num_steps: StepLR(optimizer, 1), callbacks=[ReduceOnPlateau()],
            )  # fmt: skip


@pytest.mark.parametrize("callback", [EarlyStopping(), ReduceOnPlateau()])
def test_without_validations_they_are_refused_before_training(callback: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^callbacks='{type(callback).__name__}': expected validation_data"):
        autoaccum.fit(mlp(), classes(8), effective_batch=8, loss_fn=cross_entropy, callbacks=[callback])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"patience": -1}, "patience"),
        ({"mode": "least"}, "mode"),
        ({"metric": "accuracy"}, "mode"),
        ({"min_delta": -1}, "min_delta"),
        ({"metric": 3}, "metric"),
        ({"factor": 1}, "factor"),
        ({"cooldown": -1}, "cooldown"),
        ({"min_lr": -1.0}, "min_lr"),
    ],
)
def test_arguments_that_are_none_are_named(options: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        ReduceOnPlateau(**options)
    assert caught.value.argument == argument


def loss_beside(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    loss = cross_entropy(outputs, targets)
    return loss, {"acc": (outputs.argmax(1) == targets).float().mean(), "rows": outputs}


def two_losses(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return {"first": cross_entropy(outputs, targets), "second": cross_entropy(2 * outputs, targets)}


def in_eval_mode_alone(model: Any, batch: Any) -> Any:
    loss = cross_entropy(model(batch[0]), batch[1])
    return loss if model.training else (loss, {"acc": loss.detach()})


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


class TestNames:
    @staticmethod
    def run(metric: str, windows: list[int], make: Any = EarlyStopping, **options: Any) -> Any:
        def count(record: Any) -> None:
            windows.extend([record.step] if isinstance(record, StepReport) else [])

        given: dict[str, Any] = {"loss_fn": cross_entropy} if "training_step" not in options else {}
        return autoaccum.fit(
            mlp(), classes(16), effective_batch=4, micro_batch=4, epochs=2, device="cpu", progress=False, cache=False,
            verify=False, validation_data=classes(8), callbacks=[count, make(metric=metric, mode="max")], **{**given, **options},
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ({"metrics": {"acc": accuracy}}, "acc, loss"),
            ({"loss_fn": loss_beside}, "acc, loss"),
            ({"loss_fn": two_losses, "metrics": {"accurate": accuracy}}, "accurate, loss, loss/first"),
            ({"training_step": in_eval_mode_alone}, "acc, loss"),
        ],
    )
    def test_the_first_validation_shows_what_does(self, options: Any, names: str) -> None:
        windows: list[int] = []
        with pytest.raises(ArgumentError, match=rf"^metric='accuracy': expected one of {names}"):
            self.run("accuracy", windows, **options)
        assert windows == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("metric", "options"),
        [
            ("acc", {"loss_fn": loss_beside}),
            ("loss/second", {"loss_fn": two_losses}),
            ("acc", {"training_step": in_eval_mode_alone}),
            ("acc", {"metrics": {"acc": accuracy}}),
        ],
    )
    def test_what_is_reported_is_taken(self, metric: str, options: Any) -> None:
        windows: list[int] = []
        self.run(metric, windows, **options)
        assert windows == list(range(1, 9))
