"""The clock: everything that decides or reports by time reads it here, so that tests can give one of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """A source of the time that can also wait."""

    def now(self) -> float:
        """Return seconds since some fixed moment; they never go back."""

    def stamp(self) -> float:
        """Return seconds since 1970 in UTC, for what people read."""

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""


class ManualClock:
    """A clock that stands still until it is moved; to wait by it moves it."""

    def __init__(self, seconds: float = 0.0, stamp: float = 0.0) -> None:
        """Set the clock: it shows ``seconds`` now, and its second 0 was at ``stamp``, in seconds since 1970."""
        self._seconds = seconds
        self._stamp = stamp

    def now(self) -> float:
        """Return the seconds that it shows."""
        return self._seconds

    def stamp(self) -> float:
        """Return the time of day that it shows, in seconds since 1970."""
        return self._stamp + self._seconds

    def advance(self, seconds: float) -> None:
        """Move it forward."""
        self._seconds += seconds

    # Whoever waits by it would wait for ever if waiting did not move it.
    sleep = advance


# One clock for the process and not one for each run: lines, records and checkpoints of one run are written by many
# objects, some of them in threads of their own, and all of their times have to agree. They are read as ``clock.now()``,
# so that the function of the clock in use is called itself: it is asked several times in a window of 100 µs.
now: Callable[[], float] = time.perf_counter
"""Return the seconds of the clock in use, to measure and to wait by."""
stamp: Callable[[], float] = time.time
"""Return the time of day of the clock in use, in seconds since 1970."""
sleep: Callable[[float], None] = time.sleep
"""Wait by the clock in use."""


@contextmanager
def using(clock: Clock) -> Iterator[None]:
    """Make all threads of this process read that clock; put the one before back at the end."""
    global now, stamp, sleep
    before = now, stamp, sleep
    now, stamp, sleep = clock.now, clock.stamp, clock.sleep
    try:
        yield
    finally:
        now, stamp, sleep = before
