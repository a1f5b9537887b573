"""The memory of this process on the host: its resident set, and every limit that the system puts on it.

Containers, batch systems and shells each limit memory in their own way, and the kernel enforces the tightest. A limit
that cannot be read is no limit here: the files differ between systems, and some are hidden inside a container.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

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
        self._process = Path(proc) / "self"
        self._status_path = str(self._process / "status")
        self._cgroup = Path(cgroup)
        # Both stay 0 while the kernel's own peak can be reset.
        self._stale_peak = 0
        self._sampled_peak = 0

    def limit(self) -> int:
        """Resident bytes, plus what the tightest of the system's constraints still leaves free."""
        free = [psutil.virtual_memory().available, *self._free_in_cgroups(), *self._free_under_rlimits()]
        return self.used() + max(0, min(free))

    def used(self) -> int:
        """Resident bytes."""
        status = self._status()
        return _field(status, "VmRSS") or psutil.Process().memory_info().rss

    def peak(self) -> int:
        """Most resident bytes since ``reset_peak``."""
        status = self._status()
        kernel_peak = _field(status, "VmHWM")
        if kernel_peak > self._stale_peak:
            return kernel_peak
        # No peak from the kernel, or an old one that could not be reset: the best that is known is what was sampled.
        used = _field(status, "VmRSS") or psutil.Process().memory_info().rss
        self._sampled_peak = max(self._sampled_peak, used)
        return self._sampled_peak

    def reset_peak(self) -> None:
        """Start a new peak from what is resident now."""
        try:
            # proc(5): writing 5 resets the peak resident set to the current one (Linux 4.0).
            with open(self._process / "clear_refs", "wb", buffering=0) as file:
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

    def _status(self) -> bytes:
        try:
            with open(self._status_path, "rb", buffering=0) as file:
                return file.read()
        except OSError:
            return b""

    def _free_under_rlimits(self) -> Iterator[int]:
        if sys.platform == "win32":
            return
        status = self._status()
        # Each is held by the kernel against its own count: private writable memory, and all address space.
        for which, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(which)
            if soft != resource.RLIM_INFINITY:
                yield soft - (_field(status, field) or self.used())

    def _free_in_cgroups(self) -> Iterator[int]:
        for line in _read(self._process / "cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                # Version 2, mounted below "unified" where version 1 is mounted too.
                unified = self._cgroup / "unified"
                mount = unified if unified.is_dir() else self._cgroup
                files = ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                mount = self._cgroup / "memory"
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            for group in _group_and_ancestors(mount, path):
                yield from _free_in_group(group, *files)


def _group_and_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The control group's folder and every one above it up to the mount: each of them limits all that is below."""
    # Inside a container the path can be the host's, of which only the container's own part is mounted, as the root. Its
    # folders are then missing, which limits nothing; but a path that leads out of the mount must not be followed.
    group = mount if ".." in Path(path).parts else mount / path.lstrip("/")
    yield group
    while group != mount:
        group = group.parent
        yield group


def _free_in_group(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    limit = _read(group / limit_file).strip()
    usage = _read(group / usage_file).strip()
    if limit.isdigit() and usage.isdigit():  # a limit of "max" is none
        # The usage counts the page cache, of which the inactive part is dropped before anything is killed.
        cache = re.search(rf"^{reclaimable} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        yield int(limit) - int(usage) + (int(cache[1]) if cache else 0)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _field(status: bytes, name: str) -> int:
    """Bytes of one field of ``/proc/self/status``, 0 where it is missing."""
    found = re.search(rb"^%s:\s+(\d+) kB$" % name.encode(), status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _find_malloc_trim() -> Any:
    """glibc's ``malloc_trim``; other C libraries have nothing of the kind."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


_malloc_trim = _find_malloc_trim()
