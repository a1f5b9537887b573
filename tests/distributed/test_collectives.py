"""What a micro-batch of a sharded model launches is noted, and made up for where it is known what is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoaccum.distributed.collectives import Call, Collectives
from autoaccum.errors import RankError
from autoaccum.testing import oom_at
from tests.distributed.unheard import unheard

GROUP: Any = "the ranks"


def call(kind: str, unit: int = 0, given: int = 3, taken: int = 6) -> Call:
    return Call(kind, unit, given, taken, torch.float64, torch.device("cpu"), GROUP)


SEQUENCE = (call("all_gather"), call("all_gather", 1), call("reduce_scatter", 1, 6, 3), call("all_reduce", 1, 3, 3))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return what is launched, in its order: kind, numbers that are given, and that are got."""
    found: list[tuple[str, int, int]] = []

    def gather(taken: torch.Tensor, given: torch.Tensor, **_: Any) -> None:
        found.append(("all_gather", given.numel(), taken.numel()))

    def scatter(taken: torch.Tensor, given: torch.Tensor, **_: Any) -> None:
        found.append(("reduce_scatter", given.numel(), taken.numel()))

    def reduce(given: torch.Tensor, **_: Any) -> None:
        found.append(("all_reduce", given.numel(), given.numel()))

    monkeypatch.setattr(dist, "all_gather_single", gather)
    monkeypatch.setattr(dist, "reduce_scatter_single", scatter)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:other")
    return found


def noted(*sequences: tuple[Call, ...]) -> Collectives:
    collectives = Collectives(unheard())
    for sequence in sequences:
        collectives.begin()
        for each in sequence:
            collectives.launch(each, lambda _: None)
        collectives.keep()
    collectives.begin()
    return collectives


@pytest.mark.parametrize("done", range(len(SEQUENCE) + 1))
def test_what_is_left_of_a_micro_batch_is_launched(done: int, launched: list[tuple[str, int, int]]) -> None:
    collectives = noted(SEQUENCE)
    for each in SEQUENCE[:done]:
        collectives.launch(each, lambda _: None)
    # Memory is there already: nothing is taken where there is none.
    with oom_at(1):
        collectives.drain()
    assert launched == [(each.kind, each.given, each.taken) for each in SEQUENCE[done:]]


def test_of_two_kinds_that_begin_alike_none_is_guessed(launched: list[tuple[str, int, int]]) -> None:
    collectives = noted(SEQUENCE, SEQUENCE[:1] + SEQUENCE[2:])
    collectives.launch(SEQUENCE[0], lambda _: None)
    with pytest.raises(RankError, match="of a kind that has not come to its end"):
        collectives.drain()
    collectives.launch(SEQUENCE[1], lambda _: None)
    collectives.begin()
    for each in SEQUENCE[:2]:
        collectives.launch(each, lambda _: None)
    collectives.drain()
    assert [kind for kind, *_ in launched] == ["reduce_scatter", "all_reduce"]


def test_before_anything_is_known_nothing_is_made_up_for() -> None:
    with pytest.raises(RankError):
        noted().drain()


@pytest.mark.parametrize(
    ("raised", "of_rank"),
    [(torch.OutOfMemoryError("CUDA out of memory."), 0), (RuntimeError("Connection closed"), None)],
)
def test_a_collective_that_fails_cannot_be_made_up_for(raised: Exception, of_rank: int | None) -> None:
    def fail(_: bool) -> None:
        raise raised

    collectives = noted(SEQUENCE)
    with pytest.raises(RankError) as error:
        collectives.launch(SEQUENCE[0], fail)
    assert error.value.rank == of_rank
    with pytest.raises(RankError, match="it has left the all_gather of a unit in its midst"):
        collectives.drain()


def test_what_is_of_another_kind_is_not_taken_for_it(launched: list[tuple[str, int, int]]) -> None:
    collectives = noted(SEQUENCE)
    collectives.begin("a forward")
    with pytest.raises(RankError, match="of a kind that has not come to its end"):
        collectives.drain()
    collectives.begin("a forward")
    for each in SEQUENCE[:2]:
        collectives.launch(each, lambda _: None)
    collectives.keep()
    collectives.begin("a forward")
    collectives.launch(SEQUENCE[0], lambda _: None)
    collectives.drain()
    assert [kind for kind, *_ in launched] == ["all_gather"]
    assert not Collectives(unheard()).are_known


def test_forwards_beside_micro_batches_are_not_noted() -> None:
    collectives = noted(SEQUENCE)
    collectives.keep()
    for each in SEQUENCE:
        collectives.launch(each, lambda _: None)
    assert collectives.launched == []
