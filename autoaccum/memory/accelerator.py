"""The memory of an accelerator (CUDA, ROCm, XPU), from its caching allocator.

Limits are compared with reserved bytes: what the allocator took from the device, its cache included. That is what other
processes see, and what the allocator itself is told to stop at. It follows that a peak that was reached before
``reset_peak`` can remain as cache and hide a smaller one; ``release`` before a trial whose own peak matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

import torch

from autoaccum.memory.base import Retries, Usage


class AcceleratorMemory:
    """Memory of one device of ``torch.accelerator``."""

    enforced = True
    # The allocator's statistics are a dict of a hundred numbers, built anew for each reading.
    reading_seconds = 0.02

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._retries = Retries()
        self._looked_at: Usage | None = None  # when the limit was read last
        self._sampled_peak = 0  # of the readings since it was reset, where the allocator has no statistics

    @cached_property
    def can_enforce(self) -> bool:
        """Return whether the allocator can be told to stop at a fraction of the device, as on CUDA, ROCm and XPU."""
        return hasattr(self._module, "set_per_process_memory_fraction") and self._fraction() is not None

    def limit(self) -> int:
        """Return the reserved plus the free bytes, or the fraction set for this process if that is less.

        What this process holds outside the allocator (its context, a library's buffers) is in neither term. Nor is a
        fraction heeded that ``enforce`` has set: it may be raised again.
        """
        free, total = self._free_and_total()
        self._looked_at = usage = self.usage()
        # The total alone would be wrong wherever other processes use the device too: what they hold is in no term here.
        return min(usage.used_bytes + free, self._share_of(total))

    def capacity(self) -> int:
        """Return the device's total, or the fraction of it set for this process.

        It is more than could ever be had by what the contexts of processes take, which nobody tells.
        """
        return self._share_of(self._free_and_total()[1])

    def enforce(self, limit_bytes: int | None) -> int | None:
        """Set the fraction at which the allocator stops, at most that of the user; None puts that one back."""
        # Where a user has set another one since, that one is what he wants from now on.
        own = self._fraction_of_user()
        _, _, before_bytes = _enforced.pop(self._device, (None, None, None))
        if limit_bytes is not None:
            self._set_fraction(min(own, limit_bytes / self._free_and_total()[1]))
            # As it is read: the allocator keeps whole bytes, and the fraction that these are.
            _enforced[self._device] = (self._fraction() or own, own, limit_bytes)
            if self.used() > limit_bytes:
                self.release()  # what is reserved stays so, and would leave nothing of the limit
        elif before_bytes is not None:
            self._set_fraction(own)
        return before_bytes

    def usage(self) -> Usage:
        """Return the allocator's figures, from one reading of its statistics."""
        stats = self._statistics()
        if stats is None:
            # All that the device tells is what all processes hold together: differences of it are this one's as well.
            free, total = self._free_and_total()
            self._sampled_peak = max(self._sampled_peak, total - free)
            return Usage(total - free, self._sampled_peak, total - free, self._sampled_peak)
        reserved, allocated = (stats.get(name, {}).get("all", {}) for name in ("reserved_bytes", "allocated_bytes"))
        ooms = stats.get("num_ooms", 0)
        retries = stats.get("num_alloc_retries")
        return Usage(
            used_bytes=reserved.get("current", 0),
            peak_bytes=reserved.get("peak", 0),
            allocated_bytes=allocated.get("current", 0),
            allocated_peak_bytes=allocated.get("peak", 0),
            split_bytes=stats.get("inactive_split_bytes", {}).get("all", {}).get("peak", 0),
            # An allocation that fails in the end has been retried once too; that is an out-of-memory error, which is
            # dealt with already, and no warning of one to come.
            retries=None if retries is None else retries - ooms,
            ooms=ooms,
        )

    def used(self) -> int:
        """Return the bytes that the allocator holds now."""
        return self.usage().used_bytes

    def peak(self) -> int:
        """Return the most bytes that the allocator held since ``reset_peak``."""
        return self.usage().peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        self._sampled_peak = 0
        # Older versions refuse it before the first allocation, and allocators that a user has plugged in always.
        with suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give the allocator's cache back to the device."""
        torch.accelerator.empty_cache()

    def strained(self) -> str | None:
        """Say that the allocator empties its cache again and again to find memory, if so."""
        # By the reading of the limit, where one was just made: a look is one reading.
        usage, self._looked_at = self._looked_at or self.usage(), None
        return self._retries.reason(usage.retries)

    def _statistics(self) -> Mapping[str, Any] | None:
        """Return the allocator's statistics, nested; empty before the first allocation, None where it keeps none."""
        # Nested as they are made: to flatten and to sort them takes longer than all the rest of a reading.
        nested = getattr(self._module, "memory_stats_as_nested_dict", None)
        try:
            if nested is not None:
                return cast("Mapping[str, Any]", nested(self._device))
            return _nested(torch.accelerator.memory_stats(self._device))
        except RuntimeError:  # of an allocator that a user has plugged in
            return None

    def _free_and_total(self) -> tuple[int, int]:
        try:
            return torch.accelerator.get_memory_info(self._device)
        except RuntimeError:  # an XPU that is part of the host's processor, or within WSL, does not tell what is free
            total = self._module.get_device_properties(self._device).total_memory
            stats = self._statistics() or {}
            return total - stats.get("reserved_bytes", {}).get("all", {}).get("current", 0), total

    def _share_of(self, total: int) -> int:
        return int(self._fraction_of_user() * total)

    def _fraction_of_user(self) -> float:
        """Return the fraction that holds without ``enforce``; it is 1.0 where nothing was set."""
        now = self._fraction()
        if now is None:
            return 1.0
        set_here, before, _ = _enforced.get(self._device, (None, now, None))
        return before if now == set_here else now

    def _set_fraction(self, fraction: float) -> None:
        self._module.set_per_process_memory_fraction(fraction, self._device)

    def _fraction(self) -> float | None:
        """Return the fraction at which the allocator stops; None where there is no such thing."""
        try:
            return float(self._module.get_per_process_memory_fraction(self._device))
        except (AttributeError, RuntimeError):
            return None


_enforced: dict[torch.device, tuple[float, float, int]] = {}
"""(the fraction that was set here, the one before, the limit in bytes), of devices on which a limit is enforced.

The fraction belongs to the process and not to a run: whoever else reads the limit has to know which is whose.
"""


def _nested(flat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is used of statistics in the form that they have by their devices' own modules."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        first, _, rest = name.partition(".")
        pool, _, last = rest.partition(".")
        if not rest:
            nested[first] = value
        elif pool == "all":
            nested.setdefault(first, {}).setdefault(pool, {})[last] = value
    return nested
