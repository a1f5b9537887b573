"""The laws where a sample does not fit on a rank: that one saves memory, the others go on as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import MemorySaving, Notice, OutOfMemory, Recomputed, Shared, StepReport
from autoaccum.testing import simulated_memory
from tests.distributed.launching import launch
from tests.faults import launches, oom_in_window, strides
from tests.laws.test_laws_ranks import _told, rank
from tests.processes import in_turn
from tests.step.test_memory_saving import UNLIMITED, WIDTH, Block, Stack, data, sgd

pytestmark = in_turn


class Left(NamedTuple):
    """What a rank's run leaves, that can be sent."""

    weights: list[torch.Tensor]
    losses: list[float]
    plans: list[tuple[int, ...]]
    levels: list[str]
    """As windows have stood on them, this rank's alone."""
    replays: int
    peak: int
    changes: list[str]
    """The levels that were gone to."""
    measured: int
    """Levels that were found to come to the same bits."""
    notices: list[str]
    ooms: int
    shares: list[list[int]]
    """Of all ranks, as they were told."""


def fit(limit: int | None = None, kind: Callable[[], nn.Module] = Block, **options: Any) -> Left:
    torch.manual_seed(0)
    model, seen = options.pop("model", Stack)(kind).double(), list[Any]()
    samples = tuple(each.double() for each in data(options.pop("samples", 24)))
    given: dict[str, Any] = {
        "effective_batch": 6, "micro_batch": 1, "steps": 5, "loss_fn": F.mse_loss, "optimizer": sgd, "patience": 0,
        "callbacks": [seen.append], "verify": False, **options,
    }  # fmt: skip
    with simulated_memory(limit or UNLIMITED) as device:
        found = autoaccum.fit(model, samples, device="cpu", progress=False, cache=False, **given)
    reports = [record for record in seen if isinstance(record, StepReport)]
    return Left(
        [value.detach().clone() for value in found.model.state_dict().values()],
        [report.loss for report in reports],
        [report.micro_batches for report in reports],
        [report.memory_saving for report in reports],
        sum(report.replays for report in reports),
        device.peak,
        [event.new for event in seen if isinstance(event, MemorySaving)],
        sum(isinstance(event, Recomputed) for event in seen),
        [str(event) for event in seen if isinstance(event, Notice)],
        sum(isinstance(event, OutOfMemory) for event in seen),
        [[sum(plan) for plan in event.micro_batches] for event in seen if isinstance(event, Shared)],
    )


class Needed(NamedTuple):
    """Bytes that one sample takes on a rank."""

    plainly: int
    least: int

    def share(self, of: float) -> int:
        return int(self.least + of * (self.plainly - self.least))


@pytest.fixture(scope="module")
def unlimited() -> list[Left]:
    return launch(fit, 2)


@pytest.fixture(scope="module")
def needed(unlimited: list[Left]) -> Needed:
    saved = launch(asked, 2, "checkpoint")
    return Needed(max(left.peak for left in unlimited), max(left.peak for left in saved))


def asked(mode: str) -> Left:
    return fit(memory_saving=mode)


def on_second(limit: int, options: dict[str, Any]) -> Left:
    """Have the second rank alone train below a limit."""
    return fit(limit if rank() == 1 else None, **options)


def same_bits(found: list[Left], wanted: list[Left]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine.weights, theirs.weights))
        assert mine.losses == theirs.losses


@pytest.mark.parametrize("share", [0.9, 0.05])
def test_the_rank_that_lacks_memory_goes_down_alone(share: float, unlimited: list[Left], needed: Needed) -> None:
    limit = needed.share(share)
    first, second = found = launch(on_second, 2, limit, {})
    same_bits(found, unlimited)
    assert second.peak <= limit < needed.plainly
    assert (first.changes, first.measured, set(first.levels)) == ([], 0, {"off"})
    assert len(second.changes) == second.measured == 1
    assert set(second.levels) == {second.changes[-1]}


def test_where_it_is_asked_for_all_ranks_save_memory(unlimited: list[Left], needed: Needed) -> None:
    found = launch(asked, 2, "checkpoint")
    same_bits(found, unlimited)
    for left in found:
        assert left.peak < needed.plainly
        assert set(left.levels) == {"checkpoint, every Block"}


def test_sizes_are_found_on_the_level(needed: Needed) -> None:
    options: dict[str, Any] = {"effective_batch": 24, "micro_batch": "auto", "headroom": 0.0, "steps": 12}
    (one,) = launch(on_second, 1, UNLIMITED, {**options, "micro_batch": 4, "memory_saving": "off"})
    first, second = launch(on_second, 2, needed.share(0.9), options)
    assert all(map(torch.equal, first.weights, second.weights))
    assert second.changes
    # Dropout is drawn by micro-batches, so that no two plans are alike: these had none.
    assert one.losses[0] == pytest.approx(first.losses[0], rel=0.2)


def plain() -> nn.Module:
    return Plain()


