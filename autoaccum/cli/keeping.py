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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from autoaccum.errors import ArgumentError
from autoaccum.events import Record, Saved
from autoaccum.memory import clock
from autoaccum.runs.manifests import manifests
from autoaccum.training.recipes import module_and_function, name_of, passed

if TYPE_CHECKING:  # it takes torch with it
    from autoaccum.training.result import FitResult

_BUDGETS = ("epochs", "steps", "samples")
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
    """The command that resumes the run, with twice the budget if it is finished; None if no command does."""
    report_command: str | None
    """What draws it."""
    recipe: str = ""
    """As it was typed."""
    is_new: bool = False
    """Whether the directory was made here, so that nobody knows of it yet."""
    more: Sequence[str] = ()
    """Words that the resume command needs next to the typed ones."""
    _has_best: bool = False
    _settings: Mapping[str, Any] = field(default_factory=dict)
    _step: int = 0
    ended: str = ""
    """How the run has ended, as ``FitResult`` has it; empty where an error ended it."""
    state: str = ""
    """Why no command alone resumes the run, or since when it diverged; else empty."""

    def __call__(self, record: Record) -> None:
        """Say where a new run is kept once it can go on from there: what is killed says nothing at its end."""
        if self.is_new and isinstance(record, Saved):
            self.is_new = False
            place = shlex.quote(os.fspath(self.path or ""))
            tqdm.write(f"saving to: {place} (resume: --run-dir {place})", file=sys.stderr)

    def end(self, result: FitResult, arguments: Mapping[str, Any]) -> None:
        """Note how a run of these arguments ended, and which command resumes it."""
        from autoaccum.data.streams import is_iterator  # not sooner: to help takes no torch

        self.ended = result.ended
        if self.ended == "diverged":
            self.state = f"{result.divergence}. Lower the learning rate, or pass --clip-norm 1.0, in a new run."
        elif self.ended == "interrupted":
            self.state = f"after step {result.num_steps}"
        elif self.ended == "stopped":
            self.state = "by a callback, which has to allow more steps before the run can resume"
        elif arguments.get("lr_scheduler") is not None:
            self.state = "its lr_scheduler has ended (a longer run begins again, in a new run_dir)"
        elif is_iterator(arguments.get("data")):
            self.state = "its data can be read only once"
        elif self.path is not None:
            budget = next((name for name in _BUDGETS if arguments.get(name) is not None), "epochs")
            # An earlier command may have trained further than this one asked for.
            epochs = result.history[-1].epoch + 1 if result.history else 1
            taken = {"epochs": epochs, "steps": result.num_steps, "samples": result.num_samples}[budget]
            more = [f"--{budget}", str(2 * max(taken, arguments.get(budget) or 1))]
            self.resume_command = _command([*_without(typed.get(), _BUDGETS), *more], os.fspath(self.path), self.more)
        if self.ended != "interrupted" and self.state:
            self.resume_command = None
        # Validations whose losses were all NaN leave no best checkpoint.
        self._has_best = self.path is not None and any(one.is_best for one in manifests(Path(self.path)))
        self._step, self._settings = result.num_steps, passed.get()

    def lines(self) -> list[str]:
        """Return the lines after a run; the last one says how the run ended, unless it spent its budget."""
        lines = []
        if self.path is not None:
            place = os.fspath(self.path)
            weights = os.path.join(place, "checkpoints", f"step-{self._step:08d}", "model.safetensors")
            lines.append(f"saved: {place}")
            if self.resume_command is not None:
                lines.append(f"resume: {self.resume_command}")
            elif self._has_best and self.ended != "diverged":
                lines.append(f"weights: {_loading(self.recipe, self._settings, best_of=place)}")
            elif self.ended != "diverged" and os.path.exists(weights):
                lines.append(f"weights: {_loading(self.recipe, self._settings, file=weights)}")
            lines.append(f"report: {self.report_command}")
        # Where nothing is kept, what else there is to say is about going on.
        if self.state and (lines or self.ended in ("interrupted", "diverged")):
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
    from autoaccum.ranks.group import speaks

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
    kept = _kept(recipe, run_dir, is_new=is_new, more=["--resume", "auto"] if arguments.get("resume") is False else [])
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


def _kept(recipe: str, run_dir: Any, *, is_new: bool, more: Sequence[str]) -> Kept:
    """Return what there is to say of a run in that directory."""
    # Commands are made here and not where they are printed: lines and JSON have the same.
    if run_dir is None:
        return Kept(path=None, resume_command=None, report_command=None)
    report = shlex.join(["autoaccum", "report", os.fspath(run_dir)])
    goes_on = _command(typed.get(), os.fspath(run_dir), more)
    return Kept(path=run_dir, resume_command=goes_on, report_command=report, recipe=recipe, is_new=is_new, more=more)


