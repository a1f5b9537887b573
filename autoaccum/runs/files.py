"""Opens files of a directory that may be a stranger's: regular ones alone, and none by a link; syncs their names."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Flag of ``os.open``: fail at a link. In a directory from a stranger one could lead to any file of ours."""
# At once back from a pipe that nobody writes to; not in programs that are started meanwhile; bytes as they are.
_ALWAYS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))

_PIECE = 2**16
"""Bytes that are read at once of a file of a few lines."""


def open_regular(path: str | os.PathLike[str], flags: int, *, links: bool = False) -> int:
    """Open a file and return its handle.

    Args:
        path: of the file.
        flags: as of ``os.open``; with O_CREAT it is made where there is none.
        links: whether a link is followed: where a user has named the file.

    Raises:
        OSError: it cannot be opened, or it is a pipe, a device, a socket, a directory, or a link.
    """
    # Looked at before it is opened, for to open a device may already do something; and again after, for it may have
    # been put there in between.
    try:
        status = os.stat(path, follow_symlinks=links)
    except FileNotFoundError:
        pass
    else:
        _refuse_irregular(path, status)
    handle = os.open(path, flags | _ALWAYS | (0 if links else _NO_LINK), 0o666)
    try:
        _refuse_irregular(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_small(path: str | os.PathLike[str], most: int = 1 << 24, *, links: bool = False) -> bytes:
    """Return the content of a file of a few lines.

    Args:
        path: of the file.
        most: bytes that it may have.
        links: whether a link is followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open(open_regular(path, os.O_RDONLY, links=links), "rb") as file:
        # Piece by piece: memory for as many bytes as it may have would be asked for, where there may be hardly any.
        content = bytearray()
        while len(content) <= most and (piece := file.read(_PIECE)):
            content += piece
    if len(content) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return bytes(content)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    if sys.platform != "win32":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _refuse_irregular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(Path(path)))
