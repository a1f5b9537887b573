"""Files of a run's directory: written durably, and locked."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoaccum.errors import CheckpointLockedError


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    if sys.platform != "win32":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


Save = Callable[[Any], object]
"""Writes to what it is given, which has ``write`` and ``flush``: ``torch.save`` of something, say."""


def write_durably(path: Path, save: Save) -> tuple[int, str]:
    """Write a new file to the disk; return its number of bytes and their SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    # "x" follows no link and writes over nothing.
    with open(path, "xb") as file:

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        sink = _Sink(write)
        save(sink)
        if sink.error is not None:
            raise sink.error
        file.flush()
        os.fsync(file.fileno())
    return sink.num_bytes, digest.hexdigest()


class _Sink:
    """What takes bytes. PyTorch's writer would hide an error by its own, so it is kept, and the rest is left out."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        self._write = write
        self.num_bytes = 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self._write(data)
        except BaseException as error:
            self.error = error
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: it is flushed at the end."""


if sys.platform != "win32":
    import fcntl


class DirectoryLock:
    """A lock that makes a directory one writer's; the kernel gives it back when the process is killed.

    It is a POSIX record lock and not ``flock``: a forked worker that outlives its parent for some seconds would hold
    the latter. A record lock belongs to the process as a whole, so within one process a set tells who holds what.
    """

    # Directories, resolved, that this process holds. The kernel lets a process lock a file twice, and it drops the
    # lock as soon as the process closes any handle of that file: so a second one must not even be opened.
    _held: set[Path] = set()  # noqa: RUF012

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Args:
            directory: must be there; the lock is on its file ``.lock``, which is made where there is none.

        Raises:
            CheckpointLockedError: another writer holds it, in this process or in another.
            OSError: the file cannot be made.
        """
        self._directory = directory.resolve()
        if self._directory in self._held:
            raise CheckpointLockedError(directory, os.getpid())
        self._file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform != "win32":
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves it open which of EAGAIN and EACCES comes
            pid = os.read(self._file, 20)  # of digits, unless somebody else has written there
            os.close(self._file)
            raise CheckpointLockedError(directory, int(pid) if pid.isdigit() else None) from None
        except OSError:
            os.close(self._file)
            raise
        self._held.add(self._directory)
        try:
            # The process's number is for the message of whoever comes second; the lock itself does not depend on it.
            os.ftruncate(self._file, 0)
            os.write(self._file, str(os.getpid()).encode())
        except OSError:  # a full disk
            self.release()
            raise

    def release(self) -> None:
        """Give the directory back; do nothing if that was done before."""
        if self._directory in self._held:
            self._held.discard(self._directory)
            os.close(self._file)
