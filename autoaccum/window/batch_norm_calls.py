"""Sees the calls of BatchNorm in forwards and backwards, whoever makes them, so that they can be computed otherwise.

A model is not changed for it. While a forward or a backward runs, calls of ``torch.nn.functional.batch_norm`` are seen
by a ``TorchFunctionMode``: those of layers of any class and number of dims, and those that no layer makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Call(NamedTuple):
    """What ``torch.nn.functional.batch_norm`` was called with, which says what each is."""

    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def by(self, mean: torch.Tensor | None, var: torch.Tensor | None) -> torch.Tensor:
        """Normalise by statistics that are given."""
        return functional.batch_norm(self.input, mean, var, self.weight, self.bias, training=False, eps=self.eps)


class Calls(TorchFunctionMode):
    """Sees the calls of BatchNorm within it, and computes in its own way those that take statistics of what they get.

    Those in eval mode are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Callable[..., Any]] = {
            functional.batch_norm: lambda *args, **kwargs: self._computed(Call(*args, **kwargs)),
            torch.batch_norm: self._plain_batch_norm,
        }

    def compute(self, call: Call) -> torch.Tensor:
        """Normalise as the call would, by other statistics."""
        raise NotImplementedError

    def enter_before(self, *_: Any) -> None:
        """Enter the mode, as a hook before a layer's forward."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def exit_after(self, *_: Any) -> None:
        """Leave it, as a hook after the forward, whether that has failed or not."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._known.get(func, func)(*args, **(kwargs or {}))

    def _computed(self, call: Call) -> torch.Tensor:
        return self.compute(call) if call.training else call.by(call.running_mean, call.running_var)

    def _plain_batch_norm(
        self,
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,  # what computes it is not ours to say
    ) -> Any:
        """Take the arguments of ``torch.batch_norm``, in its order or by its names."""
        return self._computed(Call(input, running_mean, running_var, weight, bias, training, momentum, eps))
