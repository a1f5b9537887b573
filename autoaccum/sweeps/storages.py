"""A sweep's storage: any of Optuna's, opened by a text, and what is told when it does not answer."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy.exc import SQLAlchemyError

from autoaccum._units import shown
from autoaccum.errors import ArgumentError, ArgumentTypeError, StorageError


def is_journal(storage: str) -> bool:
    """Return whether a storage's text is the path of a journal file."""
    return storage.startswith("journal:") or ("://" not in storage and storage.endswith(".log"))


def check_storage(storage: object) -> None:
    """Refuse what is neither a storage nor the text of one; whether it can be opened is seen when it is.

    Raises:
        ArgumentError: it is something else.
    """
    if storage is None or isinstance(storage, BaseStorage):
        return
    accepted = "a URL, 'journal:PATH' or a path that ends in .log"
    if not isinstance(storage, str):
        raise ArgumentTypeError("storage", storage, accepted)
    if not is_journal(storage) and "://" not in storage:
        raise ArgumentError("storage", storage, accepted, f"For a SQLite file write {shown('sqlite:///' + storage)}.")


def open_storage(storage: str | BaseStorage | None, directory: Path) -> BaseStorage:
    """Open the SQLite file in ``directory`` for None, a journal for ``"journal:PATH"`` or ``"*.log"``, else by a URL.

    Raises:
        ArgumentError: a text that is neither, or behind which there is nothing that can be used.
    """
    check_storage(storage)
    if isinstance(storage, BaseStorage):
        return storage
    # SQLite's own 5 seconds are short for many processes on a slow disk.
    seconds = {"timeout": 60}
    if storage is None:
        # By its path, because in a URL "?", "%" and "{" stand for something else.
        path = str((directory / "study.db").absolute())
        connect = partial(sqlite3.connect, path, check_same_thread=False, **seconds)
        return _opened(path, lambda: RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect}))
    if is_journal(storage):
        path = storage.removeprefix("journal:")
        return _opened(storage, lambda: _journal(path))
    # A server may have been started again since a connection was last used.
    options = {"connect_args": seconds} if storage.startswith("sqlite") else {"pool_pre_ping": True}
    return _opened(storage, lambda: RDBStorage(storage, engine_kwargs=options))


def _journal(path: str) -> JournalStorage:
    """Open a journal, mended if its last line is torn."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if file.read(1) not in (b"", b"{"):  # Optuna would write into it
            raise ValueError("the file is no journal.")
    lock = JournalFileSymlinkLock(path)
    _drop_torn(path, lock)
    return JournalStorage(JournalFileBackend(path, lock_obj=lock))


def _drop_torn(path: str, lock: JournalFileSymlinkLock) -> None:
    """Cut off a last line that a full disk or a crash has left unfinished: what comes after it could not be read."""
    if _whole_bytes(path) is None:
        return
    lock.acquire()  # it may just be being written
    try:
        if (length := _whole_bytes(path)) is not None:
            os.truncate(path, length)
    finally:
        lock.release()


def _whole_bytes(path: str) -> int | None:
    """Return the bytes up to the end of the last line that has one; None where that is the end of the file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        size = length = file.seek(0, os.SEEK_END)
        # Byte by byte from the end: a line is some hundred bytes, and the file may have a million lines.
        line = b""
        while length and not line.endswith(b"\n"):
            length -= 1
            file.seek(length)
            line = file.read(1)
        length += line.endswith(b"\n")  # the end of the line belongs to what is whole
        return None if length == size else length
    return None


def _opened(storage: str, opening: Callable[[], BaseStorage]) -> BaseStorage:
    """Return what ``opening`` returns; tell as an error of the argument what it raises for want of a storage."""
    try:
        return opening()
    except (SQLAlchemyError, OSError, ImportError, ValueError) as error:
        cure = f"{_reason(error)}. Check the address, and that what it names can be written."
        raise ArgumentError("storage", _shown(storage), "one that can be opened", cure) from None


@contextmanager
def answering(storage: str | BaseStorage | None, directory: Path) -> Iterator[None]:
    """Tell of a storage that was opened, and does not answer any more within the context, as such.

    Raises:
        StorageError: it does not.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        name = directory / "study.db" if storage is None else storage
        # Optuna wraps the database's own error, which says more.
        found = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
        raise StorageError(_shown(str(name)), _reason(found)) from error


def _reason(error: Exception) -> str:
    """Return the error's class and its first line: SQLAlchemy's go on with the statement and its values."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"


def _shown(storage: str) -> str:
    """Return the storage's text without the password."""
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", storage)
