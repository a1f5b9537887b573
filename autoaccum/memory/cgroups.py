"""The control groups that hold this process, versions 1 and 2: what they limit, and how often they had to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoaccum.memory.procfs import number, read

_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlGroup:
    """One group by its files, any of which may be missing. What it limits is all that is in it and below it."""

    folder: str
    """Where they lie."""
    limit_file: str
    """Bytes; none are "max" in version 2, and the largest number of pages in version 1."""
    usage_file: str
    """Bytes, the page cache included."""
    reclaimable: str
    """The name, in ``memory.stat``, of the bytes of the page cache that are dropped before anything is killed."""

    def free(self, enough: int) -> int:
        """Bytes that its limit leaves free, or at least ``enough``."""
        limit = read(f"{self.folder}/{self.limit_file}").strip()
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            return enough
        usage = read(f"{self.folder}/{self.usage_file}").strip()
        if not usage.isdigit():
            return enough
        free = int(limit) - int(usage)
        # The kernel adds up the statistics of all groups below to answer: asked only where they make a difference.
        return free if free >= enough else free + self.reclaimable_bytes()

    def reclaimable_bytes(self) -> int:
        """The part of its usage that is dropped before anything is killed."""
        return number(read(f"{self.folder}/memory.stat"), self.reclaimable) or 0

    def reclaimable_share(self) -> float:
        """The same as a fraction of its usage."""
        usage = read(f"{self.folder}/{self.usage_file}").strip()
        return self.reclaimable_bytes() / max(int(usage), 1) if usage.isdigit() else 1.0

    def times_reached(self) -> int | None:
        """How often it was at ``memory.high``, above which it is slowed down, or at ``memory.max``, in version 2."""
        # The local file (Linux 5.2): the other one counts what the groups below did with limits of their own, too.
        events = read(f"{self.folder}/memory.events.local")
        high, at_max = number(events, "high"), number(events, "max")
        return None if high is None or at_max is None else high + at_max


class ControlGroups:
    """All that hold this process.

    Args:
        process: its folder in procfs.
        mount: where the control groups are mounted.
    """

    def __init__(self, process: Path, mount: Path) -> None:
        self._membership = str(process / "cgroup")
        self._mount = mount
        # Files are looked for only when the process was moved: their numbers change all the time, they do not.
        self._lines = b""
        self._groups: tuple[ControlGroup, ...] = ()
        self._pressure_file: str | None = None

    def all(self) -> tuple[ControlGroup, ...]:
        """Its group and every one above it, in each version that is mounted."""
        self._update()
        return self._groups

    def pressure_file(self) -> str | None:
        """The pressure stall information of its own group, where there is one that is not the whole machine's."""
        self._update()
        return self._pressure_file

    def _update(self) -> None:
        lines = read(self._membership)
        if lines == self._lines:
            return
        self._lines = lines
        self._groups = ()
        self._pressure_file = None
        for line in os.fsdecode(lines).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                # Version 2, mounted below "unified" where version 1 is mounted too.
                unified = self._mount / "unified"
                mount = unified if unified.is_dir() else self._mount
                files = ("memory.max", "memory.current", "inactive_file")
                self._pressure_file = _pressure_file(mount, path)
            elif "memory" in controllers.split(","):
                mount = self._mount / "memory"
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            limit_file, usage_file, reclaimable = files
            self._groups += tuple(
                ControlGroup(folder=str(group), limit_file=limit_file, usage_file=usage_file, reclaimable=reclaimable)
                for group in _group_and_ancestors(mount, path)
                if (group / limit_file).exists()
            )


def _pressure_file(mount: Path, path: str) -> str | None:
    for group in _group_and_ancestors(mount, path):
        if (group / "memory.pressure").exists():
            # Only the root of all groups has no limit of its own, and is no group of ours but the machine. A
            # container's own group can be mounted in its place.
            return str(group / "memory.pressure") if group != mount or (group / "memory.max").exists() else None
    return None


def _group_and_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The control group's folder and every one above it up to the mount: each of them limits all that is below."""
    # Inside a container the path can be the host's, of which only the container's own part is mounted, as the root. Its
    # folders are then missing, which limits nothing; but a path that leads out of the mount must not be followed.
    group = mount if ".." in Path(path).parts else mount / path.lstrip("/")
    yield group
    while group != mount:
        group = group.parent
        yield group
