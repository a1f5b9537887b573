"""The clock: everything that decides or reports by time reads it here, so that tests can give one of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
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


class SystemClock:
    """The machine's own clock."""

    # Two clocks on purpose: durations must not jump when the machine's date is set, and dates must not be relative.
    now = staticmethod(time.perf_counter)
    stamp = staticmethod(time.time)
    sleep = staticmethod(time.sleep)


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


# One for the process and not one for each run: lines, records and checkpoints of one run are written by many objects,
# some of them in threads of their own, and all of their times have to agree.
_clock: Clock = SystemClock()


def now() -> float:
    """Return the seconds of the clock in use, to measure and to wait by."""
    return _clock.now()


def stamp() -> float:
    """Return the time of day of the clock in use, in seconds since 1970."""
    return _clock.stamp()


def sleep(seconds: float) -> None:
    """Wait by the clock in use."""
    _clock.sleep(seconds)


@contextmanager
def using(clock: Clock) -> Iterator[None]:
    """Make all threads of this process read that clock; put the one before back at the end."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
