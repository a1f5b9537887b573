"""Whether a loss does more than it says: gradients that it changes would be those of no window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from autoaccum.errors import LossError, LossSideEffectError

T = TypeVar("T")


class SideEffects:
    """The gradients as they were before a loss was computed."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        # A copy would cost as much memory as the gradients. Another tensor has another id, and writing in place moves a
        # tensor's version: both together show every change but one that is made through ``.data``.
        self._parameters = parameters
        self._before = self._versions()

    def refuse(self) -> None:
        """Compare the gradients with those of before.

        Raises:
            LossSideEffectError: there are other ones, or they were written to.
        """
        if self._versions() != self._before:
            raise LossSideEffectError("loss_fn, training_step or the model")

    def refuse_in(self, compute: Callable[[], T]) -> T:
        """Return what is computed, if that leaves gradients as they are.

        Raises:
            LossSideEffectError: it does not.
        """
        # Errors of other kinds come out as they are, among them memory that ran out: these have a replay to come.
        try:
            computed = compute()
        except LossError:
            # Whoever calls backward() returns no loss, or one that is detached: that is not what he is to be told of.
            self.refuse()
            raise
        self.refuse()
        return computed

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(p.grad), p.grad._version) for p in self._parameters if p.grad is not None]
