"""What a run saves, and how a later process takes it up: its state, its directory, what it was asked for.

A checkpoint holds the state of each part of a run, which has a ``state_dict`` of its own. What follows from the
arguments is not in it, for a run is resumed by the same call; nor is what only makes it fast: a comparison of plans
that goes on begins anew, and so does the calm that growth waits for.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from autoaccum import _checks
from autoaccum.data.base import Source
from autoaccum.data.sources import shuffles
from autoaccum.errors import ArgumentError, CheckpointError
from autoaccum.events import Resumed, Saved
from autoaccum.memory import clock
from autoaccum.memory.oom import insist, is_out_of_memory, named
from autoaccum.planning.schedules import Schedule
from autoaccum.runs import configuration
from autoaccum.runs.checkpoint import Checkpoint
from autoaccum.runs.directory import RunDirectory
from autoaccum.runs.states import pack
from autoaccum.runs.writers import Writers
from autoaccum.training import recipes
from autoaccum.training.best import Validations
from autoaccum.training.declarations import values_of
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.options import OF_FIT, FitArguments
from autoaccum.window.modules import State


class Run(Protocol):
    """A run as far as it is saved here: ``Trainer``."""

    @property
    def device(self) -> torch.device:
        """Return where it trains."""

    @property
    def step(self) -> int:
        """Return the optimizer steps taken."""

    @property
    def samples_seen(self) -> int:
        """Return the samples trained on."""

    def configuration(self) -> dict[str, Any]:
        """Return what was asked for, as ``configuration_of`` does."""

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else)."""

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned."""


def configuration_of(
    arguments: FitArguments,
    schedule: Schedule,
    source: Source,
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate,
    judge: Any,
) -> dict[str, Any]:
    """Return what was asked for; under "trained" what a run that goes on has to have in common with this one.

    Args:
        arguments: of the run.
        schedule: of the effective batch.
        source: the data.
        optimizer: as it is before the first step.
        learning_rate: its scheduler, if any.
        judge: the run's ``KeepBest``; None without one.
    """
    # The model and the data are described apart, by more than their names.
    given = {name: value for name, value in values_of(arguments).items() if name not in ("model", "data")}
    # Their names, for functions have no text that is the same in each process.
    given["metrics"] = ", ".join(arguments.metrics or ()) or None
    model, last = arguments.model, arguments.modules()[-1]
    with named("the data were described for config.json"):
        description = source.description()
        if (content := source.content()) is not None:
            description["content"] = content
    trained = {
        "model": configuration.describe_model(model),
        # A loss or a training step that is a module may have parameters to train too.
        "loss": configuration.describe_model(last) if last is not model else None,
        "data": description,
        "effective_batch": str(schedule),
        "optimizer": configuration.describe_optimizer(optimizer),
        # The scheduler's own state is in checkpoints; told of another number of steps it would go on otherwise.
        "steps of the lr_scheduler": learning_rate.num_steps,
        **configuration.plain(
            {name: given[name] for name, argument in OF_FIT.items() if argument.decides == "training"}
        ),
    }
    if learning_rate.scheduler is not None:
        trained["lr_scheduler"] = type(learning_rate.scheduler).__name__
    # Of a run by the command line.
    if parameters := recipes.passed.get():
        trained[configuration.PARAMETERS] = configuration.plain(parameters)
    if isinstance(arguments.data, DataLoader):  # which says so itself
        given["shuffle"] = shuffles(arguments.data)
    described = {"model": type(model).__name__, **configuration.plain(given)}
    if judge is not None:
        described["keep_best"] = {"metric": judge.metric, "mode": judge.mode}
    return {**described, "trained": trained}


def open_directory(
    run: Run, path: Path, arguments: FitArguments, writers: Writers | None = None
) -> tuple[RunDirectory, Resumed | None]:
    """Return the run's directory, and what to say if the run goes on from what an earlier process left there.

    ``writers`` are the ranks that share the model; all but the first call ``follow`` meanwhile.

    Raises:
        ArgumentError: there is no checkpoint, and ``resume=True`` asks for one.
        CheckpointError: the directory cannot be used, or what is in it.
        ResumeError: the checkpoint is of another run.
    """
    directory = RunDirectory(
        path,
        keep=arguments.keep_checkpoints,
        cadence=_checks.of_checkpoint_every(arguments.checkpoint_every),
        config=run.configuration(),
        anew=arguments.resume is False,
        # On a CPU the copy that is written in the background would be in the memory that windows are planned for.
        background=run.device.type != "cpu",
        writers=writers,
    )
    try:
        resumed = _resume(run, directory)
        if resumed is None and arguments.resume is True:
            cure = "Pass resume='auto' to begin where there is nothing to go on from."
            raise ArgumentError("resume", True, f"a checkpoint in {path}", cure)
    except BaseException:
        directory.close()  # its lock too: a call that was refused keeps no other one out
        raise
    return directory, resumed


def _resume(run: Run, directory: RunDirectory) -> Resumed | None:
    """Put the run where its newest whole checkpoint is; return what to say of it, or None where there is none.

    Raises:
        CheckpointError: memory ran out while it was read.
    """

    def take(found: Checkpoint, weights: Any, state: Any) -> None:
        run.load_state_dict(weights, state)

    try:
        found = directory.resume(take)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cause = error.with_traceback(None)  # its frames hold what was read
    else:
        if found is None:
            return None
        return Resumed(step=run.step, num_samples=run.samples_seen, checkpoint=found.path.name)
    raise CheckpointError(
        f"{directory.path}: memory ran out while a checkpoint was read, with which nothing is wrong. It is in memory "
        f"beside the model until it is put back: allow more.",
        path=directory.path,
    ) from cause


def follow(run: Run, writers: Writers) -> None:
    """Take up the checkpoint that the first rank takes up, if it does: what ``open_directory`` is on the others."""
    while (path := writers.offer(None)) is not None:
        # What was asked for is compared by the first rank, and its error is heard as any other one.
        def take(path: Path = path) -> None:
            weights, state = Checkpoint.at(path).load(writers.share)
            state.pop("trained", None)
            run.load_state_dict(weights, state)

        with suppress(CheckpointError):  # which the first rank has heard, and goes on with the one before
            writers.take(take)
            return


def save_own(run: Run, writers: Writers) -> None:
    """Write this rank's part of a checkpoint of the first rank."""
    # Of all that is no tensor in parts the first rank's is kept: where a run goes on, all take up the same.
    weights, state = run.state_dict()
    writers.write(pack(weights, state))


def save(run: Run, directory: RunDirectory, validations: Validations, loss: float | None, *, is_last: bool) -> Saved:
    """Write a checkpoint and return what to say of it; the last one waits until it is on the disk.

    Args:
        run: whose state is written.
        directory: where to.
        validations: what they have come to, by which the best checkpoint is known.
        loss: of the newest window, by which people choose a checkpoint.
        is_last: whether the run ends with it.
    """
    started = clock.now()
    facts = {"num_samples": run.samples_seen, "loss": loss, "validation_loss": validations.loss}
    is_best = validations.is_best_at(run.step)

    def write() -> Path:
        return directory.save(run.step, *run.state_dict(), facts, is_best=is_best)

    # All of it is done again: what was begun is removed when it fails, and counts for nothing until it is whole. Where
    # other ranks take part in it, each does its own part again.
    path = insist(write, "a checkpoint was written") if directory.writers is None else write()
    validations.is_unsaved_best = False  # once it was handed over: a save that raises ends the run anyway
    if is_last:  # others may be written while training goes on: an error comes up at the next one
        directory.wait()
    return Saved(step=run.step, path=str(path), seconds=clock.now() - started)
