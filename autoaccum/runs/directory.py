"""A run's directory: what the run leaves on the disk, and what the next start finds there.

::

    run_dir/
        checkpoints/        the last few whole ones and the best: see checkpoint.py
        history.jsonl       every StepReport and event as they happened: see records.py
        config.json         what was asked for: see configuration.py
        environment.json    on what it runs and by which command: see records.py
        window              the window that is being run, in a few bytes that outlive the process: see window_mark.py
        kills.json          how often the kernel had killed for lack of memory when the run began
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, overload

from autoaccum._checks import Cadence
from autoaccum.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    OptimizerOutOfMemoryError,
    ResumeError,
)
from autoaccum.events import Event, Finished, Notice, Record, StepReport
from autoaccum.memory import clock
from autoaccum.runs import checkpoint
from autoaccum.runs.checkpoint import Checkpoint, Checkpoints
from autoaccum.runs.configuration import differing
from autoaccum.runs.records import HISTORY, RecordWriter, environment, read_records, write_json
from autoaccum.runs.window_mark import WindowMark
from autoaccum.runs.writers import Writers


class RunDirectory:
    """One run's directory; while it is open, no other process may use it."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int,
        cadence: Cadence,
        config: Mapping[str, Any],
        anew: bool,
        writers: Writers | None = None,
    ) -> None:
        """Take the directory.

        Args:
            path: of the directory; made where there is none.
            keep: how many of the newest checkpoints stay.
            cadence: when to write them.
            config: what was asked for, as JSON; what is under "trained" has to be the same when the run is resumed.
            anew: whether what is there of an earlier run is put away, into ``before-1`` and so on.
            writers: the ranks that write them together, each its parts; None where this process has all of the model.

        Raises:
            CheckpointLockedError: another run writes to it.
            CheckpointWriteError: it cannot be made or written to.
        """
        self.path = path
        self._cadence = cadence
        self.writers = writers
        """The ranks that write the checkpoints together, where there are several."""
        self._config = dict(config)
        if anew:  # before anything is opened, for it is moved
            _put_away(path)
        # Its lock is the whole directory's: whoever writes the checkpoints may write the other files.
        self._checkpoints = Checkpoints(path / "checkpoints", keep=keep)
        try:
            self._writer = RecordWriter(path / HISTORY)
            try:
                self.window_mark = WindowMark(path)
            except BaseException:
                self._writer.close()
                raise
        except BaseException as error:
            self._checkpoints.close()
            if isinstance(error, OSError):
                raise _not_written(path, error) from None
            raise
        # No record is written before ``begin``: a call that is refused, or that finds the run finished, leaves its
        # history as it is.
        self._is_recording = False
        self.history: Sequence[StepReport] = Recorded(path / HISTORY, StepReport)
        self.events: Sequence[Event] = Recorded(path / HISTORY, *get_args(Event))
        self.passed_over: Notice | None = None
        """Why the run does not go on from its newest checkpoint."""
        self._newest: Path | None = None  # the last checkpoint; none yet
        self._saved_step = -1  # its step
        self._saved_at = clock.now()

    def resume(self, take: Callable[[Checkpoint, Any, Any], None]) -> Checkpoint | None:
        """Return the newest checkpoint that can be gone on from; None where there is none at all.

        Args:
            take: (checkpoint, its weights, its state) -> None: puts them back, or raises what is wrong with them,
                before it has changed anything; then the next older one is tried.

        Raises:
            CheckpointCorruptError: there are some, and none of them is whole.
            ResumeError: it is of another run.
        """
        found, skipped = checkpoint.every(self.path / "checkpoints")
        entry = ""  # of the newest, where it has one that is wrong
        cause: BaseException | None = None  # where code of the user's has failed
        for one in found:
            # An error is kept as its text alone: its frames hold the tensors that were read.
            try:
                self._take(one, take)
            except ResumeError:
                raise
            except CheckpointCorruptError as error:
                entry = entry or error.entry
                cause = cause or (error.__cause__ and error.__cause__.with_traceback(None))
                said = error if error.path else CheckpointCorruptError(one.path, error.problem, entry=error.entry)
                skipped += (str(said),)
            except CheckpointError as error:
                skipped += (str(error),)
            else:
                self._newest, self._saved_step = one.path, one.step  # not written again before the next window
                if skipped:
                    self.passed_over = Notice(
                        cause=f"{len(skipped)} of the checkpoints cannot be read: {' '.join(skipped)}".rstrip("."),
                        consequence=f"The run goes on from {one.path.name}, the newest that is whole",
                        cure="Look at the disk if this comes again",
                    )
                return one
        if skipped:
            # To begin anew would in time delete what may be saved by hand.
            place = self.path / "checkpoints"
            none_whole = CheckpointCorruptError(place, f"holds no whole checkpoint: {' '.join(skipped)}")
            none_whole.entry = entry
            raise none_whole from cause
        if self.writers is not None:
            self.writers.offer(None)
        return None

    def _take(self, one: Checkpoint, take: Callable[[Checkpoint, Any, Any], None]) -> None:
        """Read a checkpoint, see that it is of this run, and hand it on; with the other ranks, where they do so too."""
        if self.writers is None:
            self._read(one, take)
        else:
            self.writers.offer(one.path)
            self.writers.take(lambda: self._read(one, take))

    def _read(self, one: Checkpoint, take: Callable[[Checkpoint, Any, Any], None]) -> None:
        weights, state = one.load() if self.writers is None else one.load(self.writers.share)
        # Compared with what was asked for then, which lies in the checkpoint: config.json may have been edited.
        trained = state.pop("trained")
        if differences := list(differing(trained, self._config["trained"])):
            raise ResumeError(self.path, differences)
        take(one, weights, state)

    def is_finished(self) -> bool:
        """Return whether the last that was recorded is that the budget was spent."""
        events = self.events
        return bool(events) and isinstance(events[-1], Finished) and events[-1].reason == "budget"

    def begin(self) -> None:
        """Write down what is run and on what, and record from now on.

        Raises:
            CheckpointWriteError: it cannot be written.
        """
        self._is_recording = True
        try:
            self.window_mark.begin()
            write_json(self.path / "config.json", self._config)
            write_json(self.path / "environment.json", environment())
        except OSError as error:
            raise _not_written(self.path, error) from None

    def record(self, record: Record) -> None:
        """Append to the history; before ``begin``, do nothing.

        Raises:
            CheckpointWriteError: it cannot be written to.
        """
        if self._is_recording:
            try:
                self._writer(record)
            except OSError as error:
                raise _not_written(self.path / HISTORY, error) from None

    def failed(self, step: int, error: BaseException) -> None:
        """Record that an error has ended the run after that step; one that says to go on says from where."""
        self.record(Finished(step=step, reason=type(error).__name__))
        if isinstance(error, OptimizerOutOfMemoryError) and self._newest is not None:
            error.name_checkpoint(self._newest)

    def is_due(self, step: int, *, epoch_ended: bool = False) -> bool:
        """Return whether a checkpoint is to be written after that step."""
        if step == self._saved_step:  # it is on the disk already, be it from before a resume
            return False
        if self._saved_step < 0:  # early, so that what cannot be written is told before hours of work depend on it
            return True
        kind, amount = self._cadence  # of seconds, if it is neither epochs nor steps
        if kind == "epoch":
            return epoch_ended
        if kind == "steps":
            return step % amount == 0
        return clock.now() - self._saved_at >= amount

    def save(
        self,
        step: int,
        weights: Mapping[str, Any],
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        is_best: bool,
    ) -> Path:
        """Write a checkpoint, with what has to be the same when it is resumed; see ``Checkpoints.save``."""
        self._saved_step, self._saved_at = step, clock.now()  # the time that writing takes is part of the interval
        state = {**state, "trained": self._config["trained"]}
        self._newest = self._checkpoints.save(
            step=step,
            weights=weights,
            state=state,
            facts=facts,
            is_best=is_best,
            writers=self.writers,
        )
        return self._newest

    def close(self) -> None:
        """Close the files and give the directory back."""
        # The lock comes last: until then nobody else may write to the files.
        self._writer.close()
        self.window_mark.close()
        self._checkpoints.close()


