"""Reads an autograd graph: which operations made a tensor, and which constants, shapes and counts they kept.

Nodes name their operation and what they saved for the backward; PyTorch documents both ("Saved tensors" in its notes on
autograd mechanics). Nothing here runs a node or changes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

ADDITIONS = {"Add", "Rsub", "Sub"}
"""Operations that add two inputs, or subtract them."""
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
"""Operations on one input that keep its numbers: their order, their type or their sign may change."""

MEAN, SUM = 1, 2
"""What a loss's node saves for ``reduction="mean"`` and ``reduction="sum"``: the values of at::Reduction."""

# What penalties and the learnt weights of losses are made of. Whatever is not among these, such as Addmm or Embedding,
# counts as depending on the batch.
_OF_PENALTIES = (
    RESHAPED | ADDITIONS | {"Abs", "Amax", "Cat", "Clamp", "ClampMin", "Diagonal", "Div", "Exp", "HuberLoss"}
)
_OF_PENALTIES |= {"LinalgVectorNorm", "Log", "Maximum", "Max", "Mean", "Mm", "MseLoss", "Mul", "Norm", "Pow", "Relu"}
_OF_PENALTIES |= {
    "Select",
    "Sgn",
    "Sigmoid",
    "Slice",
    "SmoothL1Loss",
    "Softplus",
    "Sqrt",
    "Stack",
    "Sum",
    "Tanh",
    "Unbind",
}
_OF_PENALTIES |= {"Trace", "ViewAsReal"}

HALVES = (torch.bfloat16, torch.float16)
"""The floating-point types of 16 bits."""

# The attributes in which those operations keep an input that has no graph of its own.
_CONSTANTS = ("_saved_self", "_saved_other", "_saved_mat2", "_saved_target")


@cache
def _without_ending(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def operation_of(node: Any) -> str:
    """Return a node's name without its ending: Add for AddBackward0, and nothing for None."""
    # A Function of the user's may bear any name, that of an operation of PyTorch's too: it must not be taken for one.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return f"the autograd.Function {_without_ending(type(node).__name__)}"
    return _without_ending(node.name()) if node is not None else ""


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes that made a node's inputs; an input that is a constant has none."""
    return [child for child, _ in node.next_functions if child is not None]


# Of the process and not of a run: what one optimizer trains is data to no loss. Weakly, and by identity.
_HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()


def take_for_parameters(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors that an optimizer holds count as parameters, of whatever class they are."""
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            _HELD[tensor] = None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or is trained as one."""
    return isinstance(tensor, nn.Parameter) or tensor in _HELD


def only_parameters(root: Any) -> bool:
    """Return whether what a node computes comes from parameters alone, by the operations that penalties are made of.

    No node says "data", but those that multiply with data save them. A constant of a parameter's own shape does not
    count as data: it may be the values that the parameter is drawn to, or how much each of its entries matters.
    """
    seen: set[Any] = set()
    shapes: set[tuple[int, ...]] = set()  # of the parameters
    constants: set[tuple[int, ...]] = set()  # the shapes of the tensors without a graph
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            # A leaf that is no parameter is an input that wants a gradient: data, unless an optimizer holds it.
            if not is_parameter(node.variable):
                return False
            shapes.add(tuple(node.variable.shape))
        elif operation_of(node) not in _OF_PENALTIES or any(_is_computed_again(node, name) for name in _CONSTANTS):
            return False
        else:
            saved: list[Any] = [getattr(node, name, None) for name in _CONSTANTS]
            constants.update(tuple(value.shape) for value in saved if _is_constant(value))
        stack.extend(inputs_of(node))
    return constants <= shapes


def _is_computed_again(node: Any, name: str) -> bool:
    """Return whether asking for a saved tensor would run a checkpointed block again, and hold what it had not kept."""
    raw = getattr(node, f"_raw{name}", None)
    # Other hooks, as our own and those of save_on_cpu, keep the tensor itself, or one on the CPU and what it was.
    return raw is not None and raw.unpack_hook is not None and not isinstance(raw.data, torch.Tensor | tuple)


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def signed(number: int) -> int:
    """Return a number that a node saved with its sign: autograd shows -1 as 2**64 - 1."""
    return number - 2**64 if number >= 2**63 else number


def sizes_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that a sum or a mean reduces."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(node._saved_self.shape if sizes is None else sizes)


def dimensions_of(node: Any, count: int) -> list[int]:
    """Return the dimensions, out of ``count``, that a sum or a mean reduces."""
    dimensions = getattr(node, "_saved_dim", None) or range(count)  # all of them where none are named
    return [signed(d) % count for d in dimensions]


def constant_beside(node: Any, index: int) -> tuple[float | torch.Tensor, bool] | None:
    """Read the constant that a product or a quotient takes beside its input ``index``.

    Returns:
        Its value, and whether it was a Python number; None when it has several elements, which are weights.
    """
    other = node._saved_other if index == 0 else node._saved_self
    value: float | torch.Tensor
    if not isinstance(other, torch.Tensor):
        value, was_number = float(other), True
    elif other.numel() != 1:
        return None
    else:
        value, was_number = value_of(other), is_number(other)
    if was_number and not math.isfinite(float(value)):  # the loss is not finite then, and shall be seen to be so
        return 1.0, True
    return value, was_number


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that a node saved was a Python number in the program."""
    if tensor.ndim or not tensor.is_cpu:
        return False
    # PyTorch marks such tensors, and shows the mark in nothing but type promotion: there they give way to the smallest
    # type of their kind, where a tensor of the program would not.
    small = torch.tensor(0, dtype=torch.float16 if tensor.is_floating_point() else torch.int8)
    return torch.result_type(small, tensor) == small.dtype


def value_of(count: torch.Tensor) -> float | torch.Tensor:
    """Read a tensor of one element where that waits for nothing, on the CPU; else return it as a 0-dim tensor."""
    if not count.is_cpu:
        exact = torch.float32 if count.device.type == "mps" else torch.float64  # MPS has no float64
        return count.reshape(()).to(exact)  # as a count has on the host, for 1 / 49 in 32 bits is not one over it
    # tolist() is no operation, as item() is: a dispatch mode, such as one that makes memory run out, would see and
    # fail on that.
    value = count.tolist()
    while isinstance(value, list):
        value = value[0]
    return float(value)


def has_halves(loss: torch.Tensor) -> bool:
    """Return whether anything in the graph of a loss was converted to 16 bits, as by an autocast."""
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*waiting}
    while waiting:
        node: Any = waiting.pop()
        if node.name() == "ToCopyBackward0" and any(one.dtype in HALVES for one in node._input_metadata):
            return True
        new = {*inputs_of(node)} - seen
        seen |= new
        waiting.extend(new)
    return False


@contextmanager
def graph_alone() -> Iterator[None]:
    """Record, within it, graphs without what a backward would need.

    A loss can then be read in the memory that its forward takes under no_grad.
    """

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        # Counts and constants have one element, and their values are read; of activations the shape is enough, which
        # tensors on the meta device have without any memory.
        return tensor if tensor.numel() == 1 else tensor.to("meta")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(shape_of, lambda tensor: tensor):
        yield
