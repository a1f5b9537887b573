"""Validation of a model that FSDP2 shards: the loss of one process on every rank, and no failure of one hangs another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import AutoaccumError
from autoaccum.events import OutOfMemory, Validated
from autoaccum.testing import oom_at, simulated_memory
from autoaccum.training.validation import ValidatorOfAll
from tests.distributed.launching import launch
from tests.distributed.test_fsdp import data, rank
from tests.processes import in_turn
from tests.step.test_sharding import trained

pytestmark = in_turn
Found = tuple[list[tuple[int, float, dict[str, float]]], list[int], torch.Tensor]


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double()


def drawn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.rand(len(targets), dtype=torch.float64) + 0 * outputs.sum(1)


def validated(shards: bool, wanted: dict[str, Any]) -> Found:
    """Return the validations of a run, the sizes that ran out of memory in them, and the weights."""
    found, failed = [], []

    def hear(record: Any) -> None:
        if isinstance(record, Validated):
            found.append((record.step, record.loss, dict(record.metrics)))
        if isinstance(record, OutOfMemory) and record.phase == "validation":
            failed.append(record.micro_batch)

    given = {"validation_data": data(15), "callbacks": [hear], "data": data(24), "epochs": 2}
    result = trained(shards, {**given, "micro_batch": 4, **wanted})
    return found, failed, result.weights


def same(one: Found, other: Found) -> None:
    assert [step for step, *_ in one[0]] == [step for step, *_ in other[0]]
    for (_, loss, metrics), (_, expected, of_other) in zip(one[0], other[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert metrics == pytest.approx(of_other, rel=1e-12)
    torch.testing.assert_close(one[2], other[2], rtol=1e-10, atol=1e-12)


METRICS: dict[str, Any] = {"metrics": {"correct": correct}}
LARGE: dict[str, Any] = {**METRICS, "validation_data": data(600), "data": data(600), "effective_batch": 150}


def both() -> tuple[Found, Found, Found]:
    """Return a run, one whose metric draws, and one in which the second rank runs out of memory."""
    clean, draws = validated(True, METRICS), validated(True, {"metrics": {"drawn": drawn}})
    number, tried = 0, ValidatorOfAll._try

    def faulty(self: ValidatorOfAll, *arguments: Any) -> Any:
        nonlocal number
        number += 1
        # The first two forwards are known by then; each one that fails does so at a later operation.
        with oom_at(3 + 11 * (number // 3) if rank() == 1 and number > 4 and number % 3 == 0 else None):
            return tried(self, *arguments)

    ValidatorOfAll._try = faulty  # type: ignore[method-assign]
    failing = validated(True, {**METRICS, "validate_every": 13})
    ValidatorOfAll._try = tried  # type: ignore[method-assign]
    return clean, draws, failing


def of_unequal_memory() -> Found:
    with simulated_memory((2**20, 120 * 2**10)[rank()]):
        return validated(True, {**LARGE, "micro_batch": "auto"})


@pytest.mark.slow
def test_ranks_of_unequal_memory_validate_together() -> None:
    alone = launch(validated, 1, False, LARGE)[0]
    for found in launch(of_unequal_memory, 2):
        same(found, alone)


def test_every_rank_has_the_loss_of_one_process() -> None:
    alone = launch(one_process, 1)[0]
    first, second = launch(both, 2)
    for found in (first, second):
        same(found[0], alone[0])
        same(found[2], alone[1])
    assert [step for step, *_ in alone[0][0]] == [2, 4]
    assert first[1][0] == second[1][0], "what is drawn is the same on all ranks"
    assert first[2][1] == []
    assert len(second[2][1]) > 1


def one_process() -> tuple[Found, Found]:
    return validated(False, METRICS), validated(False, {**METRICS, "validate_every": 13})


class Spoilt(torch.utils.data.Dataset[Any]):
    """Samples of which one cannot be read on the second rank, when it is asked for a second time."""

    def __init__(self) -> None:
        self.inputs, self.labels = data(31)
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += index == 20
        if rank() == 1 and self.num_reads == 2:
            raise ValueError("no such token")
        return self.inputs[index], self.labels[index]


def ending(what: str) -> tuple[str, str]:
    spoilt: dict[str, Any] = {"validation_data": Spoilt()} if what == "data" else {"metrics": {"failing": _metric}}
    try:
        validated(True, spoilt)
    except (AutoaccumError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


_calls: list[int] = []


def _metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    _calls.append(len(targets))
    if rank() == 1 and len(_calls) == 9:
        raise ValueError("no such token")
    return correct(outputs, targets)


@pytest.mark.parametrize("what", ["data", "metrics"])
def test_an_error_of_one_rank_ends_all(what: str) -> None:
    first, second = launch(ending, 2, what)
    assert second == ("ValueError", "no such token")
    assert first[0] == "RankError"
    assert "rank 1 has failed: ValueError: no such token" in first[1]
