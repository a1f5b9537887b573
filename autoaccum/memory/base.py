"""The one interface to a device's memory. A backend reports and releases; it decides nothing."""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """Memory of one device as this process sees it. All figures are bytes and measure the same thing."""

    # Each backend chooses what it counts (resident bytes, reserved bytes), for only the difference of its own figures
    # matters: a limit, a peak and a use of one backend are compared with each other, never with another backend's.

    enforced: bool
    """Whether an allocation past the limit fails. Else nothing stops it but the kernel, which kills."""

    reading_seconds: float
    """Seconds to wait between readings during training: one may cost as much as micro-batches of a tiny model."""

    def limit(self) -> int:
        """Return the most that this process may use now: what it uses plus what is free to it."""

    def capacity(self) -> int:
        """Return what ``limit`` would be if everybody else gave back what they hold: asked when memory has run out."""

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


class Retries:
    """An allocator's counter of the times it had to free its cache and try again, read now and then."""

    def __init__(self) -> None:
        # None until the first reading: a process may have retried before this run began, which says nothing of it.
        self._last: int | None = None

    def reason(self, count: int) -> str | None:
        """Say why memory is short when the counter has risen since the last call; return None otherwise.

        Args:
            count: the counter now. It may have been reset meanwhile, by whoever else reads the statistics.
        """
        last, self._last = self._last, count
        if last is None or count <= last:
            return None
        risen = count - last
        return f"the allocator had to retry {risen} time{'' if risen == 1 else 's'}"
