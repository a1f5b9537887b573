"""Laws 2 and 3 of callbacks that keep something: killed and gone on with, or out of memory, they end the same to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EMA, ReduceOnPlateau
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.testing import oom_at
from tests.faults import Operations
from tests.models import classes, mlp, state_of


class KilledError(Exception):
    """What ends a process in these tests, wherever a record is told."""


class Ending:
    """A callback that ends the run at a record of its choice."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def __call__(self, record: Any) -> None:
        self.seen += 1
        if self.seen == self.number:
            raise KilledError


def trained(
    *others: Any, validate: bool = False, within: Any = None, **options: Any
) -> tuple[list[Any], autoaccum.FitResult]:
    """Return all that a run leaves, averages and rates too, and its result."""
    ema = EMA(decay=0.9, validate=validate)
    # Nothing is an improvement by so much: rates fall after each second validation.
    plateau = ReduceOnPlateau(factor=0.5, patience=1, min_delta=10.0)
    given: dict[str, Any] = {"data": classes(20), "effective_batch": 8, "micro_batch": 4, "epochs": 4, "device": "cpu"}
    given |= {"loss_fn": cross_entropy, "progress": False, "cache": False, "verify": False}
    given |= {"validation_data": classes(12, seed=3), "validate_every": 8}
    given |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9)}
    trainer = autoaccum.Trainer(mlp(), **given | options, callbacks=[ema, plateau, *others])
    with within or nullcontext():
        result = trainer.fit()
    rates = torch.tensor([report.lr for report in result.history], dtype=torch.float64)
    return [*state_of(result), *ema.weights.values(), torch.tensor(ema.updates), rates], result


def same(first: list[Any], second: list[Any]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("validate", [False, True])
def test_killed_at_any_record_and_gone_on_with_it_ends_the_same(tmp_path: Path, validate: bool) -> None:
    seen: list[Any] = []
    expected, result = trained(seen.append, validate=validate, checkpoint_every=2, run_dir=tmp_path / "whole")
    assert len({report.lr for report in result.history}) > 3, "rates have fallen"
    for number in range(1, len(seen) - 3, 4):
        place = tmp_path / str(number)
        with pytest.raises(KilledError):
            trained(Ending(number), validate=validate, checkpoint_every=2, run_dir=place)
        found, _ = trained(validate=validate, checkpoint_every=2, run_dir=place)
        assert same(found, expected), f"killed when {seen[number - 1]} was told"


def test_memory_that_runs_out_anywhere_leaves_no_mark() -> None:
    operations = Operations()
    trained(epochs=1, within=operations)
    numbers = operations.every(40)
    # In the callbacks too: they begin and step outside of windows, and are no part of what is replayed.
    inside = [n for n, name in enumerate(operations.names, start=1) if "lerp" in name or name == "aten.clone.default"]
    survived = ended = 0
    for number in sorted({*numbers, *inside[::3]}):
        fault = oom_at(number)
        try:
            found, result = trained(epochs=1, within=fault)
        except OptimizerOutOfMemoryError:  # half-way through a step, from which no run goes on
            ended += 1
            continue
        assert fault.operations >= number
        plans = [report.micro_batches for report in result.history]
        expected, again = trained(epochs=1, micro_batch=plans)
        assert [report.micro_batches for report in again.history] == plans
        assert same(found, expected), operations.names[number - 1]
        survived += 1
    assert survived > 4 * ended
