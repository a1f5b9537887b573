"""A lock on a directory, so that it has one writer at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from autoaccum.errors import CheckpointLockedError
from autoaccum.runs.files import open_regular

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
            OSError: the file cannot be made, or it is a link or no regular file.
        """
        self._directory = directory.resolve()
        if self._directory in self._held:
            raise CheckpointLockedError(directory, os.getpid())
        self._file = open_regular(directory / ".lock", os.O_RDWR | os.O_CREAT)
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
