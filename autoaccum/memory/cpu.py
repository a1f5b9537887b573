"""The memory of this process on the host: its resident set, and every limit that the system puts on it.

Containers, batch systems and shells each limit memory in their own way, and the kernel enforces the tightest. A limit
that cannot be read is no limit here: the files differ between systems, and some are hidden inside a container.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from autoaccum.memory.base import Usage
from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.procfs import number, read

if sys.platform != "win32":
    import resource


class CpuMemory:
    """Memory of this process on the host.

    Args:
        proc: where procfs is mounted; where it is missing (macOS, Windows), psutil answers.
        cgroup: where the control groups are mounted.
    """

    enforced = can_enforce = False
    # Each figure is a file that the kernel writes out for the reader, and a window of a tiny model takes no longer.
    reading_seconds = 0.02

    def __init__(self, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> None:
        process = Path(proc) / "self"
        self._status_path = str(process / "status")
        self._meminfo_path = str(Path(proc) / "meminfo")
        self._clear_refs_path = str(process / "clear_refs")
        self._groups = ControlGroups(process, Path(cgroup))
        # Both stay 0 while the kernel's own peak can be reset. Where it cannot (some containers forbid it), the first
        # is the kernel's peak at the last reset, which says nothing of what came after; the second is the largest
        # reading since.
        self._stale_peak = 0
        self._sampled_peak = 0

    def limit(self) -> int:
        """Return the resident bytes, plus what the tightest of the system's constraints still leaves free."""
        # The status is read once: resident and free bytes have to be of the same moment.
        status = self._status()
        free = min([self._available(), *self._free_under_rlimits(status)])
        for group in self._groups.all():
            free = min(free, group.free(enough=free))
        # A constraint that was tightened below what is in use leaves less than nothing free.
        return _resident(status) + max(0, free)

    def capacity(self) -> int:
        """Return the machine's memory, or the tightest of the limits on it: those of processes are this one's alone."""
        status = self._status()
        own = [_resident(status) + max(0, free) for free in self._free_under_rlimits(status)]
        groups = [limit for group in self._groups.all() if (limit := group.limit()) is not None]
        return min([self._total(), *own, *groups])

    def enforce(self, limit_bytes: int | None) -> None:
        """Do nothing: resident bytes cannot be limited from within."""

    def usage(self) -> Usage:
        """Return the resident bytes, which are all that is known."""
        peak, used = self.peak(), self.used()
        return Usage(used, peak, used, peak)

    def used(self) -> int:
        """Return the resident bytes."""
        return _resident(self._status())

    def peak(self) -> int:
        """Return the most resident bytes since ``reset_peak``."""
        status = self._status()
        kernel_peak = _field(status, "VmHWM")
        # A peak above the one that could not be reset was reached since: it may be believed.
        if kernel_peak > self._stale_peak:
            return kernel_peak
        # No peak from the kernel, or an old one that could not be reset: the best that is known is what was sampled.
        self._sampled_peak = max(self._sampled_peak, _resident(status))
        return self._sampled_peak

    def reset_peak(self) -> None:
        """Start a new peak from what is resident now."""
        try:
            # proc(5): writing 5 resets the peak resident set to the current one (Linux 4.0).
            with open(self._clear_refs_path, "wb", buffering=0) as file:
                file.write(b"5")
        except OSError:
            self._stale_peak = _field(self._status(), "VmHWM")
            self._sampled_peak = self.used()
        else:
            self._stale_peak = self._sampled_peak = 0

    def release(self) -> None:
        """Give what the C library keeps of freed memory back to the system."""
        # 0 is what to leave at the top of the heap. PyTorch's CPU allocator keeps nothing itself.
        if _malloc_trim is not None:
            _malloc_trim(0)

    def strained(self) -> str | None:
        """Return None: a shortage on the host lowers the limit."""
        return None

    def _status(self) -> bytes:
        return read(self._status_path)

    def _free_under_rlimits(self, status: bytes) -> Iterator[int]:
        """Yield the bytes that each limit of ``setrlimit`` leaves free, where one is set."""
        if sys.platform == "win32":
            return
        anonymous = _field(status, "RssAnon") or _resident(status)
        # Each is held by the kernel against its own count: private writable memory, and all address space. Beyond what
        # is resident they count what was never touched, which stays, and what the C library's heap has given back but
        # keeps to itself, which is used again before any more is asked for: that is no less than is free. The least
        # that was ever seen beyond what is resident is what was never touched; whatever is more is the heap's.
        for which, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(which)
            if soft == resource.RLIM_INFINITY:
                continue
            counted = _field(status, field) or anonymous
            untouched = counted - anonymous
            where = (self._status_path, field)
            _least_untouched[where] = min(untouched, _least_untouched.get(where, untouched))
            yield soft - _least_untouched[where] - anonymous

    def _available(self) -> int:
        """Return the bytes that the machine can give without swapping."""
        # psutil reads the same file, and all of its other lines: it is asked only where there is no such file.
        available = number(read(self._meminfo_path), "MemAvailable")
        return psutil.virtual_memory().available if available is None else available * 1024

    def _total(self) -> int:
        """Return the bytes that the machine has."""
        total = number(read(self._meminfo_path), "MemTotal")
        return psutil.virtual_memory().total if total is None else total * 1024


def _resident(status: bytes) -> int:
    """Return the resident bytes, from psutil where procfs does not tell."""
    return _field(status, "VmRSS") or psutil.Process().memory_info().rss


def _field(status: bytes, name: str) -> int:
    """Return the bytes of one field of ``/proc/self/status``, 0 where it is missing."""
    # proc(5): the file says "kB" and means KiB.
    return (number(status, name) or 0) * 1024


def _find_malloc_trim() -> Any:
    """Return glibc's ``malloc_trim``, or None: other C libraries have nothing of the kind."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
_least_untouched: dict[tuple[str, str], int] = {}
"""The least bytes that a field of a status file counted beyond what was resident, by (file, field).

It belongs to the process and not to a run: what one run has left in the heap is there for the next.
"""
