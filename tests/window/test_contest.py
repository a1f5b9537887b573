"""A rung is chosen by time: the next one is tried where that may gain, and kept if windows are faster.

The clock moves in the forward of the whole model, which no rung computes twice: by as much for each micro-batch, so that
few large ones are faster, or by as much for each sample, so that nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import autoaccum
from autoaccum.events import MemorySaving, OutOfMemory, Planned, StepReport
from autoaccum.memory.clock import ManualClock
from autoaccum.memory.simulated import active_simulation
from autoaccum.planning import contest
from autoaccum.testing import manual_clock, simulated_memory
from tests.window.test_saving import UNLIMITED, Stack, data, of, sgd

STEPS = 30


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock() as given:
        yield given


class Timed(Stack):
    def __init__(self, tick: Callable[[int], None]) -> None:
        super().__init__()
        self.tick = tick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tick(len(x))
        return super().forward(x)


def train(limit: int, tick: Callable[[int], None], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    given: dict[str, Any] = {"effective_batch": 8, "steps": STEPS, "verify": False, **options}
    with simulated_memory(limit) as device:
        found = autoaccum.fit(
            Timed(tick), data(16), loss_fn=F.mse_loss, optimizer=sgd, device="cpu", progress=False, cache=False,
            **given,
        )  # fmt: skip
    return found, device


@pytest.fixture(scope="module")
def limit() -> int:
    """Holds one sample plainly, and two with all blocks computed twice."""
    plain, twice = (
        train(UNLIMITED, lambda samples: None, micro_batch=size, memory_saving=how, steps=2)[1].peak
        for size, how in ((1, "off"), (2, "checkpoint"))
    )
    assert twice < plain
    return int(plain * 1.1)


@pytest.fixture(scope="module")
def below() -> int:
    """Holds no sample plainly, one where half of the blocks are computed twice, and two where all are."""
    plain, two, three = (
        train(UNLIMITED, lambda samples: None, micro_batch=size, memory_saving=how, steps=2)[1].peak
        for size, how in ((1, "off"), (2, "checkpoint"), (3, "checkpoint"))
    )
    assert two < plain
    return int(min(plain, three) - 1)


def rungs(found: Any) -> list[str]:
    return [change.new for change in of(found, MemorySaving)]


def per_micro_batch(clock: ManualClock) -> Callable[[int], None]:
    return lambda samples: clock.advance(1.0)


def per_sample(clock: ManualClock) -> Callable[[int], None]:
    return lambda samples: clock.advance(float(samples))


def test_it_is_kept_where_it_is_faster(clock: ManualClock, limit: int) -> None:
    found, device = train(limit, per_micro_batch(clock))
    assert rungs(found)
    assert "off" not in rungs(found)
    last = found.history[-1]
    assert max(last.micro_batches) > 1
    assert last.memory_saving == rungs(found)[-1]
    assert device.peak <= limit
    assert of(found, MemorySaving)[0].reason == (
        "tried, for with more at a time a sample may take less than the 1 s that it takes now, in micro-batches of 1"
    )
    plainly, _ = train(limit, per_micro_batch(clock), memory_saving="off")
    assert {max(report.micro_batches) for report in plainly.history} == {1}
    assert [report.effective_batch for report in found.history] == [8] * STEPS


def test_what_is_no_faster_is_left_and_the_plan_of_before_is_used_at_once(clock: ManualClock, limit: int) -> None:
    found, _ = train(limit, per_sample(clock))
    assert rungs(found)[-1] == "off"
    left = of(found, MemorySaving)[-1]
    assert left.reason == "gone back, for a sample took 1 s, and 1 s before, in micro-batches of 1"
    assert not [event for event in of(found, OutOfMemory) if event.step >= left.step], "nothing is searched for again"
    assert [event.step for event in of(found, Planned)][-1] == left.step - 1
    assert {report.memory_saving for report in found.history[left.step :]} == {"off"}
    assert {report.micro_batches for report in found.history[left.step :]} == {(1,) * 8}


def test_one_that_holds_no_more_samples_is_left_within_the_window_that_shows_it(clock: ManualClock, limit: int) -> None:
    def tick(samples: int) -> None:
        clock.advance(1.0)
        if samples > 1:  # what the tape of a forward does not foretell
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found, _ = train(limit, tick)
    there, back = of(found, MemorySaving)[:2]
    assert (there.old, back.new, back.step) == ("off", "off", there.step)
    assert back.reason == (
        "gone back, for there was room for no more samples at a time than before, and each takes more to compute"
    )
    assert [event.micro_batch for event in of(found, OutOfMemory) if event.step == there.step] == [2]
    assert {report.memory_saving for report in found.history} == {"off"}, "no window is run there"
    assert {report.micro_batches for report in found.history} == {(1,) * 8}
    assert found.history[there.step - 1].replays == 1


def test_one_that_does_not_settle_is_left(clock: ManualClock, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "LONGEST", 2)
    found, _ = train(limit, per_micro_batch(clock))
    there, back = of(found, MemorySaving)[-2:]
    assert (there.new, back.new, back.step) == ("checkpoint, model.blocks", "off", there.step + 3)
    assert back.reason == "gone back, for the plan was not settled after 2 windows"
    assert {report.memory_saving for report in found.history[back.step :]} == {"off"}


class TestBelow:
    """A rung that holds one sample is left out where the next is likely to hold two, and tried where it may be faster."""

    ALL, HALF = "checkpoint, model.blocks", "checkpoint, every 2nd of model.blocks"

    def test_the_rung_that_holds_one_is_left_out(self, clock: ManualClock, below: int) -> None:
        found, device = train(below, per_micro_batch(clock), headroom=0.0)
        assert rungs(found) == [self.ALL]
        assert {report.micro_batches for report in found.history[1:]} == {(2,) * 4}
        assert device.peak <= below
        assert [report.effective_batch for report in found.history] == [8] * STEPS
        given, _ = train(below, per_micro_batch(clock), headroom=0.0, micro_batch=1)
        assert rungs(given) == [self.HALF], "a size of the user's own is no larger on the next rung"

    def test_it_is_tried_where_it_may_be_faster_and_kept_where_it_is(self, clock: ManualClock, below: int) -> None:
        found, _ = train(below, per_sample(clock), headroom=0.0)
        assert rungs(found) == [self.ALL, self.HALF]
        assert of(found, MemorySaving)[1].reason == (
            "tried, for with less to compute a sample may take less than the 1 s that it takes now, in micro-batches of 2"
        )
        assert found.history[-1].micro_batches == (1,) * 8
        assert not [event for event in of(found, OutOfMemory) if event.step > 1 and event.micro_batch == 1]

    def test_it_is_left_again_where_it_is_not(self, clock: ManualClock, below: int) -> None:
        found, _ = train(below, lambda samples: clock.advance(samples if samples > 1 else 1.1), headroom=0.0)
        assert rungs(found) == [self.ALL, self.HALF, self.ALL]
        back = of(found, MemorySaving)[-1]
        assert back.reason == "gone back, for a sample took 1.1 s, and 1 s before, in micro-batches of 2"
        assert not [event for event in of(found, OutOfMemory) if event.step >= back.step], "nothing is searched for"
        assert {report.micro_batches for report in found.history[back.step :]} == {(2,) * 4}

    def test_it_is_tried_once_however_often_the_effective_batch_changes(self, clock: ManualClock, below: int) -> None:
        found, _ = train(
            below, lambda samples: clock.advance(samples if samples > 1 else 1.1), headroom=0.0, steps=50,
            effective_batch=lambda progress: [4, 6][progress.step // 11 % 2],
        )  # fmt: skip
        assert rungs(found) == [self.ALL, self.HALF, self.ALL]

    @pytest.mark.parametrize("more", [1.06, 1.5])
    def test_it_is_left_for_the_highest_as_soon_as_there_is_more_memory(
        self, more: float, clock: ManualClock, below: int
    ) -> None:
        """It was left out to be faster, so nobody knows under which limit it fails: that of the one above is known."""

        def move(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == 8:
                simulation = active_simulation()
                assert simulation is not None
                simulation.limit = int(more * below)

        found, _ = train(below, per_micro_batch(clock), headroom=0.0, callbacks=[move])
        assert rungs(found)[:2] == [self.ALL, "off"]

    def test_a_run_that_is_resumed_comes_to_the_same_rung(self, clock: ManualClock, below: int, tmp_path: Path) -> None:
        stops = {2, 5, 7}

        def end(record: Any) -> None:
            if isinstance(record, StepReport) and record.step in stops:
                raise autoaccum.StopTraining

        def slower(samples: int) -> None:
            clock.advance(samples if samples > 1 else 1.1)

        whole, _ = train(below, slower, headroom=0.0)
        for _ in range(len(stops) + 1):
            found, _ = train(below, slower, headroom=0.0, run_dir=tmp_path, checkpoint_every=1, callbacks=[end])
        assert found.history[-1].memory_saving == whole.history[-1].memory_saving
        assert found.history[-1].micro_batches == whole.history[-1].micro_batches


@pytest.mark.parametrize("options", [{"memory_saving": "off"}, {"micro_batch": 1}])
def test_nothing_is_tried_where_the_user_has_said_how(options: dict[str, Any], clock: ManualClock, limit: int) -> None:
    assert rungs(train(limit, per_micro_batch(clock), **options)[0]) == []


def test_nothing_is_tried_where_windows_are_not_cut_small(clock: ManualClock) -> None:
    assert rungs(train(UNLIMITED, per_micro_batch(clock))[0]) == []


@pytest.mark.parametrize("stop", range(4, 16, 3))
def test_a_run_that_is_resumed_in_its_midst_comes_to_the_same_rung(
    stop: int, clock: ManualClock, limit: int, tmp_path: Path
) -> None:
    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == stop:
            raise autoaccum.StopTraining

    for tick in (per_micro_batch(clock), per_sample(clock)):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        whole, _ = train(limit, tick, steps=2 * STEPS)
        train(limit, tick, steps=2 * STEPS, run_dir=place, checkpoint_every=1, callbacks=[end])
        found, _ = train(limit, tick, steps=2 * STEPS, run_dir=place, checkpoint_every=1)
        assert found.history[-1].memory_saving == whole.history[-1].memory_saving
        assert found.history[-1].micro_batches == whole.history[-1].micro_batches
