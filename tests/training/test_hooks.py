"""Callbacks are called with what they ask for, and what they keep goes with the run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum import StepReport, StopTraining
from autoaccum.callbacks import EMA, ReduceOnPlateau
from autoaccum.errors import ArgumentTypeError, AutoaccumError, AutoaccumWarning, CheckpointCorruptError
from autoaccum.events import Finished, Started
from autoaccum.training.hooks import Hooks, Ready
from tests.distributed.launching import launch
from tests.models import classes, mlp


def fit(**options: Any) -> autoaccum.FitResult:
    given: dict[str, Any] = {"model": mlp(), "data": classes(20), "effective_batch": 8, "micro_batch": 4}
    given |= {"loss_fn": cross_entropy, "device": "cpu", "progress": False, "cache": False, "verify": False}
    return autoaccum.fit(**given | options)


class Counter:
    """A callback that keeps how many windows it has heard of."""

    def __init__(self, until: int = 10**6) -> None:
        self.windows, self.until = 0, until

    def __call__(self, record: Any) -> None:
        self.windows += isinstance(record, StepReport)
        if self.windows == self.until:
            raise StopTraining

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows = state["windows"]


class Other(Counter):
    """Another one."""


class TestCalls:
    def test_with_the_trainer_where_they_ask_for_it(self) -> None:
        heard: dict[str, list[Any]] = {name: [] for name in ("one", "two", "named", "default", "partial", "method")}

        def two(record: Any, run: Any) -> None:
            heard["two"].append((record, run))

        def named(record: Any, trainer: Any = None) -> None:
            heard["named"].append((record, trainer))

        def default(record: Any, seen: list[Any] = heard["default"]) -> None:
            seen.append(record)

        class Method:
            def tell(self, record: Any, trainer: Any) -> None:
                heard["method"].append((record, trainer))

        def three(found: list[Any], record: Any, trainer: Any) -> None:
            found.append((record, trainer))

        callbacks = [heard["one"].append, two, named, default, partial(three, heard["partial"]), Method().tell]
        trainer = autoaccum.Trainer(
            mlp(), classes(20), effective_batch=8, loss_fn=cross_entropy, device="cpu", progress=False,
            callbacks=callbacks,
        )  # fmt: skip
        trainer.fit()
        assert heard["one"] == heard["default"]
        assert isinstance(heard["one"][0], Started)
        assert isinstance(heard["one"][-1], Finished)
        for name in ("two", "named", "partial", "method"):
            assert [record for record, _ in heard[name]] == heard["one"]
            assert {id(found) for _, found in heard[name]} == {id(trainer)}

    def test_one_that_takes_three_is_refused(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"function \(record, trainer\) -> None.*missing.*'third'"):
            fit(callbacks=[lambda record, trainer, third: None])

    def test_an_accumulator_has_no_trainer(self) -> None:
        model, (inputs, targets) = mlp(), classes(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ArgumentTypeError, match=r"a function \(event\) -> None"):
            autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, callbacks=[lambda event, trainer: None])
        seen: list[Any] = []
        accumulator = autoaccum.Accumulator(
            model,
            optimizer,
            loss_fn=cross_entropy,
            micro_batch=3,
            callbacks=[lambda event, trainer=seen: seen.append(1)],
        )
        accumulator.step((inputs, targets))
        assert seen, "a second parameter with a default stays its own"


class TestState:
    def test_is_saved_and_put_back(self, tmp_path: Path) -> None:
        fit(epochs=2, run_dir=tmp_path, callbacks=[print_nothing, Counter(until=4)])
        counter = Counter()
        fit(epochs=2, run_dir=tmp_path, callbacks=[print_nothing, counter])
        assert counter.windows == 6

    def test_what_has_no_counterpart_is_told(self, tmp_path: Path) -> None:
        fit(epochs=2, run_dir=tmp_path, callbacks=[Counter(until=4)])
        other, late = Other(), Counter()
        with pytest.warns(AutoaccumWarning) as warned:
            result = fit(epochs=2, run_dir=tmp_path, callbacks=[other, late])
        said = [str(warning.message) for warning in warned]
        assert "nothing of callbacks[0], which is of type Other. It begins anew" in said[0]
        assert "nothing of callbacks[1], which is of type Counter. It begins anew" in said[1]
        assert "state of callbacks[0], of type Counter, and no such callback is there. Its state is dropped" in said[2]
        assert (other.windows, late.windows) == (2, 2)
        assert result.num_steps == 6

    def test_a_run_without_any_keeps_what_it_always_kept(self) -> None:
        assert Hooks([print, lambda record: None]).state_dict() == {}

    def test_of_one_that_cannot_put_it_back_is_not_saved(self) -> None:
        class Half:
            def __call__(self, record: Any) -> None: ...

            def state_dict(self) -> dict[str, Any]:
                return {"windows": 1}

        assert Hooks([Half()]).state_dict() == {}

    def test_that_the_callback_refuses_is_the_checkpoints_error(self) -> None:
        options: dict[str, Any] = {"effective_batch": 8, "loss_fn": cross_entropy, "device": "cpu", "progress": False}
        trainer = autoaccum.Trainer(mlp(), classes(20), callbacks=[Counter()], **options)
        weights, saved = trainer.state_dict()
        saved["callbacks"][0]["state"] = {}
        with pytest.raises(CheckpointCorruptError, match="KeyError"):
            trainer.load_state_dict(weights, saved)


def print_nothing(record: Any) -> None:
    """Keep nothing, so that places count."""


def test_ready_ones_are_asked_in_their_order() -> None:
    class Everywhere(Ready):
        has_to_be_everywhere = True

    assert Hooks([print, Everywhere(), Ready(), Everywhere()]).of_all_ranks() == ["Everywhere", "Everywhere"]


def on_ranks(callbacks: str) -> Any:
    """Return what a rank's run leaves: the rates, and the averages."""
    ema, plateau = EMA(decay=0.9), ReduceOnPlateau(factor=0.5, patience=0, min_delta=10.0)
    is_first = os.environ.get("RANK", "0") == "0"
    given = [ema, plateau] if callbacks == "all" or is_first else [ema]
    try:
        result = fit(epochs=3, callbacks=given, validation_data=classes(12))
    except AutoaccumError as error:
        return str(error)
    return [report.lr for report in result.history], [value.tolist() for value in ema.weights.values()]


def test_ranks_decide_and_average_alike() -> None:
    first, second = launch(on_ranks, 2, "all")
    assert first == second
    assert first[0] == [1e-3] * 6 + [5e-4] * 3, "the first validation is the best, the second as good as none"
    told = launch(on_ranks, 2, "the first")
    assert all(isinstance(one, str) for one in told)
    assert "callbacks=[]: expected what rank 0 was given, ['ReduceOnPlateau'] (this is of rank 1)" in "".join(told)
