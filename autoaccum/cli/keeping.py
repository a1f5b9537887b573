"""Where ``fit`` keeps a run for which nobody has named a directory, and what is said of it at the end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from autoaccum.errors import ArgumentError
from autoaccum.events import Record, Saved
from autoaccum.memory import clock
from autoaccum.training.recipes import name_of

if TYPE_CHECKING:  # it takes torch with it
    from autoaccum.training.result import FitResult

RUNS = "AUTOACCUM_RUNS_DIR"
"""The environment variable that names the folder of new directories; ``runs`` below the current folder without it."""
NONE = "none"
"""What ``--run-dir`` takes for no directory at all."""

typed: ContextVar[Sequence[str]] = ContextVar("typed", default=("fit",))
"""What was typed behind ``autoaccum``, of which the command that goes on is made."""


@dataclass(kw_only=True, slots=True)
class Kept:
    """Where a run is kept, and what to type about it."""

    path: str | os.PathLike[str] | None
    """The directory; None where nothing is kept."""
    resume_command: str | None
    """The command that resumes the run; None where it has ended, or nothing is kept."""
    report_command: str | None
    """What draws it."""
    is_new: bool = False
    """Whether the directory was made here, so that nobody knows of it yet."""
    ended: str = ""
    """How the run has ended, as ``FitResult`` has it; empty where an error ended it."""
    state: str = ""
    """After which step it was interrupted, or since when it diverged; else empty."""
    weights: str = ""
    """The file of what was trained."""

    def __call__(self, record: Record) -> None:
        """Say where a new run is kept once it can go on from there: what is killed says nothing at its end."""
        if self.is_new and isinstance(record, Saved):
            self.is_new = False
            place = shlex.quote(os.fspath(self.path or ""))
            tqdm.write(f"saving to: {place} (resume: --run-dir {place})", file=sys.stderr)

    def end(self, result: FitResult) -> None:
        """Note how a run ended."""
        self.ended = result.ended
        if self.ended == "diverged":
            self.state = f"{result.divergence}. Lower the learning rate, or pass --clip-norm 1.0, in a new run."
        elif self.ended == "interrupted":
            self.state = f"after step {result.num_steps}"
        elif self.path is not None:
            file = os.path.join(self.path, "checkpoints", f"step-{result.num_steps:08d}", "model.pt")
            self.weights = file if os.path.exists(file) else ""  # ranks that share a model write others
        if self.ended != "interrupted":
            self.resume_command = None

    def lines(self) -> list[str]:
        """Return the lines after a run; the last one says how it ended, where it was interrupted or diverged."""
        lines = []
        if self.path is not None:
            lines.append(f"saved: {os.fspath(self.path)}")
            if self.resume_command is not None:
                lines.append(f"resume: {self.resume_command}")
            if self.weights:
                lines.append(f"weights: {self.weights}")
            lines.append(f"report: {self.report_command}")
        if self.state:
            lines.append(f"{self.ended}: {self.state}")
        return lines


@contextmanager
def keeping(recipe: str, arguments: Mapping[str, Any], *, json: bool) -> Iterator[Kept]:
    """Give the directory of a run, and say at its end where it is, what goes on with it and what draws it.

    A directory that was made here is removed if the run has ended in an error before it had anything to go on from.

    Args:
        recipe: by which a new directory is named.
        arguments: of ``fit``; a new directory is made where ``run_dir`` is not among them, the same for all ranks.
        json: whether all of that is in the document that is printed, and need not be said.

    Raises:
        ArgumentError: no directory can be made.
    """
    from autoaccum.distributed.group import speaks

    # Who insists on a checkpoint means that of a run that is there: ``fit`` tells that it has to be named.
    is_new = "run_dir" not in arguments and arguments.get("resume") is not True
    run_dir = arguments.get("run_dir")
    if isinstance(run_dir, str) and run_dir.lower() == NONE:
        run_dir = None
    base = Path(os.environ.get(RUNS) or "runs")
    is_first_there = not base.exists()
    made: Path | None = None
    if is_new:
        run_dir = made = _of_all_ranks(lambda: _made(base, name_of(recipe)), arguments)
    # What a recipe says of it holds for the command, too.
    kept = _kept(run_dir, ["--resume", "auto"] if arguments.get("resume") is False else [], is_new=is_new)
    try:
        yield kept
    except BaseException as error:
        if made is not None and speaks():
            _remove_if_useless(made, base if is_first_there else None)
            if made.is_dir():
                _say(kept)
        # Of a directory that was named the user knows, and an error is all there is to say; but not what a second
        # Ctrl-C has left of the run.
        elif isinstance(error, KeyboardInterrupt) and run_dir is not None and _has_checkpoint(Path(run_dir)):
            _say(kept)
        raise
    if not json:
        _say(kept)


def _kept(run_dir: Any, more: Sequence[str], *, is_new: bool) -> Kept:
    """Return what there is to say of a run in that directory; its command needs ``more`` words than were typed."""
    # Commands are made here and not where they are printed: lines and JSON have the same.
    if run_dir is None:
        return Kept(path=None, resume_command=None, report_command=None)
    place = os.fspath(run_dir)
    # Both are said anew, for the directory may have been none, and a run that starts anew does not resume.
    again = _started_as([*_without(typed.get(), ("run-dir", "resume")), *more, "--run-dir", place])
    report = shlex.join(["autoaccum", "report", place])
    return Kept(path=run_dir, resume_command=again, report_command=report, is_new=is_new)


def _without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without options that take a value."""
    found: list[str] = []
    skip = False
    for word in words:
        option = word.replace("_", "-").removeprefix("--")  # either is understood
        is_one = word.startswith("--") and option.split("=")[0] in names
        if not skip and not is_one:
            found.append(word)
        skip = not skip and is_one and "=" not in word
    return found


