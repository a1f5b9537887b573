"""Law 4 for ``batch_norm="ghost:8"``: ranks that share whole groups train what one does, running statistics too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.errors import ArgumentError
from autoaccum.events import Verified
from autoaccum.ranks import balance
from tests.faults import launches, oom_in_window, sizes, strides
from tests.laws.test_laws_batch_norm import IMAGES, convolutions, sgd
from tests.processes import in_turn
from tests.ranks.launching import launch

pytestmark = in_turn


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Twice(nn.Module):
    """A layer that is called twice in a forward, and one that is computed a second time in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Linear(98, 6).double(), nn.BatchNorm1d(6).double()
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)).double()
        self.last = nn.Linear(6, 3).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.norm(self.before(inputs.flatten(1))).tanh())
        return self.last(checkpoint(self.middle, found, use_reentrant=False))  # type: ignore[no-any-return]


class Left(NamedTuple):
    """What a run leaves, that can be sent."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    plans: list[tuple[int, ...]]
    verified: list[bool]


def fit(model: nn.Module | None = None, **options: Any) -> Left:
    model = convolutions() if model is None else model
    given: dict[str, Any] = {"data": IMAGES, "effective_batch": 50, "epochs": 1, "micro_batch": 8, "shuffle": False}
    given |= {"device": "cpu", "progress": False, "cache": False, "batch_norm": "ghost:8", "optimizer": sgd}
    result = autoaccum.fit(model, loss_fn=cross_entropy, **{**given, **options})
    reports = result.history
    return Left(
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        [report.loss for report in reports],
        [report.micro_batches for report in reports],
        [event.passed for event in result.events if isinstance(event, Verified)],
    )


def by_speed() -> Left:
    """Train with shares of ranks of which each is three times as fast as the one before it."""
    begin = balance.Shares.__init__

    def known(self: Any, size: int, *arguments: Any, **options: Any) -> None:
        begin(self, size, *arguments, **options)
        self._speeds = [3.0**of_rank for of_rank in range(size)]

    balance.Shares.__init__ = known  # type: ignore[method-assign]
    try:
        return fit(effective_batch=97, micro_batch=97)
    finally:
        balance.Shares.__init__ = begin  # type: ignore[method-assign]


def all_runs() -> dict[str, Left]:
    return {
        "one sample is left over": fit(effective_batch=49),
        "some are left over": fit(effective_batch=53, micro_batch=20, clip_norm=0.5),
        "sizes that are found": fit(micro_batch="auto", epochs=2),
        "fewer groups than ranks": fit(effective_batch="11, 3:60"),
        "by speed": by_speed(),
        "called twice, and checkpointed": fit(Twice()),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Left]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


@sizes(3)
def test_ranks_train_what_one_does(size: int, alone: dict[str, Left]) -> None:
    found = launch(all_runs, size)
    for name, one in alone.items():
        first, *others = (of_rank[name] for of_rank in found)
        for other in others:
            assert all(map(torch.equal, first.state.values(), other.state.values())), f"{name}: to the bit, on all"
        for key, value in one.state.items():
            torch.testing.assert_close(first.state[key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")
        assert first.losses == pytest.approx(one.losses, rel=1e-10)
        assert list(map(sum, first.plans)) == list(map(sum, one.plans))
        assert all(first.verified), name
    assert all(size % 8 == 0 for plan in found[0]["one sample is left over"].plans for size in plan[:-1])
    assert found[0]["by speed"].plans[0] == {2: (24, 73), 3: (8, 24, 65), 4: (8, 24, 65)}[size]
    assert found[0]["one sample is left over"].state["1.num_batches_tracked"] == 6 * 6 + 1


class Faulty(NamedTuple):
    """Memory that runs out at an operation of the second window of one rank, counted from 1."""

    rank: int
    operation: int


def with_fault(fault: Faulty, **options: Any) -> tuple[Left, bool]:
    """Return what a run with a fault leaves, and whether this rank has come to the operation that fails."""
    with oom_in_window(2, fault.operation if rank() == fault.rank else 0) as met:
        return fit(**options), met.is_reached


def at_every_operation(first: int, stride: int) -> list[tuple[int, list[bool]]]:
    """Return of each rank the last operation, and of each fault whether it has left no mark."""
    given: dict[str, Any] = {"data": tuple(tensor[:123] for tensor in IMAGES), "effective_batch": 41, "verify": False}
    clean: dict[Any, Left] = {}
    of_ranks = []
    for of_rank in (0, 1):
        found, operation, is_met = [], first, True
        while is_met:
            left, is_reached = with_fault(Faulty(of_rank, operation), **given, micro_batch=16)
            plans = tuple(left.plans)
            if plans not in clean:
                clean[plans] = fit(**given, micro_batch=list(plans))
            expected = clean[plans].state.values()
            found.append(all(map(torch.equal, left.state.values(), expected)))
            told: list[Any] = [None, None]
            torch.distributed.all_gather_object(told, is_reached)
            is_met, operation = any(told), operation + stride
        of_ranks.append((operation, found))
    assert len(clean) > 1
    return of_ranks


@strides(61)
def test_an_oom_at_every_operation_of_a_rank_leaves_no_mark(stride: int) -> None:
    for first, every in launches(stride):
        for of_rank in launch(at_every_operation, 2, first, every):
            for operations, found in of_rank:
                assert operations > 150
                assert all(found)


def resumed(place: str, until: int | None) -> Left:
    def kill(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == until:
            os.kill(os.getpid(), signal.SIGKILL)

    return fit(convolutions(0.2), run_dir=place, checkpoint_every=2, callbacks=[kill], effective_batch=43)


@pytest.mark.slow
def test_a_run_whose_ranks_were_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = launch(resumed, 2, str(tmp_path / "whole"), None)
    launch(resumed, 2, str(tmp_path / "parts"), 5)
    for one, other in zip(whole, launch(resumed, 2, str(tmp_path / "parts"), None), strict=True):
        assert all(map(torch.equal, one.state.values(), other.state.values()))


class OfNoLayer(nn.Module):
    """Running statistics that no layer of BatchNorm holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(98, 3).double()
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("var", torch.ones(3).double())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.linear(inputs.flatten(1))
        return nn.functional.batch_norm(found, self.mean, self.var, training=True)  # type: ignore[arg-type]


def refused() -> list[str]:
    found = []
    for by in ("a part of a batch", "no layer"):
        try:
            if by == "no layer":
                fit(OfNoLayer())
            else:
                model = convolutions()
                autoaccum.Accumulator(model, sgd(model.parameters()), loss_fn=cross_entropy, batch_norm="ghost:8")
        except ArgumentError as error:
            found.append(f"{error}")
    return found


def test_what_ranks_cannot_do_is_refused_with_its_cure() -> None:
    for part, layer in launch(refused, 2):
        assert "batch_norm='ghost:8'" in part
        assert "use fit" in part
        assert "Hold them in an nn.BatchNorm layer" in layer
