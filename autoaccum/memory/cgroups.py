"""The control groups that hold this process, of versions 1 and 2: and what they limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoaccum.memory.procfs import number, read

_UNLIMITED = 2**62
"""Bytes; a limit of as many or more is taken for none. Version 1 writes 2**63 less a page where nothing was set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlGroup:
    """One group by its files, any of which may be missing. What it limits is all that is in it and below it."""

    folder: str
    """The folder in which the group's files lie."""
    limit_files: tuple[str, ...]
    """The files with limits in bytes; none is "max" in version 2, and the largest number of pages in version 1."""
    usage_file: str
    """The file with the bytes in use, the page cache included."""
    reclaimable: str
    """The name, in ``memory.stat``, of the bytes of the page cache that are dropped before anything is killed."""

    def free(self, enough: int) -> int:
        """Return the bytes that its limit leaves free, or any figure of at least ``enough`` where it leaves more.

        Args:
            enough: bytes that some other limit leaves free. What lies above makes no difference to the tightest limit.
        """
        limit = self.limit()
        if limit is None:
            return enough
        usage = read(f"{self.folder}/{self.usage_file}").strip()
        if not usage.isdigit():
            return enough
        free = limit - int(usage)
        # The page cache counts as used but is dropped before anything is killed. To say how much of it there is, the
        # kernel adds up the statistics of all groups below: that is asked only where it makes a difference.
        return free if free >= enough else free + (number(read(f"{self.folder}/memory.stat"), self.reclaimable) or 0)

    def limit(self) -> int | None:
        """Return the bytes that it allows all that is in it; None where it sets no limit."""
        limits = [read(f"{self.folder}/{name}").strip() for name in self.limit_files]
        return min((int(each) for each in limits if each.isdigit() and int(each) < _UNLIMITED), default=None)


class ControlGroups:
    """All control groups that hold this process, in both versions.

    Args:
        process: its folder in procfs.
        mount: where the control groups are mounted.
    """

    def __init__(self, process: Path, mount: Path) -> None:
        self._membership = str(process / "cgroup")
        self._mount = mount
        # Files are looked for only when the process was moved: their numbers change all the time, they do not. These
        # are the lines of the membership file for which the groups below were found.
        self._lines = b""
        self._groups: tuple[ControlGroup, ...] = ()

    def all(self) -> tuple[ControlGroup, ...]:
        """Return its group and every one above it, in each version that is mounted."""
        self._update()
        return self._groups

    def _update(self) -> None:
        lines = read(self._membership)
        if lines == self._lines:
            return
        self._lines = lines
        self._groups = ()
        for line in os.fsdecode(lines).splitlines():
            # cgroups(7): "hierarchy:controllers:path". The path may hold colons of its own.
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            files: tuple[tuple[str, ...], str, str]
            if not controllers:
                # Version 2, mounted below "unified" where version 1 is mounted too.
                unified = self._mount / "unified"
                mount = unified if unified.is_dir() else self._mount
                # Above "high" processes are slowed down, above "max" they are killed.
                files = (("memory.max", "memory.high"), "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                mount = self._mount / "memory"
                files = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            limit_files, usage_file, reclaimable = files
            self._groups += tuple(
                ControlGroup(folder=str(group), limit_files=limit_files, usage_file=usage_file, reclaimable=reclaimable)
                for group in _group_and_ancestors(mount, path)
                if (group / limit_files[0]).exists()
            )


def _group_and_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """Yield the control group's folder and every one above it up to the mount: each limits all that is below."""
    # Inside a container the path can be the host's, of which only the container's own part is mounted, as the root. Its
    # folders are then missing, which limits nothing; but a path that leads out of the mount must not be followed.
    group = mount if ".." in Path(path).parts else mount / path.lstrip("/")
    yield group
    while group != mount:
        group = group.parent
        yield group
