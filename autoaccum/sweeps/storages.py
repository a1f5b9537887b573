"""A sweep's storage: any of Optuna's, opened by a text."""

from __future__ import annotations

import re
import sqlite3
from functools import partial
from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from autoaccum._units import shown
from autoaccum.errors import ArgumentError, ArgumentTypeError

JOURNAL = "journal:"
"""What the path of a journal file begins with."""


def check_storage(storage: object) -> None:
    """Refuse what is neither a storage nor the text of one; whether it can be opened is seen when it is.

    Raises:
        ArgumentError: it is something else.
    """
    if storage is None or isinstance(storage, BaseStorage):
        return
    accepted = "a URL, or 'journal:PATH'"
    if not isinstance(storage, str):
        raise ArgumentTypeError("storage", storage, accepted)
    if not storage.startswith(JOURNAL) and "://" not in storage:
        raise ArgumentError("storage", storage, accepted, f"For a SQLite file write {shown('sqlite:///' + storage)}.")


def open_storage(storage: str | BaseStorage | None, directory: Path) -> BaseStorage:
    """Open the SQLite file in ``directory`` for None, a journal for ``"journal:PATH"``, else by a URL.

    Raises:
        ArgumentError: a text that is neither, or a URL that cannot be opened.
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
        return RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})
    if storage.startswith(JOURNAL):
        return JournalStorage(JournalFileBackend(storage.removeprefix(JOURNAL)))
    # A server may have been started again since a connection was last used.
    options = {"connect_args": seconds} if storage.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return RDBStorage(storage, engine_kwargs=options)
    except (SQLAlchemyError, OSError, ImportError) as error:
        # Its first line: SQLAlchemy's go on with the statement and its values.
        cure = f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}."
        without_password = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", storage)
        raise ArgumentError("storage", without_password, "one that can be opened", cure) from None
