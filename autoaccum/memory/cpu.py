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

from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.procfs import number, read
from autoaccum.memory.stalls import HostPressure

if sys.platform != "win32":
    import resource


class CpuMemory:
    """Memory of this process on the host.

    Args:
        proc: where procfs is mounted; where it is missing (macOS, Windows), psutil answers.
        cgroup: where the control groups are mounted.
    """

    enforced = False
    reading_seconds = 0.02

    def __init__(self, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> None:
        process = Path(proc) / "self"
        self._status_path = str(process / "status")
        self._meminfo_path = str(Path(proc) / "meminfo")
        self._clear_refs_path = str(process / "clear_refs")
        self._groups = ControlGroups(process, Path(cgroup))
        self._pressure = HostPressure(Path(proc), self._groups)
        # Both stay 0 while the kernel's own peak can be reset.
        self._stale_peak = 0
        self._sampled_peak = 0

    def limit(self) -> int:
        """Resident bytes, plus what the tightest of the system's constraints still leaves free."""
        status = self._status()
        free = min([self._available(), *self._free_under_rlimits(status)])
        for group in self._groups.all():
            free = min(free, group.free(enough=free))
        return _resident(status) + max(0, free)

    def used(self) -> int:
        """Resident bytes."""
        return _resident(self._status())

    def peak(self) -> int:
        """Most resident bytes since ``reset_peak``."""
        status = self._status()
        kernel_peak = _field(status, "VmHWM")
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
        """Collect reference cycles, then return what the C library keeps of freed memory to the system."""
        if _malloc_trim is not None:
            _malloc_trim(0)

    def strained(self) -> str | None:
        """That processes of its control group or of the machine wait for memory, or that a limit was reached."""
        return self._pressure.why()

    def _status(self) -> bytes:
        return read(self._status_path)

    def _free_under_rlimits(self, status: bytes) -> Iterator[int]:
        if sys.platform == "win32":
            return
        anonymous = _field(status, "RssAnon") or _resident(status)
        # Each is held by the kernel against its own count: private writable memory, and all address space. Beyond what
        # is resident they count what was never touched, which stays, and what the C library's heap has given back but
        # keeps to itself, which is used again before any more is asked for: that is no less than is free.
        for which, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(which)
            if soft != resource.RLIM_INFINITY:
                untouched, where = (_field(status, field) or anonymous) - anonymous, (self._status_path, field)
                _least_untouched[where] = min(untouched, _least_untouched.get(where, untouched))
                yield soft - _least_untouched[where] - anonymous

    def _available(self) -> int:
        # psutil reads the same file, and all of its other lines.
        available = number(read(self._meminfo_path), "MemAvailable")
        return psutil.virtual_memory().available if available is None else available * 1024


def _resident(status: bytes) -> int:
    return _field(status, "VmRSS") or psutil.Process().memory_info().rss


def _field(status: bytes, name: str) -> int:
    """Bytes of one field of ``/proc/self/status``, 0 where it is missing."""
    return (number(status, name) or 0) * 1024


def _find_malloc_trim() -> Any:
    """glibc's ``malloc_trim``; other C libraries have nothing of the kind."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
_least_untouched: dict[tuple[str, str], int] = {}
"""Bytes, by file and field. Of the process and not of a run: what one has left in the heap is there for the next."""
