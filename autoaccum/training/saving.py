"""What a run saves, and what is compared and taken up when it is resumed.

A checkpoint holds the state of each part of a run, which has a ``state_dict`` of its own. What follows from the
arguments is not in it, for a run is resumed by the same call; nor is what only makes it fast: a comparison of plans
that goes on begins anew, and so does the calm that growth waits for.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.base import Source
from autoaccum.data.sources import shuffles
from autoaccum.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from autoaccum.events import Resumed, Saved
from autoaccum.memory import clock
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.oom import RanOut, attempt, insist, is_out_of_memory, named
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.schedules import Schedule
from autoaccum.runs import configuration, states
from autoaccum.runs.checkpoint import Checkpoint
from autoaccum.runs.directory import RunDirectory
from autoaccum.runs.parted import placed
from autoaccum.runs.past_of_run import describe
from autoaccum.runs.writers import Writers
from autoaccum.step.module_state import State, left_out, load_modules, load_optimizer, state_of_modules, with_wrapped
from autoaccum.step.optimizers import allocate_state, bare_tensors, with_types_of
from autoaccum.step.step import Step
from autoaccum.training import recipes
from autoaccum.training.best_validation import Validations
from autoaccum.training.declarations import values_of
from autoaccum.training.hooks import Hooks
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.optimizer_attributes import OptimizerAttributes, evaluated_weights, has_modes, parameters_of
from autoaccum.training.options import TRAINED, FitArguments
from autoaccum.training.run_position import Pace
from autoaccum.training.validation import Validator


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
    trained = {
        "model": configuration.describe_model(model),
        # A loss or a training step that is a module may have parameters to train too.
        "loss": configuration.describe_model(last) if last is not model else None,
        "data": description,
        "effective_batch": str(schedule),
        "optimizer": configuration.describe_optimizer(optimizer),
        # The scheduler's own state is in checkpoints; told of another number of steps it would go on otherwise.
        "steps of the lr_scheduler": learning_rate.num_steps,
        **configuration.plain({name: given[name] for name in TRAINED}),
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
    run: Any, path: Path, arguments: FitArguments, writers: Writers | None = None
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


def _resume(run: Any, directory: RunDirectory) -> Resumed | None:
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


def follow(run: Any, writers: Writers) -> None:
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


def save_own(run: Any, writers: Writers) -> None:
    """Write this rank's part of a checkpoint of the first rank."""
    # Of all that is no tensor in parts the first rank's is kept: where a run goes on, all take up the same.
    weights, state = run.state_dict()
    writers.write({**states.of_weights(weights).parts, **states.examined(state).parts})


def save(run: Any, directory: RunDirectory, validations: Validations, loss: float | None) -> Saved:
    """Write a checkpoint and return what to say of it.

    Args:
        run: whose state is written.
        directory: where to.
        validations: what they have come to, by which the best checkpoint is known.
        loss: of the newest window, by which people choose a checkpoint.
    """
    started = clock.now()
    facts = {"num_samples": run.samples_seen, "loss": loss, "validation_loss": validations.loss}
    is_best = validations.is_best_at(run.step)

    def write() -> Path:
        weights, state = run.state_dict()
        return directory.save(run.step, weights, state, facts, is_best=is_best)

    # All of it is done again: what was begun is removed when it fails, and counts for nothing until it is whole. Where
    # other ranks take part in it, each does its own part again.
    path = insist(write, "a checkpoint was written") if directory.writers is None else write()
    validations.is_unsaved_best = False  # once it was handed over: a save that raises ends the run anyway
    return Saved(step=run.step, path=str(path), seconds=clock.now() - started)


_TIMES = 4
"""Bytes that a trial takes, by those of the checkpoint: it is read, held beside two copies, and compared."""


def problem_of(run: Any, checkpoint: Checkpoint) -> str:
    """Return what would keep a later process from going on from a checkpoint; empty where nothing would.

    Nothing is tried where the host, or the device, has no room for copies, or where the model cannot be copied.

    Args:
        run: its ``RunState``.
        checkpoint: that was written of it.
    """
    host = CpuMemory()
    if _TIMES * sum(size for size, _ in checkpoint.files.values()) > host.limit() - host.used():
        return ""
    with randomness.preserved_randomness():
        found = attempt(lambda: _tried(run, checkpoint))
    return "" if isinstance(found, RanOut) else found