OURS = ("checkpoints", HISTORY, "config.json", "environment.json", "window", "kills.json")
"""Names in the directory that are a run's. A user may have other things there, which stay where they are."""


def _put_away(path: Path) -> None:
    """Move what an earlier run has left into ``before-1``, or one more than the highest such number."""
    found = [path / name for name in OURS if (path / name).exists()]
    if not found:
        return
    Checkpoints(path / "checkpoints").close()  # raises where a run is going on, from under which nothing is moved
    numbers = [int(entry.name[7:]) for entry in path.glob("before-*") if entry.name[7:].isdecimal()]
    place = path / f"before-{1 + max(numbers, default=0)}"
    try:
        place.mkdir()
        for entry in found:
            entry.rename(place / entry.name)
    except OSError as error:
        raise _not_written(place, error) from None


def _not_written(path: Path, error: OSError) -> CheckpointWriteError:
    return CheckpointWriteError(path, 0, error.strerror or repr(error))


T = TypeVar("T")


class Recorded(Sequence[T]):
    """Records of some kinds, read from the file when they are looked at; what a resume made void is not among them.

    While the run trains none of them need be in memory: it may have millions.
    """

    def __init__(self, path: Path, *kinds: type[T]) -> None:
        self._path = path
        self._kinds = kinds
        # Bytes of the file when it was last read, and the records then. It only grows, so its size tells of more.
        self._read: tuple[int, list[T]] = (-1, [])

    def _records(self) -> list[T]:
        size = self._path.stat().st_size
        if size == self._read[0]:
            return self._read[1]
        found: list[Any] = [one for one in read_records(self._path, void=False) if isinstance(one, self._kinds)]
        self._read = size, found
        return found

    def __len__(self) -> int:
        return len(self._records())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._records()[index]
