"""The small files in which the kernel keeps its numbers, in procfs and in the control groups."""

from __future__ import annotations

import re


def read(path: str) -> bytes:
    """Return all of a file; nothing of one that is missing, or whose feature is switched off."""
    try:
        # Between every two windows: unbuffered, and without a Path, is less than half the time.
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def number(content: bytes, name: str) -> int | None:
    """Return the number in the line that begins with ``name``, in the file's unit; ``None`` where there is none.

    >>> number(b"MemTotal:       16384 kB", "MemTotal"), number(b"inactive_file 4096", "inactive_file")
    (16384, 4096)
    """
    # procfs writes a colon behind the name, the control groups do not. Only a whole name counts: "oom_kill" has a
    # neighbour "oom_kill_disable".
    found = re.search(rb"^%s:?\s+(\d+)" % name.encode(), content, re.MULTILINE)
    return int(found[1]) if found else None
