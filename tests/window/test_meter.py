"""What windows take of the memory, on a memory that says what it is told to."""

from __future__ import annotations

import pytest
import torch

from autoaccum.errors import NothingFitsError
from autoaccum.planning.tuner import Tuner
from autoaccum.window.meter import Gauge, length_at

CPU = torch.device("cpu")


class Told:
    """A memory whose peak since the last reset, and use, are set by the test."""

    enforced = False
    reading_seconds = 0.0

    def __init__(self) -> None:
        self.now = self.most = 100
        self.releases = 0

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


def made(*, watch: bool = True, largest: int = 8) -> tuple[Told, Tuner, Gauge]:
    memory = Told()
    tuner = Tuner(ceiling=64, limit_bytes=1000, headroom=0.1, search=False, largest=largest)
    return memory, tuner, Gauge(memory, CPU, tuner, watch=watch)


def window(memory: Told, gauge: Gauge, peak: int, sizes: tuple[int, ...] = (8, 8)) -> tuple[int, ...] | None:
    gauge.begin_window()
    memory.most = peak
    return gauge.end_window(sizes, None)


def test_a_peak_is_the_windows_or_that_of_what_came_before_it() -> None:
    memory, _, gauge = made()
    assert window(memory, gauge, 500) is None
    assert gauge.peak_bytes == 500
    memory.most = 700  # in the optimizer's step
    assert window(memory, gauge, 300) is None
    assert gauge.peak_bytes == 700
    memory.most = 100
    assert window(memory, gauge, 300) is None
    assert gauge.peak_bytes == 300


def test_windows_that_pass_the_limit_twice_running_are_cut_smaller() -> None:
    memory, tuner, gauge = made()
    assert window(memory, gauge, 950) is None, "once may be the heap's doing"
    assert memory.releases == 1
    assert window(memory, gauge, 800) is None
    assert window(memory, gauge, 950) is None
    assert window(memory, gauge, 950) == (4, 4, 4, 4)
    assert tuner.largest == 4


def test_where_the_device_refuses_by_itself_nothing_is_done() -> None:
    memory, tuner, gauge = made(watch=False)
    assert [window(memory, gauge, 950) for _ in range(3)] == [None] * 3
    assert (memory.releases, tuner.largest) == (0, 8)


def test_the_smallest_is_not_cut_smaller() -> None:
    memory, _, gauge = made(largest=1)
    assert [window(memory, gauge, 950, (1, 1)) for _ in range(3)] == [None] * 3


def test_room_is_made_only_when_the_next_peak_would_pass_the_target() -> None:
    memory, _, gauge = made()
    window(memory, gauge, 600)
    memory.now = 300  # 200 more than when memory was last released, and 600 to come: within 900
    gauge.make_room(8, 1)
    assert memory.releases == 0
    memory.now = 401
    gauge.make_room(8, 1)
    assert memory.releases == 1


def test_a_trial_is_measured_from_released_memory_and_told() -> None:
    memory, tuner, gauge = made()
    gauge.begin_window()
    memory.now = memory.most = 400
    started = gauge.begin_trial()
    assert memory.peak() == 100
    memory.most = 350
    gauge.end_trial(2, 1, started)
    (trial,) = tuner.history
    assert (trial.micro_batch, trial.fits, trial.peak_bytes, trial.length) == (2, True, 350, 1)
    assert trial.seconds is not None
    assert gauge.end_window((2,), None) is None
    assert gauge.peak_bytes == 400, "also what was reached before the trial"


def test_the_smallest_trial_past_the_limit_is_an_error() -> None:
    memory, _, gauge = made()
    started = gauge.begin_trial()
    memory.most = 1001
    with pytest.raises(NothingFitsError):
        gauge.end_trial(1, 1, started)


def test_the_length_of_a_micro_batch_is_that_of_its_first_sample() -> None:
    assert length_at(None, 5) == 1
    assert length_at((9, 7, 3), 1) == 7
