"""What a run leaves on the disk, and what the next start finds there.

::

    run_dir/
        checkpoints/        the last few whole ones and the best: see checkpoint.py
        history.jsonl       every StepReport and event as they happened: see reporting/records.py
        config.json         what was asked for
        environment.json    on what it runs
        window              the window that is being run, in a few bytes that outlive the process
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, overload

from autoaccum._checks import Cadence
from autoaccum.errors import CheckpointCorruptError, CheckpointWriteError, ResumeError
from autoaccum.events import Event, Finished, Notice, Record, Resumed, Started, StepReport
from autoaccum.memory import clock
from autoaccum.memory.kills import OomKills, have_risen
from autoaccum.runs import checkpoint
from autoaccum.runs.checkpoint import Checkpoint, Checkpoints
from autoaccum.runs.records import HISTORY, NO_LINK, RecordWriter, environment, read_records, write_json


class RunDirectory:
    """One run's; while it is open, no other process may use it."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int,
        cadence: Cadence,
        config: Mapping[str, Any],
        anew: bool,
        background: bool = True,
    ) -> None:
        """Take it.

        Args:
            path: of the directory; made where there is none.
            keep: how many of the newest checkpoints stay.
            cadence: when to write them.
            config: what was asked for, as JSON; what is under "trained" has to be the same when the run is resumed.
            anew: whether what is there of an earlier run is put away, into ``before-1`` and so on.
            background: whether checkpoints are copied and written while training goes on.

        Raises:
            CheckpointLockedError: another run writes to it.
            CheckpointWriteError: it cannot be made or written to.
        """
        self.path = path
        self._cadence = cadence
        self._background = background
        self._config = dict(config)
        if anew:
            _put_away(path)
        self._checkpoints = Checkpoints(path / "checkpoints", keep=keep)
        try:
            self._writer = RecordWriter(path / HISTORY)
            self.window = WindowMark(path)
        except BaseException as error:
            self._checkpoints.close()
            if isinstance(error, OSError):
                raise _not_written(path, error) from None
            raise
        self._records = False
        self.history: Sequence[StepReport] = Recorded(path / HISTORY, StepReport)
        self.events: Sequence[Event] = Recorded(path / HISTORY, *get_args(Event))
        self.passed_over: Notice | None = None
        """Why the run does not go on from its newest checkpoint."""
        self._saved_step = -1
        self._saved_at = clock.now()

    def resume(self) -> tuple[Checkpoint, Any, Any] | None:
        """The newest whole checkpoint, its weights and its state; None where there is none.

        Raises:
            CheckpointCorruptError: there are some, and none of them is whole.
            ResumeError: it is of another run.
        """
        found, skipped = checkpoint.newest(self.path / "checkpoints")
        if found is None and skipped:
            raise CheckpointCorruptError(self.path / "checkpoints", f"holds no whole checkpoint: {' '.join(skipped)}")
        loaded = None
        if found is not None:
            weights, state = found.load()
            if differences := list(differing(state["trained"], self._config["trained"])):
                raise ResumeError(self.path, differences)
            loaded = found, weights, state
            self._saved_step = found.step
            if skipped:
                self.passed_over = Notice(
                    cause=f"{len(skipped)} of the checkpoints cannot be read: {' '.join(skipped)}".rstrip("."),
                    consequence=f"The run goes on from {found.path.name}, the newest that is whole",
                    cure="Look at the disk if this comes again",
                )
        return loaded

    def is_finished(self) -> bool:
        """Whether the last that was recorded is the end of its budget."""
        events = self.events
        return bool(events) and isinstance(events[-1], Finished) and events[-1].reason == "budget"

    def begin(self) -> None:
        """Write down what is run and on what, and record from now on.

        Raises:
            CheckpointWriteError: it cannot be written.
        """
        self._records = True
        try:
            self.window.begin()
            write_json(self.path / "config.json", self._config)
            write_json(self.path / "environment.json", environment())
        except OSError as error:
            raise _not_written(self.path, error) from None

    def record(self, record: Record) -> None:
        """Append to the history.

        Raises:
            CheckpointWriteError: it cannot be written to.
        """
        if self._records:
            try:
                self._writer(record)
            except OSError as error:
                raise _not_written(self.path / HISTORY, error) from None

    def is_due(self, step: int, *, epoch_ended: bool = False) -> bool:
        """Whether a checkpoint is to be written after that step."""
        if step == self._saved_step:
            return False
        if self._saved_step < 0:  # early, so that what cannot be written is told before hours of work depend on it
            return True
        kind, amount = self._cadence
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
        """Write a checkpoint; see ``Checkpoints.save``."""
        self._saved_step, self._saved_at = step, clock.now()
        state = {**state, "trained": self._config["trained"]}
        return self._checkpoints.save(
            step=step, weights=weights, state=state, facts=facts, is_best=is_best, background=self._background
        )

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        self._checkpoints.wait()

    def close(self) -> None:
        """Give it back."""
        self._writer.close()
        self.window.close()
        self._checkpoints.close()