def _started_as(words: Sequence[str]) -> str:
    """Return a command line of the program as it was started."""
    from autoaccum.distributed.launcher import is_launched

    # How many processes there were, and where they met, only the user knows.
    return f"{'torchrun ... -m autoaccum' if is_launched() else 'autoaccum'} {shlex.join(words)}"


def sweep_lines(directory: str | os.PathLike[str], storage: str | None, study: str, *, is_finished: bool) -> list[str]:
    """Return what is said at the end of a sweep: where it is kept, what goes on with it and what draws it.

    Args:
        directory: of its trials.
        storage: as it was passed; None for the file in the directory.
        study: its name.
        is_finished: whether it has as many trials as were asked for.
    """
    place = os.fspath(directory)
    drawn = ["autoaccum", "report", *([place] if storage is None else [storage, "--study", study])]
    lines = [f"saved: {place}{'' if storage is None else f' and {storage}'}"]
    if not is_finished:
        lines.append(f"resume: {_started_as(typed.get())}")
    return [*lines, f"report: {shlex.join(drawn)}"]


def _made(base: Path, name: str) -> Path:
    """Make a directory that was not there, named after a recipe and the time of day, and return its path."""
    # Local time, as people look for what they have begun by the clock on their wall.
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock.stamp()))
    number = 0
    while True:
        number += 1
        path = base / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            # Of two processes that begin in the same second one finds it there: no run ever takes up another's.
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            accepted = f"a place that can be written to ({error.strerror})"
            cure = f"Pass --run-dir DIRECTORY, or --run-dir {NONE} to keep nothing."
            raise ArgumentError("run_dir", str(path), accepted, cure) from None
        return path


def _of_all_ranks(function: Callable[[], Path], arguments: Mapping[str, Any]) -> Path:
    """Return what a function returns, on several ranks that train together what it does on the first, for all."""
    from autoaccum.distributed.group import join
    from autoaccum.distributed.launcher import is_launched, own_device
    from autoaccum.memory.devices import current_device_kept, find_device

    if not is_launched() or arguments.get("ranks", "together") != "together":
        return function()
    # The device is that of the run, which joins the same group again: only one is ever made.
    with current_device_kept():
        device = arguments.get("device")
        group = join(find_device(own_device() if device is None else device))
    if group is None:
        return function()
    try:
        return Path(group.from_first(lambda: str(function())))
    except BaseException as error:  # that no directory can be made: the others wait to hear of one
        group.fail(error)
        raise


def _remove_if_useless(path: Path, base: Path | None) -> None:
    """Remove a new directory without a checkpoint and without anything of the user's, and its folder if that is new."""
    from autoaccum.runs.directory import OURS

    # What a callback of the user's has put there is no less worth than a checkpoint.
    if not _has_checkpoint(path) and {entry.name for entry in path.iterdir()} <= set(OURS):
        shutil.rmtree(path, ignore_errors=True)
        if base is not None:
            with suppress(OSError):  # another run has one there by now
                base.rmdir()


def _has_checkpoint(path: Path) -> bool:
    """Return whether a run can go on from what is in its directory."""
    return any((path / "checkpoints").glob("step-*"))


def _say(kept: Kept) -> None:
    """Print where a run is kept to standard error, once for all ranks."""
    from autoaccum.distributed.group import speaks

    if speaks():
        for line in kept.lines():
            print(line, file=sys.stderr)
