"""The limit: how many bytes this process may use on its device, as a user said it and as it is now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoaccum._checks import function
from autoaccum._units import parse_bytes
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.memory.base import Memory

MemoryLimit = int | float | str | Callable[[], int | float | str] | None
"""Bytes, a text, a share of what there is, a function that returns one of these, or ``None`` for all there is."""


class Limit:
    """What may be used of a device's memory, read again whenever that matters."""

    def __init__(self, memory: Memory, memory_limit: MemoryLimit = None) -> None:
        """Read it for the first time.

        Args:
            memory: of the device.
            memory_limit: what the user allows; a share is one of what is available now.

        Raises:
            ArgumentError: it is no number of bytes, and no share.
        """
        # What the device gives: a limit below that is kept by nobody but us.
        total_bytes = memory.limit()
        self.now = moving_limit(memory_limit, memory.limit)
        """() -> bytes that may be used at this moment."""
        self._memory = memory
        # What was said once and for all stays below what others give back; a function may say anything, some day.
        self._fixed_bytes = None if memory_limit is None or callable(memory_limit) else self.now()
        # Kept, for to ask may cost as much as a window of a tiny model: see ``Memory.reading_seconds``.
        self.bytes = self.now()
        """The same as it was when memory was last looked at."""
        self.is_enforced = memory.enforced and self.bytes >= total_bytes
        """Whether the device refuses what passes the limit; else nobody keeps it but us."""

    def most(self) -> int:
        """Return the bytes that the limit may come to, should others give back what they hold: never below it."""
        capacity = self._memory.capacity()
        if self._fixed_bytes is not None:
            capacity = min(capacity, self._fixed_bytes)
        return max(capacity, self.now())

    def read(self) -> int:
        """Look at the limit; return what it is now."""
        self.bytes = self.now()
        return self.bytes


def memory_limit_bytes(value: MemoryLimit, available_bytes: int) -> int:
    """Return a limit in bytes: ``None`` is all that is available, an int or a text bytes, a float that share of it.

    A share may arrive as a text from the command line: ``"0.5"`` is half, ``"1"`` is one byte. A function is called.

    Raises:
        ArgumentError: it is no number of bytes, and no share.
    """
    if value is None:
        return available_bytes
    if callable(value):
        return _limit_bytes(value(), available_bytes, "", "The function passed as memory_limit returned it.")
    return _limit_bytes(value, available_bytes, ", or a function that returns one of these", "")


def _limit_bytes(value: object, available_bytes: int, or_else: str, cure: str) -> int:
    """Return the limit that a value stands for, which is no function; the texts go into the errors."""
    accepted = f"bytes as an int, a text such as '8GiB', or a share of the memory such as 0.5{or_else}"
    # True would be one byte: bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ArgumentTypeError("memory_limit", value, accepted, cure)
    # Only a text with a point is a share, and no unit may follow: "1.5GiB" is bytes, and so is "1".
    if isinstance(value, str) and value.strip().replace(".", "", 1).isdigit() and "." in value:
        value = float(value)
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ArgumentError(
                "memory_limit", value, accepted, f"A float is a share above 0 and up to 1. {cure}".strip()
            )
        return int(value * available_bytes)
    try:
        limit = parse_bytes(value)
    except ValueError:
        raise ArgumentError("memory_limit", value, accepted, cure) from None
    if limit < 1:
        raise ArgumentError("memory_limit", value, accepted, cure)
    # More than there is, is no mistake: the same text may be passed on machines of different sizes.
    return min(limit, available_bytes)


def moving_limit(value: Any, available_bytes: Callable[[], int]) -> Callable[[], int]:
    """Return a function () -> the limit in bytes as it is now; a share is one of what was available at first."""
    if value is None:
        return available_bytes
    if callable(value):
        function("memory_limit", value, (), "bytes, a text or a share")
    # What a function returns is asked for each time, and a share that it returns is one of what is available then.
    if callable(value):
        return lambda: memory_limit_bytes(value(), available_bytes())
    # Worked out once: a share of what is available now would move whenever others take memory or give it back.
    limit = memory_limit_bytes(value, available_bytes())
    return lambda: min(limit, available_bytes())
