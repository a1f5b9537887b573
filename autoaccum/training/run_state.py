"""The state of a run: the parts that have it, how it is saved, checked against the run that is there, and put back."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from autoaccum._kinds import a, anything, entries, number, optional, refuse, shown, whole
from autoaccum.data import randomness
from autoaccum.data.base import Source
from autoaccum.data.random_states import check_random_states
from autoaccum.errors import CheckpointCorruptError, CheckpointError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.saved import NOISE
from autoaccum.runs.cost_key import describe
from autoaccum.runs.placing import placed
from autoaccum.training.best import Validations
from autoaccum.training.hooks import SAVED as SAVED_BY_CALLBACKS
from autoaccum.training.hooks import Hooks
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.modes import evaluated_weights, has_modes, parameters_of
from autoaccum.training.optimizer_attributes import OptimizerAttributes
from autoaccum.training.pace import Pace
from autoaccum.training.validation import SAVED, Validator
from autoaccum.window.modules import State, left_out, load_modules, load_optimizer, state_of_modules
from autoaccum.window.optimizers import bare_tensors
from autoaccum.window.restoring import (
    check_like,
    check_module,
    check_modules,
    check_optimizer,
    check_tensors,
    engine,
)
from autoaccum.window.step import Step

_BEST_LOSS = number(finite=False)
_LOSS = optional(number(finite=False, nan=True))


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
        # The keys, and their order, are those of the first version of the format: checkpoints of all versions are read,
        # and the same run writes the same bytes.
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
            CheckpointCorruptError: an entry is not such as this run can have, and nothing was changed; or code of the
                user's failed to put a part back.
        """
        weights, state = self.checked(weights, state)
        self.load_trained(weights, state)
        with _putting_back("learning_rate"):  # after the optimizer, which has the rates themselves
            self.learning_rate.load_state_dict(state["learning_rate"])
        # Sizes that were found are of the device they were found on; on another one they are searched for anew.
        is_same_device = state["device"] == describe(self.device)
        self.step.load_state_dict(state["engine"], is_same_device=is_same_device)
        if self.validator is not None and state["validator"] is not None and is_same_device:
            self.validator.load_state_dict(state["validator"])
        if self.noise is not None and state["noise"] is not None:
            self.noise.load_state_dict(state["noise"])
        with _putting_back("callbacks"):
            self.callbacks.load_state_dict(state)
        self.pace.load_state_dict(state)
        if "data" in state:  # which older versions have not kept
            self.source.load_state_dict(state["data"])
        self.validations.load_state_dict(state)
        # Last, for whatever is drawn while the parts are put back has not been drawn in the run.
        with _putting_back("randomness"):
            randomness.load_state_dict(state["randomness"], self.device)

    def checked(self, weights: State, state: State) -> tuple[State, State]:
        """Return what ``state_dict`` returned as this run can have it; nothing is changed.

        Raises:
            CheckpointCorruptError: an entry is not such as this run can have.
        """
        weights, state = placed(self.model, self.others, self.optimizer, weights, state)
        _check(self, weights, state)
        return weights, state

    def load_trained(self, weights: State, state: State) -> None:
        """Put back what ``trained`` returned.

        Raises:
            CheckpointCorruptError: code of the user's, or of another library, failed to put a part back.
        """
        # The weights lie in a file of their own, which any reader of safetensors understands: apart from other modules.
        of_all = [{"state": weights, "buffers": state["buffers"]}, *state["modules"]]
        with _putting_back("weights"):
            load_modules([self.model, *self.others], of_all, self.device)
        with _putting_back("tensors"), torch.no_grad():
            # In place, for the user's function holds them.
            for tensor, value in zip(self.bare_tensors(), state.get("tensors", ()), strict=True):
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