def _tried(run: Any, checkpoint: Checkpoint) -> str:
    try:
        copied = _copied(run)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ""
    weights, state = checkpoint.load()
    state.pop("trained", None)
    try:
        copied.load_trained(*copied.placed(weights, state))
        found = _entries(*copied.trained())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}".partition(" Resume from another checkpoint")[0]
    for entry, saved in _entries(weights, state).items():
        if entry not in found or not _is_same(saved, found[entry]):
            return f"{entry} comes back as something else"
    return ""


def _entries(weights: State, state: State) -> dict[str, Any]:
    """Return what is compared."""
    found: dict[str, Any] = {f"the weight {name}": value for name, value in weights.items()}
    found |= {"buffers": state["buffers"], "modules": state["modules"]}
    for name, value in state.get("optimizer_attributes", {}).items():
        found[f"optimizer_attributes.{name}"] = value
    optimizer = state["optimizer"]
    kept = optimizer.get("state") if isinstance(optimizer, dict) else None
    for number, values in kept.items() if isinstance(kept, dict) else ():
        for name, value in values.items() if isinstance(values, dict) else (("", values),):
            found[f"optimizer.state[{number!r}].{name}".rstrip(".")] = value
    return found | {"optimizer": optimizer}


def _is_same(saved: Any, found: Any) -> bool:
    pairs = zip_longest(states.leaves(saved), states.leaves(found), fillvalue=("", None))
    return all(place == other and _is_same_leaf(one, another) for (place, one), (other, another) in pairs)


def _is_same_leaf(saved: Any, found: Any) -> bool:
    if not (isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor)):
        return type(saved) is type(found) and repr(saved) == repr(found)  # NaN is not equal to itself
    ones = [tensor.detach().cpu().contiguous() for tensor in (saved, found)]
    bytes_of = [tensor.view(-1).view(torch.uint8) for tensor in ones if tensor.dtype == saved.dtype]
    return saved.shape == found.shape and len(bytes_of) == 2 and torch.equal(*bytes_of)


def _copied(run: Any) -> Any:
    """Return a run over copies of what is trained, whose optimizer has taken no step."""
    memo: dict[int, Any] = {}
    model, others = copy.deepcopy((run.model, run.others), memo)
    for made, module in zip((model, *others), (run.model, *run.others), strict=True):
        with_types_of(made.parameters(), module.parameters())
    optimizer = _copy_of(run.optimizer, memo)
    for path, one in with_wrapped(optimizer).items():
        # What steps have put there may be of the parameters that were copied: views by their addresses.
        vars(one).update(copy.deepcopy(run.optimizer_attributes.empty(path)))
    allocate_state(optimizer, [model, *others])
    attributes = OptimizerAttributes(optimizer, [model, *others])
    return replace(run, model=model, others=others, optimizer=optimizer, optimizer_attributes=attributes)


