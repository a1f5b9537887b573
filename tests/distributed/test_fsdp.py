"""A model that FSDP2 shards over ranks: exact whatever each of them runs, and no failure of one hangs another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from autoaccum.distributed.fsdp import Elsewhere, Sharded
from autoaccum.distributed.group import join
from autoaccum.errors import RankError
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.planning.cuts import near_equal
from autoaccum.testing import oom_at
from tests.distributed.launching import launch
from tests.faults import launches, strides
from tests.processes import in_turn

pytestmark = in_turn
WIDTH, LABELS, GUESS = 6, 5, 7.0


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Block(nn.Module):
    """A part of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS)).double()


def data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, LABELS, (num_samples,), generator=generator)
    labels[::4] = -100  # of a micro-batch other numbers count than its samples
    return torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64), labels


def alone(num_samples: int) -> list[torch.Tensor]:
    """Return the gradient of a window by one process that has all of the model."""
    model, (inputs, labels) = net(), data(num_samples)
    cross_entropy(model(inputs), labels).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def shard(model: nn.Module, *, reshards: bool = True, copies: int = 1) -> nn.Module:
    size = torch.distributed.get_world_size()
    shape, names = ((size,), ("shard",)) if copies == 1 else ((copies, size // copies), ("copy", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:  # type: ignore[attr-defined]
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return model


class Loop:
    """Windows of a sharded model, which each rank runs a share of."""

    def __init__(self, shares: list[int], **how: Any) -> None:
        group = join(torch.device("cpu"))
        assert group is not None
        self.group = group
        self.model = shard(net(), **how)
        self.sharded = Sharded(self.model, group)
        self.inputs, self.labels = data(sum(shares))
        self.start, self.own = sum(shares[: group.rank]), shares[group.rank]
        self.replays = 0

    def loss(self, start: int, size: int) -> torch.Tensor:
        """Return the sum of a micro-batch over its items; one without samples runs one that weighs nothing."""
        at = slice(start, start + max(size, 1))
        found = cross_entropy(self.model(self.inputs[at]), self.labels[at], reduction="sum")
        return found * (1.0 if size else 0.0) / GUESS

    def window(self, wish: int, spoil: Callable[[], Any] | None = None) -> list[torch.Tensor]:
        """Return the gradient of a window, of which this rank wishes for so many micro-batches."""
        self.model.zero_grad()
        count = max(self.sharded.tell(wish))
        start = self.start
        for index, size in enumerate(near_equal(self.own, count)):
            begin = start if size else 0

            def compute(begin: int = begin, size: int = size, index: int = index) -> None:
                if spoil is None or index != 1:
                    self.loss(begin, size).backward()
                    return
                with spoil():
                    self.loss(begin, size).backward()

            try:
                found = attempt(lambda compute=compute, index=index: self.sharded.run(compute, lambda: index))  # type: ignore[misc]
            except Elsewhere:
                found = Elsewhere
            if not isinstance(found, list):
                self.replays += 1
                return self.window(wish + isinstance(found, RanOut))
            assert found == [index] * self.group.size
            start += size
        items = sum(self.group.exchange(int((self.labels[self.start : self.start + self.own] >= 0).sum())))
        self.sharded.scale(GUESS / items)
        return [p.grad.full_tensor() for p in self.model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(found) == len(expected)
    difference = torch.cat([(one - other).flatten() for one, other in zip(found, expected, strict=True)])
    return float(difference.norm() / torch.cat([each.flatten() for each in expected]).norm())


def exact(shares: list[int], wishes: list[int], how: dict[str, Any]) -> list[float]:
    loop = Loop(shares, **how)
    return [off(loop.window(wishes[rank()]), alone(sum(shares))) for _ in range(2)]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize(
    ("shares", "wishes"),
    [([9, 9], [3, 3]), ([13, 4], [2, 4]), ([2, 15], [2, 5]), ([0, 7], [0, 3])],
    ids=["alike", "unlike", "fewer samples than micro-batches", "none"],
)
def test_ranks_make_the_gradient_of_one_process(shares: list[int], wishes: list[int], reshards: bool) -> None:
    for found in launch(exact, 2, shares, wishes, {"reshards": reshards}):
        assert max(found) < 1e-14


def test_copies_of_a_sharded_model_make_the_gradient_of_one_process() -> None:
    for found in launch(exact, 4, [5, 1, 7, 2], [2, 1, 3, 1], {"copies": 2}):
        assert max(found) < 1e-14


def at_operations(
    of_rank: int, first: int, stride: int, how: dict[str, Any], shares: list[int]
) -> tuple[int, list[float]]:
    """Return the operations of a micro-batch, and how far off gradients are where memory ran out at each ``stride``-th."""
    loop, expected, found, operation = Loop(shares, **how), alone(sum(shares)), [], first
    loop.window(2)
    while True:
        loop.replays = 0
        gradient = loop.window(2, lambda operation=operation: oom_at(operation if rank() == of_rank else None))
        found.append(off(gradient, expected))
        # What a failure has left would show in the window after it, too.
        found.append(off(loop.window(2), expected))
        if not loop.replays:
            return operation, found
        operation += stride


@strides(127)
@pytest.mark.parametrize("of_rank", [0, 1])
@pytest.mark.parametrize("reshards", [True, False])
def test_an_oom_at_every_operation_of_a_rank_hangs_nobody(of_rank: int, reshards: bool, stride: int) -> None:
    for first, every in launches(stride):
        for operations, found in launch(at_operations, 2, of_rank, first, every, {"reshards": reshards}, [9, 4]):
            assert operations > 250
            assert max(found) < 1e-14


@strides(97)
def test_an_oom_in_a_copy_of_a_sharded_model_hangs_nobody(stride: int) -> None:
    for first, every in launches(stride):
        for operations, found in launch(at_operations, 4, 2, first, every, {"copies": 2}, [5, 1, 7, 2]):
            assert operations > 250
            assert max(found) < 1e-14


def failing(what: str) -> tuple[str, str, float]:
    """Return what a run ends by in which the second rank fails: in its first window, or in the second."""
    loop, started = Loop([6, 5]), time.monotonic()

    def spoil() -> Any:
        if rank() == 1 and what == "an error":
            loop.model[1].register_forward_hook(_raise)  # type: ignore[index]
        if rank() == 1 and what == "in a collective":
            torch.distributed.all_reduce = _run_out  # by which gloo scatters
        return oom_at(40 if rank() == 1 and what == "unknown" else None)

    try:
        if what == "unknown":
            loop.sharded.run(lambda: _spoilt(loop, spoil), lambda: 0)
        loop.window(2)
        loop.window(2, spoil)
    except BaseException as error:
        loop.group.fail(error)
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def _spoilt(loop: Loop, spoil: Callable[[], Any]) -> None:
    with spoil():
        loop.loss(0, 2).backward()


def _raise(*_: Any) -> None:
    raise ValueError("no such token")


def _run_out(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("what", "own", "of_other"),
    [
        ("an error", ("ValueError", "no such token"), "rank 1 has failed: ValueError: no such token"),
        (
            "unknown",
            ("RankError", "rank 1 has failed: it has left a micro-batch of a kind"),
            "rank 1 has failed: OutOfMemoryError",
        ),
        (
            "in a collective",
            ("RankError", "rank 1 has failed: memory ran out in the reduce_scatter"),
            "rank 1 has failed: CUDA out of memory",
        ),
    ],
)
def test_what_no_replay_cures_ends_all(what: str, own: tuple[str, str], of_other: str) -> None:
    first, second = launch(failing, 2, what)
    assert second[0] == own[0]
    assert own[1] in second[1]
    assert first[0] == "RankError"
    assert of_other in first[1]
    assert first[2] < 60


def losing() -> tuple[int | None, str]:
    """Kill the second rank in a forward, so that the first one waits for it in a collective of the model."""
    loop = Loop([6, 5])
    loop.window(2)
    if rank() == 1:
        loop.model[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[index]
    with pytest.raises(RankError) as caught:
        loop.window(2)
    return caught.value.rank, str(caught.value)


def test_a_rank_that_is_killed_ends_those_in_a_collective_of_the_model() -> None:
    of_rank, text = launch(losing, 2, lost=1)[0]
    assert of_rank is None
    assert text.startswith("another rank has ended: ")