def _check(run: RunState, weights: Any, state: Any) -> None:
    """Check the state of a run, each entry by itself and then together.

    Raises:
        CheckpointCorruptError: an entry is not such as the run can have; it is named.
    """
    held = run.bare_tensors()
    entries(
        {
            "buffers": anything,
            "modules": anything,
            "optimizer": anything,
            "learning_rate": entries({"scheduler": anything, "steps_taken": whole()}),
            "engine": engine(has_scaler=run.step.transaction.scaler is not None),
            "validator": optional(SAVED),
            "noise": optional(NOISE),
            **run.pace.checks(),
            "_validated": whole(),
            "_validation_loss": _LOSS,
            "_best_loss": _BEST_LOSS,
            "device": a(str),
            "randomness": lambda value, entry: check_random_states(value, run.device, entry),
            # Without them a run that has some would go on from those it was begun with.
            **({"tensors": lambda value, entry: check_tensors(held, value, entry)} if held else {}),
        },
        optionally={
            "callbacks": SAVED_BY_CALLBACKS,
            "data": run.source.check,
            "optimizer_attributes": run.optimizer_attributes.check,
            "stepped_on": lambda value, entry: check_tensors(parameters_of(run.optimizer), value, entry),
        },
    )(state, "")
    _check_together(run, state)
    check_module(run.model, weights, state["buffers"], ("weights", "buffers"))
    check_modules(run.others, state["modules"], "modules")
    check_optimizer(run.optimizer, state["optimizer"], "optimizer")
    _check_learning_rate(run, state["learning_rate"], state["engine"]["step"], state["samples_seen"])


def _check_together(run: RunState, state: State) -> None:
    step, tuner = state["engine"]["step"], state["engine"]["tuner"]
    run.pace.check_together(state, step)
    if state["_validated"] > step:
        refuse("_validated", f"is {state['_validated']}, after {step} steps")
    # What is searched and timed is the best plan of a window of so many samples, which takes as long as there are.
    asked = [state["effective_batch"], *(report["effective_batch"] for report in state["reports"])]
    full_window = tuner["window"][0]
    if full_window > max(asked):
        refuse("engine.tuner.window", f"is of {full_window} samples, where at most {max(asked)} were asked for")


def _check_learning_rate(run: RunState, state: State, step: int, num_samples: int) -> None:
    """Check how often the scheduler was stepped, and the state of one of PyTorch's own."""
    due = run.learning_rate.due(step, num_samples)
    if state["steps_taken"] != due:
        refuse("learning_rate.steps_taken", f"is {state['steps_taken']}, not {due} after {step} steps")
    scheduler, saved, entry = run.learning_rate.scheduler, state["scheduler"], "learning_rate.scheduler"
    if scheduler is None or saved is None:
        if scheduler is not saved:
            refuse(entry, f"is {shown(saved)}, where there is {'no' if scheduler is None else 'a'} scheduler")
        return
    a(dict)(saved, entry)
    if type(scheduler).__module__ == LRScheduler.__module__:
        # Some refuse to be stepped more often than they were told of.
        left = max(0, (run.learning_rate.num_steps or 0) - due)
        _check_scheduler(scheduler, saved, min(left, 2), entry)


def _check_scheduler(scheduler: LRScheduler, saved: State, num_steps: int, entry: str) -> None:
    present = scheduler.state_dict()
    for name in saved.keys() - present.keys():
        # It would take the place of a method, or of the optimizer.
        if hasattr(scheduler, name if isinstance(name, str) else ""):
            refuse(f"{entry}.{name}", "is no state of it")
    # Functions of the user's own keep whatever they keep.
    check_like({**saved, "lr_lambdas": None}, {**present, "lr_lambdas": None}, entry)
    # What no kind tells, such as a divisor of 0, its own arithmetic does: on a copy with parameters of nobody.
    tried = _on_a_copy(scheduler)
    if tried is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tried.load_state_dict(copy.deepcopy(saved))
            for _ in range(num_steps):
                tried.step()
        rates = [group["lr"] for group in tried.optimizer.param_groups]
    except Exception as error:
        refuse(entry, f"is none that {type(scheduler).__name__} can go on from ({error!r})")
    if not all(math.isfinite(rate) for rate in rates):
        refuse(entry, "has rates that are not finite")


def _on_a_copy(scheduler: LRScheduler) -> LRScheduler | None:
    """Return a copy of a scheduler, over a copy of its optimizer without state; None where it cannot be copied."""
    optimizer = scheduler.optimizer
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer.state)] = defaultdict(dict)
    try:
        return copy.deepcopy(scheduler, memo)
    except Exception:  # a function of the user's, which holds a file, say
        return None
