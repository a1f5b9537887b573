"""The stand-in device for tests: an accelerator in host memory, as strict as a GPU where code may go wrong.

``pytest --device standin`` loads it. What a test can ask of it beyond what torch offers is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.standin.building import SITE, library, missing

__all__ = [
    "Entry",
    "VirtualClock",
    "allocations",
    "fails_at",
    "load",
    "logged",
    "missing",
    "only_there",
    "recorded",
    "stacks_of",
    "touches",
]

only_there = pytest.mark.skipif("STANDIN_LIBRARY" not in os.environ, reason="is about what only the stand-in tells")
"""Skips a test on a GPU, which keeps no log, has its own clock and refuses no memory at will."""

KINDS = ("alloc", "free", "segment", "segment free", "flush", "sync", "copy in", "copy out", "launch")
"""What is in the log: blocks and the segments of the device that they are cut from, flushes of the cache, what waits
for the device, copies, launches."""


def load() -> None:
    """Make the device in this process, and in all that it starts.

    Raises:
        RuntimeError: it cannot be built here.
    """
    os.environ["STANDIN_LIBRARY"] = str(library())
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.pathsep.join(paths).split(os.pathsep)))
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
    importlib.import_module("standin_device")


def _library() -> Any:
    return importlib.import_module("standin_device").library


class Entry(NamedTuple):
    """What happened on the device."""

    kind: str
    """One of ``KINDS``."""
    bytes: int
    """That were asked for, or moved."""
    at: float
    """Seconds of the virtual clock."""
    what: str
    """Why, or which operator."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Entry]]:
    """Record what happens on the devices; the list is filled at the end."""
    device = _library()
    entries: list[Entry] = []
    device.standin_log(1)
    try:
        yield entries
    finally:
        kind, size, at, what = ctypes.c_int(), ctypes.c_int64(), ctypes.c_double(), ctypes.create_string_buffer(200)
        for index in range(device.standin_log_size()):
            device.standin_log_entry(index, kind, size, at, what, 200)
            entries.append(Entry(KINDS[kind.value], size.value, at.value, what.value.decode()))
        device.standin_log(0)


def logged() -> int:
    """Return how many entries the log of ``recorded`` has so far, to tell later what was in between."""
    return int(_library().standin_log_size())


@contextlib.contextmanager
def stacks_of(*kinds: str) -> Iterator[list[tuple[str, str, list[str]]]]:
    """Collect (kind, what, where in Python) of all that happens of some kinds, to find out who is to blame."""
    found: list[tuple[str, str, list[str]]] = []

    def take(kind: int, size: int, what: bytes) -> None:
        if KINDS[kind] in kinds:
            frames = traceback.extract_stack()[:-1]
            found.append((KINDS[kind], what.decode(), [f"{f.filename}:{f.lineno} {f.name}" for f in frames]))

    made = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p)(take)
    _library().standin_callback(made)
    try:
        yield found
    finally:
        _library().standin_callback(None)


def touches() -> int:
    """Return how often anything was done with the devices, or asked of them, since the process began."""
    return int(_library().standin_touches())


def allocations(index: int = 0) -> int:
    """Return how many blocks were asked for on a device since the process began."""
    return int(_library().standin_allocations(index))


@contextlib.contextmanager
def fails_at(number: int, index: int = 0) -> Iterator[None]:
    """Refuse the allocation of that number within it, counted from 1, as a full device does."""
    _library().standin_fail_in(index, number)
    try:
        yield
    finally:
        _library().standin_fail_in(index, 0)


class VirtualClock:
    """A clock that operators move: so much for each launch, and so much for each number on the device's own time.

    A launch returns at once; whoever waits for the device waits until all of its work is done.
    """

    def __init__(self, per_launch: float, per_number: float) -> None:
        """Set the seconds that the host takes for a launch, and the device for each number read or written."""
        self._costs = per_launch, per_number

    def __enter__(self) -> VirtualClock:
        _library().standin_clock(1, *self._costs)
        return self

    def __exit__(self, *_: object) -> None:
        _library().standin_clock(0, 0.0, 0.0)

    def now(self) -> float:
        """Return the seconds of the host."""
        return float(_library().standin_now())

    stamp = now

    def sleep(self, seconds: float) -> None:
        """Let the host do nothing."""
        _library().standin_advance(seconds)
