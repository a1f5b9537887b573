"""The memory of an accelerator (CUDA, ROCm, XPU), from its caching allocator, and of Apple's MPS.

Everything is counted in reserved bytes: what the allocator took from the device, its cache included. That is what other
processes see and what the limit is compared with. It follows that a peak that was reached before ``reset_peak`` can
remain as cache and hide a smaller one; ``release`` before a trial whose own peak matters.
"""

from __future__ import annotations

import psutil
import torch

from autoaccum.memory.base import Retries


class AcceleratorMemory:
    """Memory of one device of ``torch.accelerator``."""

    enforced = True
    # The allocator's statistics are a dict of a hundred numbers, built anew for each reading.
    reading_seconds = 0.02

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = Retries()

    def limit(self) -> int:
        """Return the reserved plus the free bytes, or the fraction set for this process if that is less.

        What this process holds outside the allocator (its context, a library's buffers) is in neither term.
        """
        free, total = torch.accelerator.get_memory_info(self._device)
        # The total alone would be wrong wherever other processes use the device too: what they hold is in no term here.
        return min(self.used() + free, self._share_of(total))

    def capacity(self) -> int:
        """Return the device's total, or the fraction of it set for this process.

        It is more than could ever be had by what the contexts of processes take, which nobody tells.
        """
        return self._share_of(torch.accelerator.get_memory_info(self._device)[1])

    def _share_of(self, total: int) -> int:
        # CUDA, ROCm and XPU can be told to stop at a fraction of the whole device; it is 1.0 when nothing was set.
        module = torch.get_device_module(self._device)
        if hasattr(module, "get_per_process_memory_fraction"):
            return int(module.get_per_process_memory_fraction(self._device) * total)
        return total

    def used(self) -> int:
        """Return the bytes that the allocator holds now."""
        return torch.accelerator.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the most bytes that the allocator held since ``reset_peak``."""
        return torch.accelerator.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        # The statistics are empty until the first allocation, and older versions then refuse to reset them.
        if torch.accelerator.memory_stats(self._device):
            torch.accelerator.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give the allocator's cache back to the device."""
        torch.accelerator.empty_cache()

    def strained(self) -> str | None:
        """Say that the allocator emptied its cache to find memory, if so: the device is all but full, or fragmented."""
        # Both counters are missing before the first allocation. An allocation that fails in the end has been retried
        # once too; it is an out-of-memory error, which is dealt with already, and no warning of one to come.
        stats = torch.accelerator.memory_stats(self._device)
        return self._retries.reason(stats.get("num_alloc_retries", 0) - stats.get("num_ooms", 0))


class MpsMemory:
    """Memory of an Apple GPU, which shares the host's; its allocator joined ``torch.accelerator`` only in 2.13."""

    enforced = True
    reading_seconds = 0.02

    def __init__(self) -> None:
        self._peak = 0  # bytes, of the readings since it was reset

    def limit(self) -> int:
        """Return Metal's recommended working set, or what the host still has for it if that is less."""
        return min(torch.mps.recommended_max_memory(), self.used() + psutil.virtual_memory().available)

    def capacity(self) -> int:
        """Return Metal's recommended working set."""
        return torch.mps.recommended_max_memory()

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
