"""Gives the library a clock that goes on with work alone, so that what it decides by time is the same anywhere.

It is never moved by being read: reading it more often, or less often, changes nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import autoaccum

TICK = 2.0**-20
"""Is what every time is a multiple of, so that differences of times are exact wherever the clock stands."""


class Clock:
    """Stands still but for what work it is told of."""

    def __init__(self, start: float = 1024.0) -> None:
        """Begin at ``start`` seconds, which is not 0, as no machine's clock is."""
        self._ticks = round(start / TICK)

    def now(self) -> float:
        """Return the seconds."""
        return self._ticks * TICK

    def advance(self, seconds: float) -> None:
        """Go on."""
        self._ticks += round(seconds / TICK)


_given: list[Clock] = []


def work(seconds: float) -> None:
    """Take so long, by the clock that is given; where none is, take no time at all."""
    if _given:
        _given[-1].advance(seconds)


class _Time(ModuleType):
    """Stands in for the module ``time``: two of its functions are the clock's, and all others its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("time")
        self.perf_counter = self.monotonic = clock.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Whole:
    """The clock as the library has it: its seconds are given, the time of day and waiting are the machine's."""

    stamp = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now


@contextmanager
def given_clock(clock: Clock) -> Iterator[Clock]:
    """Make it what the library reads in this process, and nothing else does: torch, tqdm and threads keep their own.

    This is the one place that knows where the library reads the time.
    """
    import_all()
    if "autoaccum.memory.clock" in sys.modules:
        reads: Any = sys.modules["autoaccum.memory.clock"]
        _given.append(clock)
        try:
            with reads.using(_Whole(clock)):
                yield clock
        finally:
            _given.pop()
        return
    instead = {id(time): _Time(clock), id(time.perf_counter): clock.now, id(time.monotonic): clock.now}
    before: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "autoaccum" and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in instead:
                    before.append((module, attribute, value))
                    setattr(module, attribute, instead[id(value)])
    _given.append(clock)
    try:
        yield clock
    finally:
        _given.pop()
        for module, attribute, value in before:
            setattr(module, attribute, value)


def import_all() -> None:
    """Import what the library would import later, while the clock is given."""
    for found in pkgutil.walk_packages(autoaccum.__path__, "autoaccum."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError:  # of another library's trainer, whose extra is not installed
            if not found.name.startswith("autoaccum.integrations."):
                raise
