"""What one run computes, as one value that is handed on whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoaccum.loss.stated import CountItems, LossOf, Reducing, by_name
from autoaccum.window.precision import Autocast, Precision, autocast

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
