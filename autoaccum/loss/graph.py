"""What an autograd graph says about the operations that made a tensor.

Nodes name their operation and what they saved for the backward; PyTorch documents both ("Saved tensors" in its notes on
autograd mechanics). Nothing here runs a node or changes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

ADDITIONS = {"Add", "Rsub", "Sub"}
RESHAPED = {
    "Alias",
    "Clone",
    "Neg",
    "Permute",
    "Squeeze",
    "T",
    "ToCopy",
    "Transpose",
    "UnsafeView",
    "Unsqueeze",
    "View",
}


@cache
def _short(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def operation_of(node: Any) -> str:
    """The name without its ending: Add for AddBackward0. A Function of the user's may bear any name."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return f"the autograd.Function {_short(type(node).__name__)}"
    return _short(node.name()) if node is not None else ""


def inputs_of(node: Any) -> list[Any]:
    """The nodes that made the inputs; a constant has none."""
    return [child for child, _ in node.next_functions if child is not None]


def is_linear_operation(node: Any) -> bool:
    """Whether a node does no more than add up, scale and reshape what comes from its inputs."""
    operation = operation_of(node)
    if operation in ("Mul", "Div"):
        first, second = (*(child for child, _ in node.next_functions), None)[:2]
        if first is not None and second is not None:  # one of them may be learnt, a constant within a window
            return only_parameters(second) or (operation == "Mul" and only_parameters(first))
        return operation == "Mul" or first is not None
    return operation in ADDITIONS | RESHAPED | {"Cat", "Expand", "Mean", "Select", "Stack", "Sum", "Unbind"}


_OF_PENALTIES = (
    RESHAPED | ADDITIONS | {"Abs", "Amax", "Cat", "Clamp", "ClampMin", "Diagonal", "Div", "Exp", "HuberLoss"}
)
_OF_PENALTIES |= {"LinalgVectorNorm", "Log", "Maximum", "Max", "Mean", "Mm", "MseLoss", "Mul", "Norm", "Pow", "Relu"}
_OF_PENALTIES |= {"Select", "Sgn", "Sigmoid", "Slice", "SmoothL1Loss", "Softplus", "Sqrt", "Stack", "Sum", "Tanh"}
_OF_PENALTIES |= {"Trace", "ViewAsReal"}


def only_parameters(root: Any) -> bool:
    """Whether what a node computes comes from parameters alone, by the operations that penalties are made of.

    No node says "data", but those that multiply with data save them. Constants of a parameter's own shape are none, as
    the values that it is drawn to.
    """
    seen: set[Any] = set()
    shapes: set[tuple[int, ...]] = set()
    constants: set[tuple[int, ...]] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):
                return False
            shapes.add(tuple(node.variable.shape))
        elif operation_of(node) not in _OF_PENALTIES or any(_is_computed_again(node, name) for name in _CONSTANTS):
            return False
        else:
            constants.update(tuple(value.shape) for value in _saved(node) if _is_constant(value))
        stack.extend(inputs_of(node))
    return constants <= shapes


_CONSTANTS = ("_saved_self", "_saved_other", "_saved_mat2", "_saved_target")


def _saved(node: Any) -> list[Any]:
    return [getattr(node, name, None) for name in _CONSTANTS]


def _is_computed_again(node: Any, name: str) -> bool:
    """Whether asking for it would run a checkpointed block again, and hold all that the block had not kept.

    Other hooks keep the tensor itself, or one on the CPU and where it came from.
    """
    raw = getattr(node, f"_raw{name}", None)
    return raw is not None and raw.unpack_hook is not None and not isinstance(raw.data, torch.Tensor | tuple)


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def signed(number: int) -> int:
    """A number that a node saved, which it does without a sign."""
    return number - 2**64 if number >= 2**63 else number


@contextmanager
def graph_alone() -> Iterator[None]:
    """Record the graph without what a backward would need: a loss can be read in the memory that no_grad takes."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.numel() == 1 else tensor.to("meta")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(shape_of, lambda tensor: tensor):
        yield
