"""The mark of the window that is being run, in a file that outlives the process: did the last one die inside it?"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path

from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.procfs import number, read
from autoaccum.runs.records import write_json

# Three little-endian 64-bit integers: 1 inside a window and 0 outside, the samples of its largest micro-batch, and
# their length.
_MARK = struct.Struct("<3q")
_ENDLESS = 2**62
"""A number of samples that no micro-batch has."""


class WindowMark:
    """The mark, in memory that is a file's.

    A file that is mapped costs no system call for a window, and what is written to it the kernel keeps. A process that
    the kernel kills for its memory can tell nobody: so the next one compares the kernel's counts of such kills with
    those that were kept in ``kills.json`` when the last one began.
    """

    def __init__(self, folder: Path) -> None:
        """Read what an earlier process left there.

        Raises:
            OSError: the file cannot be made or mapped.
        """
        self._kills_path = folder / "kills.json"
        handle = os.open(folder / "window", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(handle).st_size != _MARK.size:
                os.pwrite(handle, bytes(_MARK.size), 0)  # a hole that a full disk cannot fill would end the process
            self._map = mmap.mmap(handle, _MARK.size)
        finally:
            os.close(handle)
        self._kills = OomKills().counts()
        # A run that finds itself finished never begins: then what the last process left has to stay as it is.
        self._begun = False
        self.died_of_memory: tuple[int, int] | None = None
        """(samples, their length) of a micro-batch of the window in which the kernel killed the last process for its
        memory; None when it did not."""
        is_inside, micro_batch, length = _MARK.unpack(self._map[:])
        # Other marks are none of ours: no micro-batch is that large, and none has no sample.
        is_sound = is_inside == 1 and min(micro_batch, length) >= 1 and max(micro_batch, length) < _ENDLESS
        if is_sound and have_risen(self._kills_before(), self._kills):
            self.died_of_memory = micro_batch, length

    def _kills_before(self) -> dict[str, int]:
        """Return the counts of kills when the last process began; none where they make no sense."""
        try:
            before = json.loads(self._kills_path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}  # nothing is known of before, so no kill is inferred
        return before if isinstance(before, dict) else {}

    def begin(self) -> None:
        """Put in place of what was left that there is no window yet, and the counts of kills as they are now.

        Raises:
            OSError: it cannot be written.
        """
        self._begun = True
        self.leave()
        write_json(self._kills_path, self._kills)

    def enter(self, micro_batch: int, length: int) -> None:
        """Mark that a window begins, whose largest micro-batch has ``micro_batch`` samples of that ``length``."""
        _MARK.pack_into(self._map, 0, 1, micro_batch, length)

    def leave(self) -> None:
        """Mark that the window has ended."""
        _MARK.pack_into(self._map, 0, 0, 0, 0)

    def close(self) -> None:
        """Unmap the file; whoever gets here was not killed."""
        if self._begun:
            self.leave()
        self._map.close()


class OomKills:
    """The kernel's counts, of the whole machine and of this process's control groups; they only rise.

    Args:
        proc: where procfs is mounted.
        mount: where the control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = ControlGroups(proc / "self", mount)

    def counts(self) -> dict[str, int]:
        """Return the counts by the name of what they are of: the machine's boot, or the folder of a group."""
        # The machine's count starts again with each boot: it must not be compared with one from before.
        boot = read(str(self._proc / "sys/kernel/random/boot_id")).decode().strip()
        found: dict[str, int] = {}
        machine_kills = number(read(str(self._proc / "vmstat")), "oom_kill")
        if machine_kills is not None:  # Linux 4.13 and later
            found[f"boot {boot}"] = machine_kills
        for group in self._groups.all():
            for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
                kills = number(read(f"{group.folder}/{name}"), "oom_kill")
                if kills is not None:
                    found[group.folder] = kills
        return found


def have_risen(before: dict[str, int], now: dict[str, int]) -> bool:
    """Return whether any count that was there before is larger now.

    A name that is missing now says nothing: the process may have been started again in another group.
    """
    return any(now.get(name, 0) > count for name, count in before.items())
