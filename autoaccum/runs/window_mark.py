"""The mark of the window that is being run, in a file that outlives the process: did the last one die inside it?"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path

from autoaccum.memory.kills import OomKills, have_risen
from autoaccum.runs.records import NO_LINK, write_json

# Three little-endian 64-bit integers: 1 inside a window and 0 outside, the samples of its largest micro-batch, and
# their length.
_MARK = struct.Struct("<3q")


class WindowMark:
    """The mark, in memory that is a file's.

    A file that is mapped costs no system call for a window, and what is written to it the kernel keeps. A process that
    the kernel kills for its memory can tell nobody: so the next one compares the kernel's counts of such kills with
    those that were kept in ``kills.json`` when the last one began.
    """

    def __init__(self, folder: Path) -> None:
        """Read what an earlier process left there.

        Raises:
            OSError: the file cannot be made or mapped, or it is a link.
        """
        self._kills_path = folder / "kills.json"
        handle = os.open(folder / "window", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
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
        if is_inside == 1:
            try:
                before = json.loads(self._kills_path.read_text())
            except (OSError, ValueError):
                before = {}  # nothing is known of before, so no kill is inferred
            if have_risen(before, self._kills):
                self.died_of_memory = micro_batch, length

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
