"""The one interface to a device's memory. A backend reports and releases; it decides nothing."""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """Memory of one device as this process sees it. All figures are bytes and measure the same thing."""

    enforced: bool
    """Whether an allocation past the limit fails. Else nothing stops it but the kernel, which kills."""

    reading_seconds: float
    """How long to wait between readings during training: one may cost as much as micro-batches of a tiny model."""

    def limit(self) -> int:
        """The most that this process may use now: what it uses plus what is free to it."""

    def used(self) -> int:
        """What this process uses now."""

    def peak(self) -> int:
        """The most that was used at once since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""

    def release(self) -> None:
        """Give memory that only the allocator still holds back to the device. For searches, not for every window."""

    def strained(self) -> str | None:
        """Why memory is short although nothing failed, since the last call; None when it is not, and the first time.

        Cheap enough for every window.
        """


class Retries:
    """An allocator's counter of the times it had to free its cache and try again, read now and then."""

    def __init__(self) -> None:
        self._last: int | None = None

    def reason(self, count: int) -> str | None:
        """Why memory is short, when the counter has risen since the last call; None at the first."""
        last, self._last = self._last, count
        risen = 0 if last is None else count - last
        return f"the allocator had to retry {risen} time{'' if risen == 1 else 's'}" if risen > 0 else None
