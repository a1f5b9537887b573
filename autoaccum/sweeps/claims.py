"""Claims: which trial of a study a process runs next, so that none is lost and none is run twice.

The processes of a sweep share its storage. Those that share its directory too, on one machine or on a network drive
that has locks, also take over from each other::

    directory/
        .lock               held while a trial is claimed
        id                  by which trials of this directory are known in the storage
        study.db            the storage, unless another one was named
        trial-0007/         a fit's run directory; .lock is held for as long as the trial is run

The kernel releases the locks of a process that has ended, however it did. A trial that is running, and whose lock can
be had, is one to go on with: from its checkpoint, under its own number.

Optuna's heartbeat with ``RetryFailedTrialCallback`` is no substitute. It works for databases only, waits for a grace
period after a kill, and runs the trial under a new number: then all later trials have other numbers and other seeds,
and a sweep that was killed would not end as one that was not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from autoaccum.errors import ArgumentError, CheckpointLockedError
from autoaccum.memory import clock
from autoaccum.runs.lock import DirectoryLock
from autoaccum.training.recipes import as_file_name

POLL_SECONDS = 0.1
"""Look again after so many seconds for a lock that another process holds, or for a trial that it may leave."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials that count towards ``num_trials``; for one that failed another is begun."""
DIRECTORY, SEED = "directory", "seed"
"""User attributes of a trial: the id of the directory it is run in, and the seed of all that is random in it."""


def directory_of(study_name: str) -> Path:
    """Return where a sweep keeps its trials, unless it was told."""
    return Path("sweeps") / as_file_name(study_name)


def folders_of(study: optuna.Study, directory: Path) -> dict[int, Path]:
    """Return the run directories of those trials of a study that were run in this one, by their numbers."""
    # By the directory's id, for a number alone does not say in which directory the trial was run.
    try:
        name = (directory / "id").read_text()
    except FileNotFoundError:
        return {}
    trials = study.get_trials(deepcopy=False)
    return {trial.number: _folder(directory, trial) for trial in trials if trial.user_attrs.get(DIRECTORY) == name}


def _folder(directory: Path, trial: FrozenTrial | Trial) -> Path:
    return directory / f"trial-{trial.number:04d}"


