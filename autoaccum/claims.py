"""Which trial of a study a process runs next, so that none is lost and none is run twice.

The processes of a sweep share its storage. Those that share its directory too, on one machine or on a network drive
that has locks, also take over from each other::

    directory/
        .lock               held while a trial is claimed
        id                  by which trials of this directory are known in the storage
        study.db            the storage, unless another one was named
        trial-0007/         a fit's run directory; .lock is held for as long as the trial is run

The kernel releases the locks of a process that has ended, however it did. A trial that is running, and whose lock can
be had, is one to go on with: from its checkpoint, under its own number.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from autoaccum.checkpoint import DirectoryLock
from autoaccum.errors import ArgumentError, ArgumentTypeError, CheckpointLockedError, StorageError
from autoaccum.recipes import as_file_name

POLL_SECONDS = 0.1
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials that count."""
DIRECTORY, SEED = "directory", "seed"
"""User attributes of a trial: the id of the directory it is run in, and the seed of all that is random in it."""


def open_storage(storage: str | BaseStorage | None, directory: Path) -> BaseStorage:
    """The SQLite file in ``directory`` for None, a journal for ``"journal:PATH"`` or ``"*.log"``, or what a URL says.

    Raises:
        ArgumentError: a text that is neither, or behind which there is nothing that can be used.
    """
    if isinstance(storage, BaseStorage):
        return storage
    # SQLite's own 5 seconds are short for many processes on a slow disk.
    seconds = {"timeout": 60}
    if storage is None:
        # By its path, because in a URL "?", "%" and "{" stand for something else.
        path = str((directory / "study.db").absolute())
        connect = partial(sqlite3.connect, path, check_same_thread=False, **seconds)
        return _opened(path, lambda: _database("sqlite:///study.db", {"creator": connect}))
    accepted = "a URL, 'journal:PATH' or a path that ends in .log"
    if not isinstance(storage, str):
        raise ArgumentTypeError("storage", storage, accepted)
    if storage.startswith("journal:") or ("://" not in storage and storage.endswith(".log")):
        path = storage.removeprefix("journal:")
        return _opened(storage, lambda: _journal(path))
    if "://" not in storage:
        raise ArgumentError("storage", storage, accepted, f"For a SQLite file write 'sqlite:///{storage}'.")
    # A server may have been started again since a connection was last used.
    options = {"connect_args": seconds} if storage.startswith("sqlite") else {"pool_pre_ping": True}
    return _opened(storage, lambda: _database(storage, options))


def _database(url: str, options: dict[str, Any]) -> RDBStorage:
    """With Optuna's tables, which several processes that find none all begin to make, and one can."""
    for _ in range(9):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except SQLAlchemyError as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
            time.sleep(POLL_SECONDS)
    return RDBStorage(url, engine_kwargs=options)


def _journal(path: str) -> JournalStorage:
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
    """Up to the end of the last line that has one; None where that is the end of the file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        size = length = file.seek(0, os.SEEK_END)
        line = b""
        while length and not line.endswith(b"\n"):
            length -= 1
            file.seek(length)
            line = file.read(1)
        length += line.endswith(b"\n")
        return None if length == size else length
    return None


def _opened(storage: str, opening: Callable[[], BaseStorage]) -> BaseStorage:
    try:
        return opening()
    except (SQLAlchemyError, OSError, ImportError, ValueError) as error:
        cure = f"{_reason(error)}. Check the address, and that what it names can be written."
        raise ArgumentError("storage", _shown(storage), "one that can be opened", cure) from None


@contextmanager
def answering(storage: str | BaseStorage | None, directory: Path) -> Iterator[None]:
    """Within it, a storage that was opened and does not answer any more is told as such.

    Raises:
        StorageError: it does not.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        name = directory / "study.db" if storage is None else storage
        found = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
        raise StorageError(_shown(str(name)), _reason(found)) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"


def _shown(storage: str) -> str:
    """Without the password."""
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", storage)


def directory_of(study_name: str) -> Path:
    """Where a sweep keeps its trials, unless it was told."""
    return Path("sweeps") / as_file_name(study_name)


