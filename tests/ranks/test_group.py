"""The processes that train together: who they are, what they tell each other, and how gradients are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoaccum.errors import RankError
from autoaccum.ranks import group as groups
from autoaccum.ranks.group import Group, is_launched, join, own_device, speaks
from autoaccum.testing import oom_at
from tests.processes import in_turn
from tests.ranks.launching import launch

pytestmark = in_turn


def parameters() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes, kinds = [(3, 4), (7,), (2, 5), (1,)], [torch.float32, torch.float64, torch.float32, torch.float64]
    return [torch.randn(shape, dtype=kind, requires_grad=True) for shape, kind in zip(shapes, kinds, strict=True)]


def added_up(bucket_bytes: int, operation: int | None) -> tuple[list[torch.Tensor], str]:
    groups._BUCKET_BYTES = bucket_bytes
    found = join(torch.device("cpu"))
    assert found is not None
    made = parameters()
    found.prepare(made)
    for index, p in enumerate(made):
        if (index + found.rank) % 3:  # some have none, on this rank or that
            p.grad = torch.full_like(p, float(index + 1)) * (found.rank + 1)
    failed = ""
    try:
        with oom_at(operation if operation and found.rank == 1 else 10**6):
            found.add_up(made, 0.5)
    except torch.OutOfMemoryError as error:
        failed = type(error).__name__
    # Whatever has happened, the next exchange is everybody's.
    assert found.exchange(found.rank) == [0, 1]
    return [p.grad for p in made if p.grad is not None], failed


@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 40, 1])
def test_gradients_are_added_up_in_buckets_of_any_size(bucket_bytes: int) -> None:
    (first, _), (second, _) = launch(added_up, 2, bucket_bytes, None)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        there = [rank + 1 for rank in range(2) if (index + rank) % 3]
        assert torch.equal(one, torch.full_like(one, 0.5 * (index + 1) * sum(there)))
        assert torch.equal(one, other)


@pytest.mark.parametrize("operation", [1, 2, 5])
def test_a_rank_that_runs_out_of_memory_goes_on_for_the_others(operation: int) -> None:
    (_, first), (_, second) = launch(added_up, 2, 40, operation)
    assert (first, second) == ("", "OutOfMemoryError")


def told(fails: bool) -> tuple[list[Any], Any]:
    found = join(torch.device("cpu"))
    assert found is not None
    heard = [found.exchange({"rank": found.rank}), found.from_first(lambda: "of the first")]
    if fails and found.rank == 1:
        found.fail(ValueError("no such token"))
        found.fail(ValueError("and another"))  # of which nobody hears: they have ended
        return heard, None
    try:
        return heard, found.exchange("more")
    except RankError as error:
        found.fail(error)
        return heard, (error.rank, str(error))


def test_what_is_told_is_heard_by_all_of_them() -> None:
    expected = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], "of the first"]
    assert launch(told, 3, False) == [(expected, ["more"] * 3)] * 3


def test_an_error_is_heard_in_the_place_of_what_would_have_been_told() -> None:
    first, second, third = launch(told, 3, True)
    assert second[1] is None
    for _, (rank, text) in (first, third):
        assert rank == 1
        assert "rank 1 has failed: ValueError: no such token" in text


def spread() -> list[list[float]]:
    found = join(torch.device("cpu"))
    assert found is not None
    tensors = [torch.full((3,), float(found.rank + 1)), torch.tensor(found.rank), torch.ones(2, 2)[:, :1] * found.rank]
    found.spread(tensors)
    return [tensor.flatten().tolist() for tensor in tensors]


def test_the_first_ranks_values_are_given_to_all() -> None:
    assert launch(spread, 2) == [[[1.0] * 3, [0], [0.0, 0.0]]] * 2


class TestAlone:
    @pytest.fixture(autouse=True)
    def nothing_said(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
        for name in groups._LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        return iter([monkeypatch])

    def test_a_process_that_nobody_has_launched_is(self) -> None:
        assert not is_launched()
        assert join(torch.device("cpu")) is None
        assert speaks()

    @pytest.mark.parametrize("size", ["1", "2"])
    def test_of_torchrun_are_those_of_more_than_one(self, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
        assert not is_launched(), "nobody says where they meet"
        monkeypatch.setenv("MASTER_PORT", "1")
        assert is_launched() is (size == "2")

    def test_on_a_cpu_no_rank_has_a_device_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert own_device() is None

    def test_on_a_machine_with_accelerators_each_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
        monkeypatch.setenv("LOCAL_RANK", "5")
        assert own_device() == "cuda:1"
        monkeypatch.delenv("LOCAL_RANK")
        assert own_device() is None


def test_a_rank_that_has_left_what_others_are_in_speaks_no_more() -> None:
    """As by Ctrl-C: what it told would be taken for what they are in."""
    left = Group.__new__(Group)
    left.waited_seconds, left._is_over = 0.0, False

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        left._heard(interrupted)
    left.fail(KeyboardInterrupt())  # which would need what this group has not got


def test_a_group_is_that_of_a_process_group_that_is_there() -> None:
    assert launch(of_the_users, 2) == [(0, 2, True), (1, 2, True)]


def of_the_users() -> tuple[int, int, bool]:
    dist.init_process_group("gloo")
    found = Group(torch.device("cpu"))
    return found.rank, found.size, is_launched()
