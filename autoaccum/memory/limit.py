"""The limit: how many bytes this process may use on its device, as a user said it and as it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autoaccum._checks import function, no_bytes
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
        # What the device gives: a limit below that is kept by nobody but us, where the device cannot be told of it.
        total_bytes = memory.limit()
        self._memory = memory
        self._asked_bytes = asked_limit(memory_limit, total_bytes, memory.limit)
        # What was said once and for all stays below what others give back; a function may say anything, some day.
        self._is_fixed = memory_limit is not None and not callable(memory_limit)
        self._is_kept = False  # whether the device has been told
        self._kept_bytes: int | None = None  # what it has been told
        # Kept, for to ask may cost as much as a window of a tiny model: see ``Memory.reading_seconds``.
        self.bytes = total_bytes if memory_limit is None else self.now()
        """The same as it was when memory was last looked at."""
        self.is_enforced = memory.enforced and (memory.can_enforce or self.bytes >= total_bytes)
        """Whether the device refuses what passes the limit; else nobody keeps it but us."""

    def now(self) -> int:
        """Return the bytes that may be used at this moment; the device is told when what was asked for has moved."""
        asked_bytes, available_bytes = self._asked_bytes(), self._memory.limit()
        if self._is_kept and asked_bytes != self._kept_bytes:
            self._kept_bytes = asked_bytes
            self._memory.enforce(asked_bytes)
        return available_bytes if asked_bytes is None else min(asked_bytes, available_bytes)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the device refuse within it what passes the limit, where it can be told; nobody else is bound by it."""
        if self._is_kept or not self._memory.can_enforce or (asked_bytes := self._asked_bytes()) is None:
            yield
            return
        self._is_kept, self._kept_bytes, before_bytes = True, asked_bytes, None
        try:
            before_bytes = self._memory.enforce(asked_bytes)
            yield
        finally:
            self._is_kept = False
            self._memory.enforce(before_bytes)

    def most(self) -> int:
        """Return the bytes that the limit may come to, should others give back what they hold: never below it."""
        capacity = self._memory.capacity()
        if self._is_fixed:
            capacity = min(capacity, self._asked_bytes() or capacity)
        return max(capacity, self.now())

    def read(self) -> int:
        """Look at the limit; return what it is now."""
        self.bytes = self.now()
        return self.bytes


def asked_limit(value: MemoryLimit, first_bytes: int, available_bytes: Callable[[], int]) -> Callable[[], int | None]:
    """Return a function () -> the limit that a user asks for, in bytes; None is all that there is.

    An int or a text is bytes, a float a share. A share may arrive as a text from the command line: ``"0.5"`` is half,
    ``"1"`` is one byte. A function is called each time, and a share that it returns is one of what is available then.

    Args:
        value: as the user said it.
        first_bytes: what is available at first, of which a share is one for good: a share of what is available later
            would move whenever others take memory or give it back.
        available_bytes: () -> what is available.

    Raises:
        ArgumentError: it is no number of bytes, and no share; for a function, when it is called.
    """
    if value is None:
        return lambda: None
    if callable(value):
        function("memory_limit", value, (), "bytes, a text or a share")
        asked = value
        cure = "The function passed as memory_limit returned it."
        return lambda: _limit_bytes(asked(), available_bytes, "", cure)
    fixed = _limit_bytes(value, lambda: first_bytes, ", or a function that returns one of these", "")
    if not isinstance(value, float) and not (isinstance(value, str) and "." in value):  # a share of what is simulated
        no_bytes("memory_limit", fixed, ", or a share such as memory_limit=0.5")
    return lambda: fixed


def _limit_bytes(value: object, available_bytes: Callable[[], int], or_else: str, cure: str) -> int:
    """Return the limit that a value stands for, which is no function; the texts go into the errors."""
    accepted = f"bytes as an int, a text such as '8GiB', or a share of the memory such as 0.5{or_else}"
    # True would be one byte: bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ArgumentTypeError("memory_limit", value, accepted, cure)
    # Only a text with a point is a share, and no unit may follow: "1.5GiB" is bytes, and so is "1".
    if isinstance(value, str) and value.strip().replace(".", "", 1).isdigit() and "." in value:
        value = float(value)
    if isinstance(value, str) and (percent := value.strip().removesuffix("%").strip()) != value.strip():
        share = float(percent) / 100 if percent.replace(".", "", 1).isdigit() else 0.5
        raise ArgumentError("memory_limit", value, accepted, f"{value.strip()} is written as {share:g}. {cure}".strip())
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ArgumentError(
                "memory_limit", value, accepted, f"A float is a share above 0 and up to 1. {cure}".strip()
            )
        return int(value * available_bytes())
    try:
        limit = parse_bytes(value)
    except ValueError:
        raise ArgumentError("memory_limit", value, accepted, cure) from None
    if limit < 1:
        raise ArgumentError("memory_limit", value, accepted, cure)
    return limit