class Claims:
    """One process's part in the trials of a study."""

    def __init__(self, directory: Path, num_trials: int, seed: int) -> None:
        """Take part.

        Args:
            directory: made where there is none.
            num_trials: finished ones that the study is to end with.
            seed: of the sweep; that of a trial is its number more.

        Raises:
            ArgumentError: the directory cannot be made, or written to.
        """
        directory = directory.absolute()  # recipes may change directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "id").touch()
        except OSError as error:
            reason = f"{error.strerror}: {error.filename!r}. Choose another one."
            raise ArgumentError("directory", str(directory), "one that can be written to", reason) from None
        self._directory, self._num_trials, self._seed = directory, num_trials, seed
        self._id = ""

    def open(self, study_of: Callable[[], optuna.Study]) -> optuna.Study:
        """The study, which one process makes and the others find.

        Raises:
            ArgumentError: the directory holds trials that are not of this study.
        """
        with self._alone():
            study = study_of()
            path = self._directory / "id"
            if not path.read_text():
                path.write_text(uuid.uuid4().hex)
            self._id = path.read_text()
            numbers = {trial.number for trial in study.get_trials(deepcopy=False) if self._is_ours(trial)}
            for folder in sorted(self._directory.glob("trial-[0-9]*")):
                number = folder.name.removeprefix("trial-")
                if number.isdecimal() and int(number) not in numbers:
                    cure = f"It holds {folder.name}, which study {study.study_name!r} has not. Choose another one."
                    raise ArgumentError("directory", str(self._directory), "that of this study, or an empty one", cure)
        return study

    def folder(self, trial: FrozenTrial | Trial) -> Path:
        """The run directory of a trial."""
        return self._directory / f"trial-{trial.number:04d}"

    def elsewhere(self, study: optuna.Study) -> list[FrozenTrial]:
        """Trials that processes on other directories run, or have left."""
        return [trial for trial in _running(study.get_trials(deepcopy=False)) if not self._is_ours(trial)]

    @contextmanager
    def next(self, study: optuna.Study, sampler_of: Callable[[int], BaseSampler] | None) -> Iterator[Trial | None]:
        """A trial to run, ours while the context lasts; None when the study has what it is to end with.

        Where all that is missing is being run by others on this directory, it waits for them, for they may be killed.

        Args:
            study: what ``open`` returned.
            sampler_of: (seed) -> a sampler. One that draws from the beginning in each process would draw the same in
                all of them, and again after each start.
        """
        found = None
        while found is None:
            with self._alone():
                found, others = self._claim(study)
            if found is None and not others:
                yield None
                return
            if found is None:
                time.sleep(POLL_SECONDS)
        frozen, lock = found
        try:
            seed = frozen.user_attrs.get(SEED, self._seed + frozen.number)
            if sampler_of is not None:
                study.sampler = sampler_of(seed)
            trial = Trial(study, frozen._trial_id)
            trial.set_user_attr(SEED, seed)
            yield trial
        finally:
            lock.release()

    def _claim(self, study: optuna.Study) -> tuple[tuple[FrozenTrial, DirectoryLock] | None, bool]:
        """(a trial and its lock, if there is one to be had; whether others here still run some)."""
        # Looked at once: of two looks, a trial that finishes between them would be in neither.
        trials = study.get_trials(deepcopy=False)
        num_finished = sum(trial.state in FINISHED for trial in trials)
        if num_finished >= self._num_trials:
            return None, False
        running = _running(trials)
        ours = [trial for trial in running if self._is_ours(trial)]
        for trial in ours:
            if lock := self._lock(trial):
                return (trial, lock), True
        if num_finished + len(running) >= self._num_trials:
            return None, bool(ours)
        trial = self._new(study)
        if self._is_surplus(study, trial):
            study.tell(trial.number, state=TrialState.FAIL)
            return None, True
        lock = self._lock(trial)
        assert lock is not None  # nobody else has heard of it
        return (trial, lock), True

    def _new(self, study: optuna.Study) -> FrozenTrial:
        """One that is known to be ours from its first moment, or one that a user has put into the queue."""
        if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            trial = study.ask()
            trial.set_user_attr(DIRECTORY, self._id)
            return study.get_trials(deepcopy=False)[trial.number]
        study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={DIRECTORY: self._id}))
        ours = filter(self._is_ours, study.get_trials(deepcopy=False))
        return max(ours, key=lambda trial: trial.number)

    def _is_surplus(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether on other directories, which our lock does not stop, enough were begun just before it."""
        trials = study.get_trials(deepcopy=False)[: trial.number]
        num_finished = sum(other.state in FINISHED for other in trials)
        return num_finished + len(_running(trials)) >= self._num_trials

    def _is_ours(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get(DIRECTORY) == self._id)

    def _lock(self, trial: FrozenTrial) -> DirectoryLock | None:
        folder = self.folder(trial)
        folder.mkdir(exist_ok=True)
        try:
            return DirectoryLock(folder)
        except CheckpointLockedError:
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process claims at the same time."""
        while True:
            try:
                lock = DirectoryLock(self._directory)
                break
            except CheckpointLockedError:
                time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            lock.release()


def _running(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that a sweep runs; a trial that was asked for by other means is nobody's to wait for."""
    return [trial for trial in trials if trial.state == TrialState.RUNNING and DIRECTORY in trial.user_attrs]
