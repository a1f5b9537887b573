"""Claims: which trial of a study a process runs next, so that none is lost and none is run twice.

The processes of a sweep share its storage and its directory, which may lie on a network drive that has locks::

    directory/
        .lock               held while a trial is claimed
        id                  that the study has among its user attributes
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from autoaccum.errors import ArgumentError, CheckpointLockedError
from autoaccum.memory import clock
from autoaccum.runs.files import DirectoryLock
from autoaccum.training.recipes import as_file_name

POLL_SECONDS = 0.1
"""Look again after so many seconds for a lock that another process holds, or for a trial that it may leave."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials that count towards ``num_trials``; for one that failed another is begun."""
DIRECTORY = "autoaccum directory"
"""User attribute of a study: the id of its directory."""
SEED = "seed"
"""User attribute of a trial: the seed of all that is random in it."""


def directory_of(study_name: str) -> Path:
    """Return where a sweep keeps its trials, unless it was told."""
    return Path("sweeps") / as_file_name(study_name)


def folder_of(directory: Path, number: int) -> Path:
    """Return the run directory of a trial."""
    return directory / f"trial-{number:04d}"


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

    def open(self, study_of: Callable[[], optuna.Study]) -> optuna.Study:
        """Return the study, which one process makes and the others find.

        Raises:
            ArgumentError: it is not the study of this directory.
        """
        with self._alone():
            study = study_of()
            path = self._directory / "id"
            own, known = path.read_text() or uuid.uuid4().hex, study.user_attrs.get(DIRECTORY)
            if known is None and not any(self._directory.glob("trial-[0-9]*")):
                path.write_text(own)
                study.set_user_attr(DIRECTORY, own)
            elif known != own:
                # Numbers of trials are the study's: what lies in a folder of that number would be resumed as its trial.
                accepted = f"that of study {study.study_name!r}, or an empty one for a new study"
                cure = "All processes of a study need the same directory, on a drive that they share."
                raise ArgumentError("directory", str(self._directory), accepted, cure)
        return study

    def folder(self, trial: FrozenTrial | Trial) -> Path:
        """Return the run directory of a trial."""
        return folder_of(self._directory, trial.number)

    @contextmanager
    def next(self, study: optuna.Study, sampler_of: Callable[[int], BaseSampler] | None) -> Iterator[Trial | None]:
        """Claim a trial to run, which is ours while the context lasts; None when the study has what it is to end with.

        Where all that is missing is being run by others, it waits for them, for they may be killed.

        Args:
            study: what ``open`` returned. All its running trials are the sweep's.
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
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        for trial in running:
            if lock := self._lock(trial):
                # Whoever ran it may have finished it since we looked, and gives its lock back only then.
                if study.get_trials(deepcopy=False)[trial.number].state == TrialState.RUNNING:
                    return (trial, lock), True
                lock.release()
                return None, True
        if num_finished + len(running) >= self._num_trials:  # they may yet be left to us
            return None, True
        trial = _new(study)
        lock = self._lock(trial)
        assert lock is not None  # nobody else has heard of it
        return (trial, lock), True

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


def _new(study: optuna.Study) -> FrozenTrial:
    """Return a new trial, or one that a user has put into the queue."""
    if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return study.get_trials(deepcopy=False)[study.ask().number]
    # Not asked for, as its sampler is made of its number.
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING))
    return study.get_trials(deepcopy=False)[-1]
