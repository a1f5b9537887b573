"""The state of a run: the parts that have it, how it is saved and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from autoaccum.data import randomness
from autoaccum.data.base import Source
from autoaccum.errors import CheckpointCorruptError, CheckpointError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.noise import Smoothed
from autoaccum.runs.past_of_run import describe
from autoaccum.runs.placing import placed
from autoaccum.training.best import Validations
from autoaccum.training.hooks import Hooks
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.modes import evaluated_weights, has_modes, parameters_of
from autoaccum.training.optimizer_attributes import OptimizerAttributes
from autoaccum.training.pace import Pace
from autoaccum.training.validation import Validator
from autoaccum.window.modules import State, left_out, load_modules, load_optimizer, state_of_modules
from autoaccum.window.optimizers import bare_tensors
from autoaccum.window.step import Step


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
        # The weights lie in a file of their own, which any reader of safetensors understands: apart from other modules.
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
