"""Keeps the numbers that were added to a loss, of which its graph keeps no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Values(TorchFunctionMode):
    """The scalars that are computed with a graph within this context, by the nodes that made them.

    It sees each call of a function of PyTorch, which takes about 2 µs: it is for losses of several terms alone.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._by_node: dict[Any, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call what was to be called, and keep what it returns if that is a scalar with a graph."""
        # Whatever it was called with, for a loss may be added up in any way; modes nest, so that others see it too.
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.ndim and result.grad_fn is not None:
            # A copy, for ``loss += penalty`` writes to what it is added to.
            self._by_node[result.grad_fn] = result.detach().clone()
        return result

    def of(self, node: Any) -> torch.Tensor | None:
        """Return the value of the scalar that a node made; None where it was not seen."""
        # A constant has no node, and is no term either.
        if node is None:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":  # a parameter is made by nobody
            return node.variable.detach() if not node.variable.ndim else None
        return self._by_node.get(node)