def _loading(recipe: str, settings: Mapping[str, Any], *, best_of: str = "", file: str = "") -> str:
    """Return a line of Python that makes the recipe's model and loads weights into it.

    Args:
        recipe: as it was typed.
        settings: what its function was called with, where that differs from its defaults.
        best_of: the run's directory; its best weights are loaded.
        file: the file of weights to load, where there is no best.

    >>> _loading("a.py", {}, best_of="runs/a")
    "import autoaccum; model = autoaccum.load_best('runs/a', 'a.py')"
    >>> _loading("a.b:small", {"width": 8}, best_of="runs/a")
    "import autoaccum; from a.b import small; model = autoaccum.load_best('runs/a', small(width=8)['model'])"
    """
    if best_of and not settings:
        return f"import autoaccum; model = autoaccum.load_best({best_of!r}, {recipe!r})"
    target, function, is_file = module_and_function(recipe)
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    if is_file:
        # The recipe may import what lies next to it; the current folder is on the path already.
        folder = os.path.dirname(target)
        path = f"import sys; sys.path.insert(0, {folder!r}); " if folder else ""
        imports, made = f"{path}import runpy", f"runpy.run_path({target!r})[{function!r}]({given})['model']"
    else:
        imports, made = f"from {target} import {function}", f"{function}({given})['model']"
    if best_of:
        return f"import autoaccum; {imports}; model = autoaccum.load_best({best_of!r}, {made})"
    load = f"model.load_state_dict(safetensors.torch.load_file({file!r}))"
    return f"import safetensors.torch; {imports}; model = {made}; {load}"


def _command(words: Sequence[str], run_dir: str, more: Sequence[str] = ()) -> str:
    """Return the command line that goes on with a run, made of the one that has begun it.

    >>> _command(["fit", "a.py", "--resume", "false", "--run_dir=b", "--lr", "1"], "runs/my run")
    "autoaccum fit a.py --lr 1 --run-dir 'runs/my run'"
    """
    # Both are said anew, for the directory may have been none, and what begins anew does not go on.
    return _started_as([*_without(words, ("run-dir", "resume")), *more, "--run-dir", run_dir])


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
    from autoaccum.ranks.launcher import is_launched

    # How many processes there were, and where they met, only the user knows.
    return f"{'torchrun ... -m autoaccum' if is_launched() else 'autoaccum'} {shlex.join(words)}"


def trial_line(
    number: int, of_recipe: Mapping[str, Any], of_fit: Mapping[str, Any], sweeps_own: Collection[str]
) -> str:
    """Return the line that says by which command a trial of a sweep is trained once more.

    Args:
        number: of the trial.
        of_recipe: what its recipe was called with, beside what all trials have in common.
        of_fit: arguments of ``fit`` that were the trial's.
        sweeps_own: names of arguments that ``fit`` has not; other options stay as they were typed.
    """
    # No "--json": where that was typed nothing of this is printed.
    words = _without(typed.get()[1:], {name.replace("_", "-") for name in (*sweeps_own, *of_recipe, *of_fit)})
    for name, value in of_recipe.items():
        words += ["--set", f"{name}={value}"]
    for name, value in of_fit.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return f"train trial {number} again: {_started_as(['fit', *words])}"


def sweep_lines(
    directory: str | os.PathLike[str], storage: str | None, study: str, trials: int, *, is_finished: bool
) -> list[str]:
    """Return what is said at the end of a sweep: where it is kept, what goes on with it and what draws it.

    Args:
        directory: of its trials.
        storage: as it was passed; None for the file in the directory.
        study: its name.
        trials: as many as were asked for.
        is_finished: whether it has as many.
    """
    place = os.fspath(directory)
    words = [*_without(typed.get(), ("trials",)), "--trials", str(2 * trials)] if is_finished else typed.get()
    drawn = ["autoaccum", "report", *([place] if storage is None else [storage, "--study", study])]
    return [
        f"saved: {place}{'' if storage is None else f' and {storage}'}",
        f"resume: {_started_as(words)}",
        f"report: {shlex.join(drawn)}",
    ]


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
    from autoaccum.memory.devices import current_device_kept, find_device
    from autoaccum.ranks.group import join
    from autoaccum.ranks.launcher import is_launched, own_device

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
    from autoaccum.ranks.group import speaks

    if speaks():
        for line in kept.lines():
            print(line, file=sys.stderr)
