"""The memory of an Apple GPU, from Metal."""

from __future__ import annotations

import psutil
import torch

from autoaccum.memory.base import Usage


class MpsMemory:
    """Memory of an Apple GPU, which shares the host's; its allocator joined ``torch.accelerator`` only in 2.13."""

    # Metal gives up to 1.7 times what it recommends, and the host swaps.
    enforced = can_enforce = False
    reading_seconds = 0.02

    def __init__(self) -> None:
        self._peak = 0  # bytes, of the readings since it was reset

    def limit(self) -> int:
        """Return Metal's recommended working set, or what the host still has for it if that is less."""
        return min(torch.mps.recommended_max_memory(), self.used() + psutil.virtual_memory().available)

    def capacity(self) -> int:
        """Return Metal's recommended working set."""
        return torch.mps.recommended_max_memory()

    def enforce(self, limit_bytes: int | None) -> None:
        """Do nothing: Metal does not refuse what passes a limit."""

    def usage(self) -> Usage:
        """Return what Metal holds, and what tensors hold of it now; of the latter it knows no peak."""
        peak, used = self.peak(), self.used()
        return Usage(used, peak, torch.mps.current_allocated_memory(), peak)

    def used(self) -> int:
        """Return the bytes that Metal holds for this process, the allocator's cache included."""
        return torch.mps.driver_allocated_memory()

    def peak(self) -> int:
        """Return the most bytes seen at the calls of ``reset_peak`` and ``peak``.

        Metal keeps no peak of its own, but the allocator keeps the heaps it took, so that its size after a window is
        the window's peak unless the device came under pressure.
        """
        self._peak = max(self._peak, self.used())
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        self._peak = self.used()

    def release(self) -> None:
        """Give the allocator's cache back to Metal."""
        torch.mps.empty_cache()

    def strained(self) -> str | None:
        """Return None, always: Metal does not tell."""
        return None