class Plain(nn.Module):
    """A block that draws nothing, and holds no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def test_ranks_of_unequal_memory_train_what_one_does(needed: Needed) -> None:
    options: dict[str, Any] = {
        "kind": plain, "effective_batch": 12, "micro_batch": "auto", "headroom": 0.0, "steps": 12,
    }  # fmt: skip
    (one,) = launch(on_second, 1, UNLIMITED, {**options, "micro_batch": 12})
    first, second = launch(on_second, 2, needed.share(0.5), options)
    assert all(map(torch.equal, first.weights, second.weights))
    for mine, theirs in zip(first.weights, one.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert first.losses == pytest.approx(one.losses, rel=1e-10)
    assert second.changes
    assert not first.changes


NUMBERS = itertools.count(1)


class Counted(Block):
    """Draws from what nobody can put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / next(NUMBERS))


def refused_on_second(limit: int) -> Any:
    return fit(limit if rank() == 1 else None, kind=Counted if rank() == 1 else Block)


def test_blocks_that_cannot_be_computed_again_end_all_ranks_by_name(needed: Needed) -> None:
    first, second = launch(refused_on_second, 2, needed.share(0.5))
    assert type(second).__name__ == "NothingFitsError"
    assert type(first).__name__ == "RankError"
    assert "NothingFitsError" in str(first)


def refused_where_asked() -> Left:
    return fit(kind=Counted if rank() == 1 else Block, memory_saving="checkpoint")


def test_where_they_were_asked_for_the_run_goes_on_without_on_that_rank() -> None:
    first, second = launch(refused_where_asked, 2)
    assert all(map(torch.equal, first.weights, second.weights))
    assert set(first.levels) == {"checkpoint, every Block"}
    assert set(second.levels) == {"off"}
    assert any("Counted" in told for told in second.notices)


def shallow(kind: Callable[[], nn.Module]) -> nn.Module:
    return Stack(kind, depth=2)


def with_fault(of_rank: int, window: int, operation: int) -> tuple[Left, bool]:
    with oom_in_window(window, operation if rank() == of_rank else 0) as met:
        return fit(memory_saving="checkpoint", effective_batch=4, steps=3, model=shallow), met.is_reached


def at_every_operation(of_rank: int, window: int, stride: int, first: int) -> tuple[int, list[int], int]:
    """Return the last operation, those after which a run has left other bits, and the replays of all."""
    (clean, _), operation, wrong, replays = with_fault(0, window, 0), first, list[int](), 0
    while True:
        found, is_reached = with_fault(of_rank, window, operation)
        if not (all(map(torch.equal, found.weights, clean.weights)) and found.losses == clean.losses):
            wrong.append(operation)
        replays += found.replays
        if not any(_told(is_reached)):
            return operation, wrong, replays
        operation += stride


@strides(131)
@pytest.mark.parametrize("window", [1, 3])  # compared, and not
def test_memory_that_runs_out_anywhere_leaves_the_same_bits(window: int, stride: int) -> None:
    for first, by in launches(stride):
        for of_rank in (0, 1):
            found = launch(at_every_operation, 2, of_rank, window, by, first)
            assert [wrong for _, wrong, _ in found] == [[], []]
            last, _, replays = found[of_rank]
            assert last > 200
            assert replays


def resumed(place: str, limit: int) -> list[Left]:
    """Train below a limit on the second rank, and go on twice as far."""
    options: dict[str, Any] = {"run_dir": place}
    return [on_second(limit, {**options, "steps": steps}) for steps in (3, 6)]


def test_a_run_is_gone_on_with(tmp_path: Any, needed: Needed) -> None:
    limit = needed.share(0.5)
    whole = launch(on_second, 2, limit, {"steps": 6})
    found = launch(resumed, 2, str(tmp_path / "run"), limit)
    same = [mine[1] for mine in found]
    for mine, theirs in zip(same, whole, strict=True):
        assert all(map(torch.equal, mine.weights, theirs.weights))
    assert same[1].changes, "what rank 1 had found is not what rank 0 has saved"


def stepped(limit: int) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    model = Stack().double()
    torch.manual_seed(rank())
    inputs, targets = (each.double()[rank() * 3 : rank() * 3 + 3] for each in data(6))
    with simulated_memory(limit if rank() == 1 else UNLIMITED):
        made = autoaccum.Accumulator(
            model, sgd(model.parameters()), loss_fn=F.mse_loss, micro_batch=1, verify=False, patience=0
        )
        for _ in range(4):
            made.step((inputs, targets))
    changes = [event.new for event in made.events if isinstance(event, MemorySaving)]
    return [p.detach().clone() for p in model.parameters()], changes


def test_in_a_loop_of_ones_own(needed: Needed) -> None:
    (plainly, none), _ = launch(stepped, 2, UNLIMITED)
    (first, of_first), (second, of_second) = launch(stepped, 2, needed.share(0.05))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, plainly))
    assert (none, of_first) == ([], [])
    assert of_second