def differing(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """``name: before -> now`` of each entry that differs.

    >>> list(differing({"seed": 0, "data": {"samples": 5}}, {"seed": 0, "data": {"samples": 6}}))
    ['data samples: 5 -> 6']
    """
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        path = f"{name} {key}".strip()
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, path)
        elif old != new:
            yield f"{path}: {'nothing' if old is None else old} -> {'nothing' if new is None else new}"


OURS = ("checkpoints", HISTORY, "config.json", "environment.json", "window", "kills.json")


def _put_away(path: Path) -> None:
    """What is ours: a user may have other things there."""
    found = [path / name for name in OURS if (path / name).exists()]
    if not found:
        return
    Checkpoints(path / "checkpoints").close()  # not from under a run that is going on
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
    """Records of some kinds, read from the file when they are looked at; what a resume made void is not among them."""

    def __init__(self, path: Path, *kinds: type[T]) -> None:
        self._path = path
        self._kinds = kinds
        self._read: tuple[int, list[T]] = (-1, [])

    def _records(self) -> list[T]:
        size = self._path.stat().st_size
        if size != self._read[0]:
            found: list[Any] = []
            is_next = False  # after a Started
            for record in read_records(self._path):
                if is_next or isinstance(record, Resumed):
                    step = record.step if isinstance(record, Resumed) else 0  # there was no checkpoint yet
                    found = [entry for entry in found if not _is_void(entry, step)]
                is_next = isinstance(record, Started)
                if isinstance(record, self._kinds):
                    found.append(record)
            self._read = size, found
        return self._read[1]

    def __len__(self) -> int:
        return len(self._records())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._records()[index]


def _is_void(record: Any, step: int) -> bool:
    """Whether it is of a window that came after that step, from which the run has gone on since."""
    return not isinstance(record, Resumed) and getattr(record, "step", 0) > step


_MARK = struct.Struct("<3q")


class WindowMark:
    """Says, when the process is no more, whether it died inside a window: in memory that is a file's.

    A file that is mapped costs no system call for a window, and what is written to it the kernel keeps.
    """

    def __init__(self, folder: Path) -> None:
        """Read what an earlier process left."""
        self._kills_path = folder / "kills.json"
        handle = os.open(folder / "window", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        try:
            if os.fstat(handle).st_size != _MARK.size:
                os.pwrite(handle, bytes(_MARK.size), 0)  # a hole that a full disk cannot fill would end the process
            self._map = mmap.mmap(handle, _MARK.size)
        finally:
            os.close(handle)
        self._kills = OomKills().counts()
        self._begun = False
        self.died_of_memory: tuple[int, int] | None = None
        """(samples, their length) of a micro-batch of the window in which the kernel killed the last process for its
        memory; None when it did not."""
        is_inside, micro_batch, length = _MARK.unpack(self._map[:])
        if is_inside == 1:
            try:
                before = json.loads(self._kills_path.read_text())
            except (OSError, ValueError):
                before = {}
            if have_risen(before, self._kills):
                self.died_of_memory = micro_batch, length

    def begin(self) -> None:
        """In place of that, say that there is no window yet.

        Raises:
            OSError: it cannot be written.
        """
        self._begun = True
        self.leave()
        write_json(self._kills_path, self._kills)

    def enter(self, micro_batch: int, length: int) -> None:
        """A window begins, whose largest micro-batch has so many samples of that length."""
        _MARK.pack_into(self._map, 0, 1, micro_batch, length)

    def leave(self) -> None:
        """It has ended."""
        _MARK.pack_into(self._map, 0, 0, 0, 0)

    def close(self) -> None:
        """Unmap the file; whoever gets here was not killed."""
        if self._begun:
            self.leave()
        self._map.close()
