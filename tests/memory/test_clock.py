"""The clock in use: the machine's own, or one that a test has put in its place."""

from __future__ import annotations

import time
from threading import Thread

import pytest

from autoaccum.memory import clock
from autoaccum.memory.clock import ManualClock


@pytest.mark.machine_clock
def test_the_machine_s_clock_is_in_use() -> None:
    before = time.perf_counter(), time.time()
    now, stamp = clock.now(), clock.stamp()
    assert before[0] <= now <= time.perf_counter()
    assert before[1] <= stamp <= time.time()


def fail_at(expected: float) -> None:
    assert clock.now() == expected
    raise KeyError


def test_another_is_read_within_and_the_one_before_is_put_back() -> None:
    outer, inner = ManualClock(1.0), ManualClock(2.0)
    with clock.using(outer):
        with pytest.raises(KeyError), clock.using(inner):
            fail_at(2.0)
        assert clock.now() == 1.0
    assert clock.now() != 1.0


def test_it_is_read_in_all_threads() -> None:
    seen: list[float] = []
    with clock.using(ManualClock(7.0)):
        thread = Thread(target=lambda: seen.append(clock.now()))
        thread.start()
        thread.join()
    assert seen == [7.0]


def test_to_wait_by_a_manual_clock_moves_it() -> None:
    manual = ManualClock(seconds=5.0, stamp=1000.0)
    with clock.using(manual):
        clock.sleep(2.5)
        manual.advance(1.0)
        assert clock.now() == 8.5
        assert clock.stamp() == 1008.5
