"""The learning rate: what the user's scheduler says, times what the effective batch asks for.

A scheduler is stepped once per window, and told how many windows there will be.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autoaccum import _checks
from autoaccum.errors import ArgumentError, ArgumentTypeError

MakeScheduler = Callable[[torch.optim.Optimizer, int], LRScheduler]
"""(optimizer, number of its steps) -> LRScheduler"""
Scaling = Literal["none", "linear", "sqrt"]
"""How rates follow the effective batch: not at all, in proportion to it, or to its root."""


_AS_THEY_ARE = nullcontext()


class LearningRate:
    """The learning rate of every parameter group, from window to window."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: MakeScheduler | None,
        *,
        num_steps: int | None,
        lr_scaling: Scaling,
        base_batch: int | None,
    ) -> None:
        """Make the scheduler.

        Args:
            optimizer: whose rates these are.
            lr_scheduler: (optimizer, number of its steps) -> LRScheduler.
            num_steps: windows to come, where that is known.
            lr_scaling: how rates follow the effective batch.
            base_batch: the effective batch that the optimizer's own rates are for.

        Raises:
            ArgumentError: an argument cannot be used, or is missing.
        """
        _checks.one_of("lr_scaling", lr_scaling, ("none", "linear", "sqrt"))
        if base_batch is not None:
            _checks.positive_int("base_batch", base_batch)
        self._optimizer = optimizer
        self._scaling = lr_scaling
        self._base_batch = base_batch or 0  # not asked for without scaling
        # A default would be a guess at what nobody but the user knows: the batch that the rates were found at.
        if lr_scaling != "none" and base_batch is None:
            cure = "Pass the effective batch that the learning rate is right for."
            raise ArgumentError("base_batch", base_batch, f"an int of at least 1 beside {lr_scaling=}", cure)
        if lr_scaling != "none" and any(group.get("lr") is None for group in optimizer.param_groups):
            cure = "Leave lr_scaling out, or take an optimizer with a learning rate."
            raise ArgumentError(
                "lr_scaling", lr_scaling, f"'none' for {type(optimizer).__name__}, which has no lr", cure
            )
        if base_batch is not None and lr_scaling == "none":
            cure = "It is what lr_scaling is relative to: pass 'linear' or 'sqrt', or leave base_batch out."
            raise ArgumentError("base_batch", base_batch, "lr_scaling beside it", cure)
        # Only training tells how many windows there are where the effective batch follows the noise, and of a stream.
        if lr_scheduler is not None and num_steps is None:
            cure = "Pass steps=, so that the scheduler can be told how many there are."
            raise ArgumentError(
                "lr_scheduler", lr_scheduler, "a budget in steps where only training tells their number", cure
            )
        self.num_steps = None if lr_scheduler is None else num_steps
        """Steps that the scheduler was told of."""
        self.scheduler = None if lr_scheduler is None else _make(lr_scheduler, optimizer, num_steps or 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, for a checkpoint."""
        return {"scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; the rates themselves are the optimizer's."""
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def now(self, effective_batch: int) -> float:
        """Return the rate of the first parameter group in a step on so many samples; NaN where it has none."""
        lr = self._optimizer.param_groups[0].get("lr")  # None, too, in optimizers that find it themselves
        if lr is None:
            return math.nan
        return float(lr) if self._scaling == "none" else float(lr) * self._factor(effective_batch)

    def scaled(self, effective_batch: int) -> AbstractContextManager[None]:
        """Scale the rates, within it, to so many samples, and put them back at its end."""
        return _AS_THEY_ARE if self._scaling == "none" else self._multiplied(self._factor(effective_batch))

    @contextmanager
    def _multiplied(self, factor: float) -> Iterator[None]:
        # Put back, for most schedulers make the next rate of the last one: a factor that stayed would be applied again.
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def _factor(self, effective_batch: int) -> float:
        """Return what the rates are multiplied by.

        Linear: Goyal et al. 2017. Square root: Krizhevsky 2014, and Malladi et al. 2022 for Adam.
        """
        factor = effective_batch / self._base_batch
        return factor if self._scaling == "linear" else math.sqrt(factor)

    def advance(self, stepped: bool) -> None:
        """Step the scheduler after a window; ``stepped`` says whether the optimizer took its step."""
        if self.scheduler is None:
            return
        with warnings.catch_warnings():
            if not stepped:  # the schedule counts windows; PyTorch would take it for a mistake
                warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()


def _make(lr_scheduler: MakeScheduler, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
    """Return the scheduler that the user's function makes.

    Raises:
        ArgumentError: it is no function, or what it returns cannot be stepped after each window.
    """
    # A class is a function too: of a scheduler, or it makes something else.
    is_other = isinstance(lr_scheduler, type) and not issubclass(lr_scheduler, LRScheduler)
    made: Any = lr_scheduler if is_other else lr_scheduler(optimizer, num_steps)
    # ReduceLROnPlateau is an LRScheduler by its class alone: its step wants a validation loss, which no window has.
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        accepted = "a function that returns an LRScheduler whose step needs no metric"
        cure = "For example lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps)."
        cure = _checks.ON_PLATEAUS if isinstance(made, ReduceLROnPlateau) else cure
        raise ArgumentTypeError("lr_scheduler", made, accepted, cure)
    return made
