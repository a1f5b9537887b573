"""Which validation of a run is the best, whose checkpoint is kept; and what becomes of one that is broken off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from autoaccum.errors import NothingFitsError
from autoaccum.step.error_context import is_told
from autoaccum.training.validation import BROKEN_OFF


class Judge(Protocol):
    """What hears of each validation, and tells by something else than the loss which is the best."""

    @property
    def is_best(self) -> bool:
        """Return whether the last one is better than all before it."""


@dataclass(kw_only=True, slots=True)
class Validations:
    """What the validations of a run have come to so far."""

    judge: Judge | None = None
    """What the best goes by; None: by the loss."""
    step: int = 0
    """Optimizer steps that were taken before the last one; 0 before the first."""
    loss: float | None = None
    """Loss of the last one."""
    best_loss: float = math.inf
    """Lowest loss of all."""
    is_unsaved_best: bool = False
    """Whether the best is of parameters that no checkpoint holds yet."""

    @contextmanager
    def at(self, step: int, save: Callable[[], None] | None) -> Iterator[None]:
        """Note that there is one after this step, so that an epoch's end at the same step finds it done.

        Where its data cannot be computed, or a second Ctrl-C breaks it off, it was none, and ``save`` keeps what was
        trained: that is not to be lost.
        """
        before, self.step = self.step, step
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            # What a callback raises that was told of a validation comes after it, in the midst of what is told; and
            # where Ctrl-C came while the model was put back, nobody knows what it has left of the weights.
            is_broken_off = BROKEN_OFF in getattr(error, "__notes__", ())
            if save is not None and (is_told(error) or is_broken_off or isinstance(error, NothingFitsError)):
                self.step = before
                save()
            raise

    def add(self, loss: float) -> None:
        """Note the loss of a validation, of which callbacks have heard."""
        self.loss = loss
        is_lowest = loss < self.best_loss  # never so for NaN
        if is_lowest:
            self.best_loss = loss
        if is_lowest if self.judge is None else self.judge.is_best:
            self.is_unsaved_best = True

    def is_best_at(self, step: int) -> bool:
        """Return whether the parameters after this step are the best."""
        # Asked of the step and not remembered from the validation: a checkpoint that takes the place of another one of
        # the same step is the best as well.
        is_best = self.loss == self.best_loss if self.judge is None else self.judge.is_best
        return self.step == step and is_best

    def state_dict(self) -> dict[str, Any]:
        """Return what they have come to, under the names of the first version of the format."""
        return {"_validated": self.step, "_validation_loss": self.loss, "_best_loss": self.best_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; other entries are left alone."""
        self.step, self.loss, self.best_loss = state["_validated"], state["_validation_loss"], state["_best_loss"]
