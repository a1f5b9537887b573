"""What windows take of the memory, on a memory that says what it is told to."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from autoaccum.memory.base import Usage
from autoaccum.planning.attempts import Piece
from autoaccum.step.meter import Meter
from autoaccum.testing import manual_clock

CPU = torch.device("cpu")
PIECE = Piece(0, 8)


class Told:
    """A memory whose peak since the last reset, and use, are set by the test."""

    enforced = can_enforce = False
    reading_seconds = 0.0

    def __init__(self) -> None:
        self.now = self.most = 100
        self.releases = self.ooms = 0
        self.of_tensors: int | None = None  # the most that they held; None: all of it

    def usage(self) -> Usage:
        return Usage(self.now, self.most, self.now, self.of_tensors or self.most, ooms=self.ooms)

    def limit(self) -> int:
        return 1000

    def used(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.now

    def release(self) -> None:
        self.releases += 1
        self.now = 100

    def strained(self) -> None:
        return None


def made(*, is_enforced: bool = False, needs_room: bool = False) -> tuple[Told, Meter]:
    memory = Told()
    return memory, Meter(memory, CPU, is_enforced=is_enforced, needs_room=lambda held, piece, window: needs_room)


def window(memory: Told, meter: Meter, peak: int) -> int | None:
    meter.begin_window(is_searching=False)
    memory.most = peak
    return meter.end_window(is_searching=False, target_bytes=900)


def test_a_peak_is_the_windows_or_that_of_what_came_before_it() -> None:
    memory, meter = made()
    assert window(memory, meter, 500) == 500
    assert meter.peak_bytes == 500
    memory.most = 700  # in the optimizer's step
    assert window(memory, meter, 300) == 300
    assert meter.peak_bytes == 700
    memory.most = 100
    assert window(memory, meter, 300) == 300
    assert meter.peak_bytes == 300


def test_cycles_are_looked_for_where_an_attempt_may_have_left_something(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(1))
    memory, meter = made(is_enforced=True)
    memory.enforced = True

    def looks() -> bool:
        before = len(looked)
        meter.collect()
        return len(looked) > before

    memory.now = 100_000
    assert looks(), "nobody has ever looked"
    memory.now += 50  # a number of somebody's
    assert not looks()
    memory.now += 1000  # left by the attempt, or by a callback before it
    assert looks()
    assert not looks(), "it is no garbage"
    memory.now -= 50_000
    assert not looks()
    memory.now += 1000
    assert looks(), "more than the least since then"
    memory.enforced = False  # the resident bytes of a process tell nothing
    assert looks()
    assert looks()


def test_windows_are_measured_so_often_as_readings_are_cheap() -> None:
    memory, meter = made()
    memory.reading_seconds = 5.0
    with manual_clock() as clock:
        assert window(memory, meter, 500) == 500
        assert window(memory, meter, 600) is None
        assert meter.peak_bytes == 500
        meter.begin_window(is_searching=True)
        memory.most = 700
        assert meter.end_window(is_searching=True, target_bytes=900) == 700, "a search measures every window"
        clock.advance(5.0)
        assert window(memory, meter, 800) == 800


@pytest.mark.parametrize(("peak", "expected"), [(400, []), (600, [(200, PIECE, 600), (301, PIECE, 600)])])
def test_room_is_asked_for_where_a_window_takes_more_than_half(peak: int, expected: list[object]) -> None:
    asked: list[object] = []

    def needs_room(held_bytes: int, piece: Piece, window_bytes: int) -> bool:
        asked.append((held_bytes, piece, window_bytes))
        return held_bytes > 300

    memory = Told()
    meter = Meter(memory, CPU, is_enforced=False, needs_room=needs_room)
    window(memory, meter, peak)
    for now in (300, 401):  # 100 were in use when memory was last released
        memory.now = now
        if meter.is_tight:
            meter.make_room(PIECE)
    assert asked == expected
    assert memory.releases == (1 if expected else 0)


def test_where_the_device_refuses_by_itself_no_room_is_made() -> None:
    memory, meter = made(is_enforced=True, needs_room=True)
    window(memory, meter, 950)
    assert not meter.is_tight


def test_a_trial_is_measured_from_released_memory() -> None:
    memory, meter = made()
    told: list[tuple[int, int]] = []
    meter.before_trial = lambda size, length: told.append((size, length))
    meter.begin_window(is_searching=True)
    memory.now = memory.most = 400
    trial = Piece(0, 2, 3, is_trial=True)
    with manual_clock() as clock, meter.measuring(trial) as reading:
        assert memory.peak() == 100
        memory.most = 350
        clock.advance(2.5)
    assert (reading.piece, reading.peak_bytes, reading.seconds) == (trial, 350, 2.5)
    assert told == [(2, 3)]
    assert meter.end_window(is_searching=True, target_bytes=900) == 400, "also what was reached before the trial"


def test_a_trial_says_what_tensors_held_and_whether_memory_ran_out_within_it() -> None:
    memory, meter = made()
    memory.ooms = 3
    for ooms, tensors, expected in ((3, None, (350, None, False)), (4, 290, (350, 290, True))):
        with meter.measuring(Piece(0, 2, is_trial=True)) as reading:
            memory.most, memory.ooms, memory.of_tensors = 350, ooms, tensors
        assert (reading.peak_bytes, reading.allocated_bytes, reading.fell_short) == expected


@pytest.mark.parametrize(("can_enforce", "floor"), [(True, 800), (False, 0)])
def test_an_optimizers_step_is_a_floor_where_tensors_are_told_apart(can_enforce: bool, floor: int) -> None:
    memory, meter = made(is_enforced=True)
    memory.can_enforce = can_enforce
    window(memory, meter, 500)
    assert meter.takes_steps is can_enforce
    with meter.stepping() if can_enforce else contextlib.nullcontext():
        memory.most, memory.of_tensors = 900, 800
    assert meter.floor_bytes == floor
    memory.of_tensors = None
    assert window(memory, meter, 300) == 300
    assert meter.peak_bytes == 900


def test_where_the_device_keeps_the_limit_its_cache_is_kept() -> None:
    memory, meter = made(is_enforced=True)
    with meter.aside():
        memory.most = 900
    assert (memory.releases, memory.most) == (0, 100)


def test_a_trial_that_failed_has_no_reading() -> None:
    _, meter = made()
    reading = meter.measuring(Piece(0, 2, is_trial=True))
    with pytest.raises(ValueError, match="broken"), reading:
        raise ValueError("broken")
    assert (reading.peak_bytes, reading.seconds) == (None, None)


def test_what_is_run_aside_is_no_peak_of_the_window() -> None:
    memory, meter = made()
    meter.begin_window(is_searching=False)
    memory.most = 300
    with meter.aside():
        memory.most = memory.now = 900
    assert memory.releases == 1
    memory.most = max(memory.most, 200)
    assert meter.end_window(is_searching=False, target_bytes=900) == 300


def test_what_is_run_aside_may_fail_and_is_released() -> None:
    memory, meter = made()
    meter.begin_window(is_searching=False)
    with contextlib.suppress(ValueError), meter.aside():
        memory.most = memory.now = 900
        raise ValueError
    assert (memory.releases, memory.most) == (1, 100)
