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
