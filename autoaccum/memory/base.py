"""The one interface to a device's memory. A backend reports and releases; it decides nothing."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """What a memory says of this process at one moment: one reading, so that its figures belong together."""

    used_bytes: int
    """What is compared with the limit: what the allocator took from the device, its cache included."""
    peak_bytes: int
    """The most of it at once since ``reset_peak``."""
    allocated_bytes: int
    """What tensors hold of it; the same as ``used_bytes`` where nobody tells them apart."""
    allocated_peak_bytes: int
    """The most that tensors held at once since ``reset_peak``: without the steps in which an allocator grows."""
    split_bytes: int = 0
    """What no flush of the cache gives back although no tensor holds it: the rests of segments that are in use."""
    retries: int | None = None
    """How often the allocator emptied its cache to find memory, and found it; None where nobody counts."""
    ooms: int = 0
    """How often it did not find any, also where whoever asked made do without."""


class Memory(Protocol):
    """Memory of one device as this process sees it. All figures are bytes and measure the same thing."""

    # Each backend chooses what it counts (resident bytes, reserved bytes), for only the difference of its own figures
    # matters: a limit, a peak and a use of one backend are compared with each other, never with another backend's.

    enforced: bool
    """Whether an allocation past the limit fails. Else nothing stops it but the kernel, which kills."""

    @property
    def can_enforce(self) -> bool:
        """Return whether ``enforce`` makes what passes a limit of one's own fail too."""

    reading_seconds: float
    """Seconds to wait between readings during training: one may cost as much as micro-batches of a tiny model."""

    def limit(self) -> int:
        """Return the most that this process may use now: what it uses plus what is free to it."""

    def capacity(self) -> int:
        """Return what ``limit`` would be if everybody else gave back what they hold: asked when memory has run out."""

    def usage(self) -> Usage:
        """Return all that is known of this process now, from one reading."""

    def enforce(self, limit_bytes: int | None) -> int | None:
        """Refuse from now on what passes these bytes; return the limit that was enforced before. None is none.

        What is held already stays, but for what only the allocator holds. Only where ``can_enforce``.
        """

    def used(self) -> int:
        """Return what this process uses now."""

    def peak(self) -> int:
        """Return the most that was used at once since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""

    def release(self) -> None:
        """Give memory that only the allocator still holds back to the device. For searches, not for every window."""

    def strained(self) -> str | None:
        """Say why memory became short since the last call although nothing failed; return None when it did not.

        The first call has nothing to compare with and returns None. Cheap enough for every window.
        """


LOOKS = 16
"""Looks over which retries are judged."""
TOO_OFTEN = 0.5
"""Share of the looks that found retries from which on these cost time worth saving."""


class Retries:
    """An allocator's counter of the times it had to free its cache and try again, read now and then.

    A single retry is harmless: where sizes vary the cache fills up at any size of micro-batch, and is emptied once in
    a while. It costs the time to give memory back and to take it again. That counts only where it is done in every
    other window or more, so it is judged over several.
    """

    def __init__(self) -> None:
        # None until the first reading: a process may have retried before this run began, which says nothing of it.
        self._last: int | None = None
        self._risen: deque[int] = deque(maxlen=LOOKS)  # by how much, at each of the last looks

    def reason(self, count: int | None) -> str | None:
        """Say that retries keep happening, if they do; after that the looks are counted anew.

        Args:
            count: the counter now; None where nobody counts. It may have been reset meanwhile, by whoever else reads
                the statistics.
        """
        if count is None:
            return None
        last, self._last = self._last, count
        if last is None:
            return None
        self._risen.append(max(0, count - last))
        often = sum(risen > 0 for risen in self._risen)
        if len(self._risen) < LOOKS or often < TOO_OFTEN * LOOKS:
            return None
        self._risen.clear()
        return f"the allocator had to empty its cache between {often} of the last {LOOKS} looks at it"
