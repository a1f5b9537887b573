"""What one run computes: model, optimizer, loss, device and precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from autoaccum.distributed.gradients import type_of_gradient
from autoaccum.errors import ArgumentError
from autoaccum.step.terms import CountItems, LossOf, Reducing, by_name

Precision = Literal["fp32", "bf16", "fp16"]
"""The type that forwards compute in: float32, or 16 bits where autocast deems them safe."""
Autocast = Callable[[], AbstractContextManager[Any]]
"""() -> the context of one forward."""


def autocast(precision: Precision, device: torch.device) -> Autocast:
    """Return what makes the context of a forward: autocast for bf16 and fp16, and for fp32 one that does nothing.

    So with fp32 the model computes in whatever types its parameters have.

    Raises:
        ArgumentError: there is no such precision.
    """
    # Only a text can be one, and nothing else is compared: an array has an == of its own.
    if not isinstance(precision, str) or precision not in ("fp32", "bf16", "fp16"):
        # Lightning has "bf16-mixed", others torch.bfloat16, or 16.
        said = {"bf": "bf16", "16": "fp16", "32": "fp32"}
        meant = next((ours for theirs, ours in said.items() if theirs in str(precision).lower()), None)
        cure = f"Did you mean {meant!r}?" if meant else ""
        raise ArgumentError("precision", precision, "one of 'fp32', 'bf16', 'fp16'", cure)
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    # Anew for each forward: autocast keeps copies of weights in 16 bits until its context is left, and weights change.
    return lambda: torch.autocast(device.type, dtype=dtype)


def scaler_of(precision: Precision, device: torch.device, optimizer: torch.optim.Optimizer) -> Any:
    """Return what scales losses of a precision, so that their gradients do not vanish; None where nothing has to.

    Raises:
        ArgumentError: it cannot, for gradients that the optimizer steps on are of float16 themselves.
    """
    if precision != "fp16":
        return None
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if any(type_of_gradient(p) is torch.float16 for p in trained):
        cure = "Parameters and their gradients are float16. Call model.float() before you make the optimizer."
        raise ArgumentError("precision", precision, "trained parameters in float32", cure)
    return torch.amp.GradScaler(device.type)


def fresh_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """Return a scaler of the same state, which has not unscaled anything."""
    # The scale changes only after a step, but "already unscaled" must be forgotten: a new one has not heard of it.
    fresh = torch.amp.GradScaler(device.type)
    fresh.load_state_dict(scaler.state_dict())
    return fresh


Forward = Callable[[Any, int, int], torch.Tensor]
"""(micro-batch, its samples, the window's samples) -> loss"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model with its loss and its optimizer, on its device."""

    # Handed on as a whole, so that what is computed is declared once, and is the same for the transaction, for what
    # examines it, and for what advises when nothing fits.

    model: Callable[..., Any]
    """What ``loss_of`` is called with: the module, or what torch.compile made of it."""
    modules: tuple[nn.Module, ...]
    """The modules whose parameters get gradients, and whose buffers a forward may change: the first is the model."""
    optimizer: torch.optim.Optimizer
    """Over their parameters; its state is allocated."""
    loss_of: LossOf
    """(model, micro-batch) -> loss, a mean or a sum."""
    # Where a user passes one it is what counts; an examiner says so if the losses contradict it.
    num_items: CountItems | None = None
    """(micro-batch) -> how many items its loss is a mean over; None where that is read off the loss."""
    divides: bool = False
    """Whether the loss is a sum, as the user says, that ``loss_of`` divides by what these are."""
    reduction: Reducing = None
    """What the user says that the loss is, or each of several."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """What makes batches of samples, where the user has passed it."""
    min_micro_batch: int = 1
    """The fewest samples of a forward, as the user has it; BatchNorm may need more."""
    split: Any = None
    """What cuts batches, counts their samples and joins them; by rows of their tensors where it is None."""
    device: torch.device
    """Where everything is."""
    precision: Precision = "fp32"
    """What forwards compute in."""

    @property
    def functions(self) -> list[object]:
        """Return what of it is the user's code, beside modules."""
        counting = self.num_items
        of_each = [counting] if counting is None or callable(counting) else list(by_name(counting).values())
        return [self.loss_of, *of_each, self.collate_fn]

    def computed_by(self, loss_of: LossOf) -> Job:
        """Return the same with another function for its loss."""
        return replace(self, loss_of=loss_of)

    @property
    def autocast(self) -> Autocast:
        """Return what makes the context of each forward."""
        # Made anew each time, for a job is a plain value: whoever runs one forward after the other keeps it.
        return autocast(self.precision, self.device)


def is_slow_to_read(device: torch.device) -> bool:
    """Return whether reading a number waits until everything that was asked of the device is done."""
    return device.type != "cpu"