def _copy_of(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without its state: its own ``__getstate__`` would leave out its attributes."""
    wrapped = with_wrapped(optimizer).values()
    for one in wrapped:
        memo[id(one)], memo[id(one.state)] = object.__new__(type(one)), defaultdict(dict)
    for one in wrapped:
        # Where a scheduler has wrapped it, its step is a function over the optimizer itself.
        own = {name: value for name, value in vars(one).items() if name != "step"}
        vars(memo[id(one)]).update(copy.deepcopy(own, memo))
    return memo[id(optimizer)]  # type: ignore[no-any-return]


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
    source: Source
    """The data."""
    device: torch.device
    """Where all of them are."""
    optimizer_attributes: OptimizerAttributes
    """What the optimizer keeps on itself."""
    callbacks: Hooks = field(default_factory=lambda: Hooks(()))
    """The callbacks, some of which may keep something."""

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else), after a window."""
        weights, trained = self.trained()
        return weights, {
            **trained,
            "learning_rate": self.learning_rate.state_dict(),
            "engine": self.step.state_dict(),
            "validator": None if self.validator is None else self.validator.state_dict(),
            "noise": None if self.noise is None else self.noise.state_dict(),
            **self.pace.state_dict(),
            **self.validations.state_dict(),
            "device": describe(self.device),
            "randomness": randomness.state_dict(self.device),
            **({} if (place := self.source.state_dict()) is None else {"data": place}),
            **self.callbacks.state_dict(),
        }

    def trained(self) -> tuple[State, State]:
        """Return (the model's state_dict, what else is trained or belongs to it)."""
        own = self.optimizer_attributes.state_dict()
        return evaluated_weights(self.model, self.optimizer), {
            "buffers": left_out(self.model),
            "modules": state_of_modules(self.others),
            "optimizer": self.optimizer.state_dict(),
            **({"optimizer_attributes": own} if own else {}),
            **self._bare(),
            **self._stepped_on(),
        }

    def bare_tensors(self) -> list[torch.Tensor]:
        """Return what the optimizer trains and no module holds, and so no state_dict has."""
        return bare_tensors(self.optimizer, [self.model, *self.others])

    def _bare(self) -> State:
        """Return their values, where there are any: a run without them writes what it always wrote."""
        found = self.bare_tensors()
        return {"tensors": [tensor.detach() for tensor in found]} if found else {}

    def _stepped_on(self) -> State:
        """Return the weights that an optimizer with modes steps on: others are the model's for whoever reads it."""
        if not has_modes(self.optimizer):
            return {}
        return {"stepped_on": [p.detach() for p in parameters_of(self.optimizer)]}

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned, into the parts of a run that was set up by the same arguments.

        Raises:
            CheckpointCorruptError: a part cannot be put back; it is named.
        """
        weights, state = self.placed(weights, state)
        self.load_trained(weights, state)
        with _putting_back("learning_rate"):  # after the optimizer, which has the rates themselves
            self.learning_rate.load_state_dict(state["learning_rate"])
        with _putting_back("callbacks"):
            self.callbacks.load_state_dict(state)
        with _putting_back("the state"):
            # Sizes that were found are of the device they were found on; on another one they are searched for anew.
            is_same_device = state["device"] == describe(self.device)
            self.step.load_state_dict(state["engine"], is_same_device=is_same_device)
            if self.validator is not None and state["validator"] is not None and is_same_device:
                self.validator.load_state_dict(state["validator"])
            if self.noise is not None and state["noise"] is not None:
                self.noise.load_state_dict(state["noise"])
            self.pace.load_state_dict(state)
            if "data" in state:
                self.source.load_state_dict(state["data"])
            self.validations.load_state_dict(state)
        # Last, for whatever is drawn while the parts are put back has not been drawn in the run.
        with _putting_back("randomness"):
            randomness.load_state_dict(state["randomness"], self.device)

    def placed(self, weights: State, state: State) -> tuple[State, State]:
        """Return what ``state_dict`` returned, with this rank's parts of what is distributed; nothing is changed.

        Raises:
            CheckpointCorruptError: a part is missing.
        """
        return placed(self.model, self.others, self.optimizer, weights, state)

    def load_trained(self, weights: State, state: State) -> None:
        """Put back what ``trained`` returned.

        Raises:
            CheckpointCorruptError: code of the user's, or of another library, failed to put a part back.
        """
        # The weights lie in a file of their own, which whoever wants them loads: apart from other modules.
        of_all = [{"state": weights, "buffers": state["buffers"]}, *state["modules"]]
        with _putting_back("weights"):
            load_modules([self.model, *self.others], of_all, self.device)
        with _putting_back("tensors"), torch.no_grad():
            # In place, for the user's function holds them.
            for tensor, value in zip(self.bare_tensors(), state.get("tensors", ()), strict=True):
                if tensor.shape != value.shape:  # which would be repeated where it can be
                    raise ValueError(f"{tuple(value.shape)} in the place of {tuple(tensor.shape)}")
                tensor.copy_(value)
        with _putting_back("stepped_on"), torch.no_grad():
            for p, value in zip(parameters_of(self.optimizer), state.get("stepped_on", ()), strict=False):
                p.copy_(value)
        with _putting_back("optimizer"):
            load_optimizer(self.optimizer, state["optimizer"])
        with _putting_back("optimizer_attributes"):
            self.optimizer_attributes.load_state_dict(state.get("optimizer_attributes", {}))


@contextmanager
def _putting_back(entry: str) -> Iterator[None]:
    """Say which part could not be put back, where code that nobody knows has failed: a user's scheduler, a hook."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, CheckpointError):
            raise
        raise CheckpointCorruptError("", f"cannot be put back ({error!r})", entry=entry) from error
