"""What a checkpoint holds of a run, when it is the best, and what becomes of one that is taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, CheckpointCorruptError
from autoaccum.events import StepReport, Validated
from autoaccum.runs import checkpoint
from autoaccum.training.result import FitResult
from autoaccum.training.trainer import Trainer
from tests.models import classes, mlp

pytestmark = pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")


def made(run_dir: Path | None, **options: Any) -> Trainer:
    """Five windows an epoch."""
    defaults: dict[str, Any] = {
        "model": mlp(),
        "data": classes(40),
        "loss_fn": cross_entropy,
        "effective_batch": 8,
        "micro_batch": 8,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "epochs": 2,
        "device": "cpu",
        "progress": False,
        "cache": False,
        "run_dir": run_dir,
    }
    return autoaccum.Trainer(**{**defaults, **options})


def fit(run_dir: Path, **options: Any) -> FitResult:
    return made(run_dir, **options).fit()


def end_after(step: int) -> Callable[[Any], None]:
    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == step:
            raise autoaccum.StopTraining

    return end


def explode(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """After the second epoch."""
    return LambdaLR(optimizer, lambda step: 1.0 if step < 10 else 300.0)


class TestTheBest:
    def test_the_best_by_validation_is_kept_besides(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"validation_data": classes(40), "lr_scheduler": explode, "epochs": 5}
        result = fit(tmp_path, keep_checkpoints=1, **options)
        losses = {event.step: event.loss for event in result.events if isinstance(event, Validated)}
        at_best = min(losses, key=lambda step: losses[step])
        assert at_best < 25
        found, _ = checkpoint.best(tmp_path / "checkpoints")
        assert found is not None
        assert (found.step, found.facts["validation_loss"]) == (at_best, losses[at_best])
        every, _ = checkpoint.every(tmp_path / "checkpoints")
        assert [one.step for one in every] == [25, at_best]
        weights, _ = found.load()
        model = mlp()
        model.load_state_dict(weights)
        inputs, targets = classes(40)
        assert cross_entropy(model(inputs), targets).item() == pytest.approx(losses[at_best], rel=1e-6)

    def test_the_best_is_still_the_best_after_a_resume(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"validation_data": classes(40), "lr_scheduler": explode, "epochs": 5}
        whole = fit(tmp_path / "whole", **options)
        for step in (5, 6, 14, 16, 20):
            place = tmp_path / str(step)
            fit(place, callbacks=[end_after(step)], **options)
            fit(place, **options)
            best, expected = (
                checkpoint.best(place / "checkpoints")[0],
                checkpoint.best(tmp_path / "whole/checkpoints")[0],
            )
            assert best is not None
            assert expected is not None
            assert (best.step, best.facts) == (expected.step, expected.facts)
        assert whole.num_steps == 25

    @pytest.mark.parametrize("stop", [None, 15])
    def test_the_last_may_be_the_best(self, stop: int | None, tmp_path: Path) -> None:
        """It is written once as the best, and once more at the run's end."""
        options: dict[str, Any] = {"validation_data": classes(40), "keep_checkpoints": 1, "epochs": 3}
        callbacks = [] if stop is None else [end_after(stop)]
        result = fit(tmp_path, callbacks=callbacks, **options)
        if stop is not None:
            result = fit(tmp_path, **options)
        losses = {event.step: event.loss for event in result.events if isinstance(event, Validated)}
        assert losses[15] == min(losses.values())
        found, _ = checkpoint.every(tmp_path / "checkpoints")
        assert [(one.step, one.is_best) for one in found] == [(15, True)]


def test_true_needs_something(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"resume=True: expected a checkpoint in .*resume='auto'"):
        fit(tmp_path, resume=True)
    fit(tmp_path, callbacks=[end_after(2)])
    assert fit(tmp_path, resume=True).num_steps == 10


def test_a_state_of_another_version_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trainer.state_dict

    def without(trainer: Any) -> Any:
        weights, state = whole(trainer)
        del state["randomness"]
        return weights, state

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "state_dict", without)
        fit(tmp_path, epochs=1)
    with pytest.raises(CheckpointCorruptError, match="step-00000005: randomness cannot be put back") as caught:
        fit(tmp_path, epochs=2)
    assert caught.value.entry == "randomness"


@pytest.mark.parametrize("shuffles", [True, False])
def test_the_configuration_says_whether_a_loader_shuffles(tmp_path: Path, shuffles: bool) -> None:
    data = DataLoader(TensorDataset(*classes(16)), batch_size=4, shuffle=shuffles)
    autoaccum.fit(
        mlp(), data, effective_batch=8, micro_batch=8, loss_fn=cross_entropy, run_dir=tmp_path, progress=False,
        device="cpu", cache=False,
    )  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text())["shuffle"] is shuffles


@pytest.mark.parametrize("callbacks", [[], [autoaccum.callbacks.KeepBest("loss", "min")]])
def test_the_configuration_says_what_keep_best_goes_by(tmp_path: Path, callbacks: list[Any]) -> None:
    data = classes(8)
    autoaccum.fit(
        mlp(), data, effective_batch=8, loss_fn=cross_entropy, validation_data=data, callbacks=iter(callbacks),
        run_dir=tmp_path, verify=False, progress=False, device="cpu",
    )  # fmt: skip
    found = json.loads((tmp_path / "config.json").read_text()).get("keep_best")
    assert found == ({"metric": "loss", "mode": "min"} if callbacks else None)
