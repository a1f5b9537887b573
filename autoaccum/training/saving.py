"""What a run saves, and how a later process takes it up: its state, its directory, what it was asked for.

A checkpoint holds the state of each part of a run, which has a ``state_dict`` of its own. What follows from the
arguments is not in it, for a run is resumed by the same call; nor is what only makes it fast: a comparison of plans
that goes on begins anew, and so does the calm that growth waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.base import Source
from autoaccum.errors import ArgumentError, CheckpointCorruptError
from autoaccum.events import Resumed, Saved
from autoaccum.memory import clock
from autoaccum.memory.oom import insist
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.schedules import Schedule
from autoaccum.runs import configuration
from autoaccum.runs.cost_key import describe
from autoaccum.runs.details import details_of
from autoaccum.runs.directory import RunDirectory
from autoaccum.training.declarations import values_of
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.options import OF_FIT, FitArguments
from autoaccum.training.pace import Pace
from autoaccum.training.validation import Validations, Validator
from autoaccum.window.modules import State, left_out, load_modules, load_optimizer, state_of_modules
from autoaccum.window.step import Step


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The parts of a run that change while it trains, whose states together are the run's."""

    model: nn.Module
    others: list[nn.Module]
    """Further modules that are trained: a loss with parameters, say."""
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    step: Step
    validator: Validator | None
    validations: Validations
    noise: Smoothed | None
    pace: Pace
    device: torch.device
    """Where all of them are."""

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else), after a window."""
        # The keys, and their order, are those of the first version of the format: checkpoints of all versions are read,
        # and the same run writes the same bytes.
        return self.model.state_dict(), {
            "buffers": left_out(self.model),
            "modules": state_of_modules(self.others),
            "optimizer": self.optimizer.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "engine": self.step.state_dict(),
            "validator": None if self.validator is None else self.validator.state_dict(),
            "noise": None if self.noise is None else self.noise.state_dict(),
            **self.pace.state_dict(),
            **self.validations.state_dict(),
            "device": describe(self.device),
            "randomness": randomness.state_dict(self.device),
        }

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned, into the parts of a run that was set up by the same arguments."""
        # The weights lie in a file of their own, which any reader of safetensors understands: apart from other modules.
        of_all = [{"state": weights, "buffers": state["buffers"]}, *state["modules"]]
        load_modules([self.model, *self.others], of_all, self.device)
        load_optimizer(self.optimizer, state["optimizer"])
        self.learning_rate.load_state_dict(
            state["learning_rate"]
        )  # after the optimizer, which has the rates themselves
        # Sizes that were found are of the device they were found on; on another one they are searched for anew.
        is_same_device = state["device"] == describe(self.device)
        self.step.load_state_dict(state["engine"], is_same_device=is_same_device)
        if self.validator is not None and state["validator"] is not None and is_same_device:
            self.validator.load_state_dict(state["validator"])
        if self.noise is not None and state["noise"] is not None:
            self.noise.load_state_dict(state["noise"])
        self.pace.load_state_dict(state)
        self.validations.load_state_dict(state)
        # Last, for whatever is drawn while the parts are put back has not been drawn in the run.
        randomness.load_state_dict(state["randomness"], self.device)


def configuration_of(arguments: FitArguments, schedule: Schedule, source: Source, state: RunState) -> dict[str, Any]:
    """Return what was asked for; under "trained" what a run that goes on has to have in common with this one.

    Under "details" is what came later than the first version of the format, and is no part of ``config.json``.
    """
    # The model and the data are described apart, by more than their names.
    given = {name: value for name, value in values_of(arguments).items() if name not in ("model", "data")}
    # Their names, for functions have no text that is the same in each process.
    given["metrics"] = ", ".join(arguments.metrics or ()) or None
    model, last = arguments.model, arguments.modules()[-1]
    trained = {
        "model": configuration.describe_model(model),
        # A loss or a training step that is a module may have parameters to train too.
        "loss": configuration.describe_model(last) if last is not model else None,
        "data": source.description(),
        "effective_batch": str(schedule),
        "optimizer": configuration.describe_optimizer(state.optimizer),
        # The scheduler's own state is in checkpoints; told of another number of steps it would go on otherwise.
        "steps of the lr_scheduler": state.learning_rate.num_steps,
        **configuration.plain(
            {name: given[name] for name, argument in OF_FIT.items() if argument.decides == "training"}
        ),
    }
    functions = {name: getattr(arguments, name) for name in ("loss_fn", "training_step", "num_items", "collate_fn")}
    details = details_of({"model": model} | ({"loss": last} if last is not model else {}), functions, source.content())
    return {"model": type(model).__name__, **configuration.plain(given), "trained": trained, "details": details}


def open_directory(run: Run, path: Path, arguments: FitArguments) -> tuple[RunDirectory, Resumed | None]:
    """Return the run's directory, and what to say if the run goes on from what an earlier process left there.

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
    """Put the run where its newest whole checkpoint is; return what to say of it, or None where there is none."""
    found = directory.resume()
    if found is None:
        return None
    checkpoint, weights, state = found
    try:
        run.load_state_dict(weights, state)
    # Its checksums were right, so nothing is torn: the state has another shape than this version's.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"is of another version, or was made by hand ({error!r})"
        raise CheckpointCorruptError(checkpoint.path, problem) from error
    return Resumed(step=run.step, num_samples=run.samples_seen, checkpoint=checkpoint.path.name)


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
    # All of it is done again: what was begun is removed when it fails, and counts for nothing until it is whole.
    path = insist(
        lambda: directory.save(run.step, *run.state_dict(), facts, is_best=is_best), "a checkpoint was written"
    )
    validations.is_unsaved_best = False  # once it was handed over: a save that raises ends the run anyway
    if is_last:  # others may be written while training goes on: an error comes up at the next one
        directory.wait()
    return Saved(step=run.step, path=str(path), seconds=clock.now() - started)