class Claims:
    """One process's part in the trials of a study."""

    def __init__(self, directory: Path, num_trials: int, seed: int) -> None:
        """Take part in them; see ``open`` for the study.

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
        self._id = ""  # until the study is open

    def open(self, study_of: Callable[[], optuna.Study]) -> optuna.Study:
        """Return the study, which one process makes and the others find.

        Raises:
            ArgumentError: the directory holds trials that are not of this study.
        """
        with self._alone():
            study = study_of()
            # Numbers of trials are the study's, and other directories may have some of them; so those of this one bear
            # its id. The first process makes it, and a process that comes later reads it.
            path = self._directory / "id"
            if not path.read_text():
                path.write_text(uuid.uuid4().hex)
            self._id = path.read_text()
            # A folder of a trial that is not ours would be gone on with as if it were.
            numbers = {trial.number for trial in study.get_trials(deepcopy=False) if self._is_ours(trial)}
            for folder in sorted(self._directory.glob("trial-[0-9]*")):
                number = folder.name.removeprefix("trial-")
                if number.isdecimal() and int(number) not in numbers:
                    cure = f"Study {study.study_name!r} has no trial of its {folder.name}. Choose another one."
                    raise ArgumentError("directory", str(self._directory), "that of this study, or an empty one", cure)
        return study

    def folder(self, trial: FrozenTrial | Trial) -> Path:
        """Return the run directory of a trial."""
        return _folder(self._directory, trial)

    def elsewhere(self, study: optuna.Study) -> list[FrozenTrial]:
        """Return the trials that processes on other directories run, or have left."""
        return [trial for trial in _running(study.get_trials(deepcopy=False)) if not self._is_ours(trial)]

    @contextmanager
    def next(self, study: optuna.Study, sampler_of: Callable[[int], BaseSampler] | None) -> Iterator[Trial | None]:
        """Claim a trial to run, which is ours while the context lasts; None when the study has what it is to end with.

        Where all that is missing is being run by others on this directory, it waits for them, for they may be killed.

        Args:
            study: what ``open`` returned.
            sampler_of: (seed) -> a sampler. One that draws from the beginning in each process would draw the same in
                all of them, and again after each start.
        """
        found = None  # a trial and its lock
        while found is None:
            with self._alone():
                found, others = self._claim(study)
            if found is None and not others:
                yield None
                return
            if found is None:  # with the directory's lock given back, so that those others can claim
                clock.sleep(POLL_SECONDS)
        frozen, lock = found
        try:
            # A trial that is gone on with keeps the seed that it began with, whatever this sweep's seed is.
            seed = frozen.user_attrs.get(SEED, self._seed + frozen.number)
            if sampler_of is not None:
                study.sampler = sampler_of(seed)
            # Optuna has no public way to go on with a trial of another process; this is how it does so itself.
            trial = Trial(study, frozen._trial_id)
            trial.set_user_attr(SEED, seed)
            yield trial
        finally:
            lock.release()

    def _claim(self, study: optuna.Study) -> tuple[tuple[FrozenTrial, DirectoryLock] | None, bool]:
        """Return (a trial and its lock, or None if there is none to be had; whether others here still run some)."""
        # Looked at once: of two looks, a trial that finishes between them would be in neither.
        trials = study.get_trials(deepcopy=False)
        num_finished = sum(trial.state in FINISHED for trial in trials)
        if num_finished >= self._num_trials:
            return None, False
        running = _running(trials)
        ours = [trial for trial in running if self._is_ours(trial)]
        # First those that a process has left: their locks are free.
        for trial in ours:
            if lock := self._lock(trial):
                # Whoever ran it may have finished it since we looked, and gives its lock back only then.
                if study.get_trials(deepcopy=False)[trial.number].state == TrialState.RUNNING:
                    return (trial, lock), True
                lock.release()
                return None, True
        # Where enough are running, it is worth waiting only if some are of this directory: they may yet be left to us.
        if num_finished + len(running) >= self._num_trials:
            return None, bool(ours)
        trial = self._new(study)
        # Looked at afterwards, for the storage has no lock over directories: whoever comes too late gives up its own.
        if self._is_surplus(study, trial):
            study.tell(trial.number, state=TrialState.FAIL)
            return None, True
        lock = self._lock(trial)
        assert lock is not None  # nobody else has heard of it
        return (trial, lock), True

    def _new(self, study: optuna.Study) -> FrozenTrial:
        """Return a new trial, known to be ours from its first moment, or one that a user has put into the queue."""
        if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            trial = study.ask()  # takes one from the queue, which can be marked only after it
            trial.set_user_attr(DIRECTORY, self._id)
            return study.get_trials(deepcopy=False)[trial.number]
        study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={DIRECTORY: self._id}))
        # add_trial does not tell the number; nobody else adds trials of this id, for the directory's lock is ours.
        ours = filter(self._is_ours, study.get_trials(deepcopy=False))
        return max(ours, key=lambda trial: trial.number)

    def _is_surplus(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether on other directories, which our lock does not stop, enough were begun just before it."""
        trials = study.get_trials(deepcopy=False)[: trial.number]
        num_finished = sum(other.state in FINISHED for other in trials)
        return num_finished + len(_running(trials)) >= self._num_trials

    def _is_ours(self, trial: FrozenTrial) -> bool:
        """Return whether the trial is run in this directory."""
        return bool(trial.user_attrs.get(DIRECTORY) == self._id)

    def _lock(self, trial: FrozenTrial) -> DirectoryLock | None:
        """Lock a trial's folder; return None if a process holds it, which then runs the trial."""
        folder = self.folder(trial)
        folder.mkdir(exist_ok=True)
        try:
            return DirectoryLock(folder)
        except CheckpointLockedError:
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the directory's lock, so that no other process claims at the same time; wait for it if need be."""
        while True:
            try:
                lock = DirectoryLock(self._directory)
                break
            except CheckpointLockedError:
                clock.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            lock.release()


def _running(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return those that a sweep runs; a trial that was asked for by other means is nobody's to wait for."""
    return [trial for trial in trials if trial.state == TrialState.RUNNING and DIRECTORY in trial.user_attrs]
