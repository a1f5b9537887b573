"""What is tried again at once, what is waited for, and what is given up: by a clock that waiting moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autoaccum.events import Waiting
from autoaccum.memory.clock import ManualClock
from autoaccum.memory.limit import Limit
from autoaccum.memory.waiting import AT_ONCE, LONGEST_WAIT, Patience, Shortage
from autoaccum.testing import manual_clock


class Device:
    """Others hold memory of it until some second of the clock."""

    enforced, can_enforce = True, False

    def __init__(self, clock: ManualClock, *, total: int = 1000, free: int = 1000, back_at: float = 1e9) -> None:
        self._clock, self._total, self._free, self._back_at = clock, total, free, back_at

    def limit(self) -> int:
        return self._total if self._clock.now() >= self._back_at else self._free

    def capacity(self) -> int:
        return self._total


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock() as given:
        yield given


def patience(device: Any, seconds: float, memory_limit: Any = None) -> tuple[Patience, list[Waiting]]:
    said: list[Waiting] = []
    return Patience(Limit(device, memory_limit), seconds, said.append, step=3, phase="training"), said


def shortage(peak_bytes: int, text: str = "CUDA out of memory.", **options: Any) -> Shortage:
    return Shortage(micro_batch=1, peak_bytes=peak_bytes, error=torch.OutOfMemoryError(text), **options)


ASKED = "CUDA out of memory. Tried to allocate 500 bytes. GPU 0 has"


def tries(made: Patience, failure: Shortage, clock: ManualClock, **options: Any) -> list[float]:
    """The seconds at which it is tried again, until it is given up."""
    found = []
    while made.may_pass(failure, **options):
        found.append(clock.now())
    return found


def test_where_memory_was_free_it_is_tried_at_once_and_then_after_longer_and_longer_waits(clock: ManualClock) -> None:
    made, said = patience(Device(clock), 60.0)
    assert tries(made, shortage(100), clock) == [0.0] * AT_ONCE + [1.0, 3.0, 7.0, 15.0, 31.0, 60.0]
    event = Waiting(step=3, phase="training", micro_batch=1, needed_bytes=100, limit_bytes=1000, seconds=60.0)
    assert said == [event], "once, and not for the tries at once"


def test_without_patience_nothing_is_waited_for(clock: ManualClock) -> None:
    made, said = patience(Device(clock), 0.0)
    assert tries(made, shortage(100), clock) == [0.0] * AT_ONCE
    assert said == []


def test_what_all_of_the_memory_would_not_do_for_is_given_up_at_once(clock: ManualClock) -> None:
    for failure in (shortage(600, ASKED), shortage(1001), shortage(1001, ran=True)):
        made, said = patience(Device(clock), 60.0)
        assert tries(made, failure, clock) == []
        assert said == []
    made, _ = patience(Device(clock), 60.0)
    assert tries(made, shortage(1), clock, least_bytes=1001) == [], "it was seen to need more"


def test_of_what_ran_the_text_of_no_error_tells_the_need(clock: ManualClock) -> None:
    made, _ = patience(Device(clock), 0.0)
    assert tries(made, shortage(600, ASKED, ran=True), clock) == [0.0] * AT_ONCE


def test_memory_that_others_hold_is_taken_as_soon_as_it_is_back(clock: ManualClock) -> None:
    made, said = patience(Device(clock, free=550, back_at=5.0), 60.0)
    assert made.may_pass(shortage(100, ASKED))
    assert clock.now() == 1.0, "the error may have asked for more than is needed"
    assert made.may_pass(shortage(100, ASKED))
    assert made.may_pass(shortage(100, ASKED))
    assert (clock.now(), len(said), said[0].needed_bytes, said[0].limit_bytes) == (5.0, 1, 600, 550)


def test_memory_that_never_comes_back_is_waited_for_as_long_as_patience_lasts(clock: ManualClock) -> None:
    made, said = patience(Device(clock, free=550), 100.0)
    found = tries(made, shortage(100, ASKED), clock)
    assert found == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0, 100.0], f"{LONGEST_WAIT} apart at most"
    assert len(said) == 1


def test_a_limit_of_the_users_own_is_given_back_by_nobody(clock: ManualClock) -> None:
    made, _ = patience(Device(clock), 60.0, memory_limit=600)
    assert tries(made, shortage(601), clock) == []


def test_a_function_may_allow_more_later(clock: ManualClock) -> None:
    made, _ = patience(Device(clock), 60.0, memory_limit=lambda: 900 if clock.now() >= 2 else 300)
    assert made.may_pass(shortage(301))
    assert made.may_pass(shortage(301))
    assert clock.now() == 2.0


def test_patience_may_have_no_end(clock: ManualClock) -> None:
    made, _ = patience(Device(clock, free=550, back_at=1e5), float("inf"))
    while clock.now() < 1e5:
        assert made.may_pass(shortage(100, ASKED))
    assert clock.now() == 1e5
