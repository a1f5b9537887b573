"""How a loss went from its items to one number, read off its autograd graph.

What a mean was divided by is known exactly where the loss was computed, and autograd keeps it: cross entropy saves the
total weight of the targets that it did not ignore, a mean the shape of what it averaged, a division its divisor. So
labels that a model shifts, class weights and masks need no rule of their own, wherever the loss is computed. (PyTorch
documents what nodes save: "Saved tensors" in its notes on autograd mechanics.)

The gradient is linear in the loss, so it is enough to walk down from the root through what is linear: additions,
constant factors, changes of type and shape. Each term then ends in a mean, in a sum, or in something unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import torch
from torch import nn

Count = float | torch.Tensor
"""A number, or a 0-dim tensor that is not read yet, because reading would wait for the device."""
Kind = Literal["mean", "sum", "unknown"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss."""

    kind: Kind
    items: Count = 0.0
    """What a mean was divided by."""
    shape: tuple[int, ...] = ()
    """Of the tensor that was reduced; empty where the items are known without it."""
    sure: bool = True
    """False for a mean whose divisor may be a constant, as far as one micro-batch shows."""
    is_counted: bool = False
    """Whether its divisor is the count of something, such as a mask."""
    operation: str = ""
    """The one that is unknown."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the loss of one micro-batch was reduced."""

    kind: Kind
    items: Count
    """What a mean was divided by; samples if it is none."""
    terms: tuple[Term, ...] = ()
    """Those that depend on the batch; empty for one mean that leaves nothing to doubt."""
    once: tuple[Any, ...] = ()
    """The nodes of terms beside a sum that depend on parameters alone, such as a weight penalty."""


def read(loss: torch.Tensor, num_samples: int) -> Reduction:
    """How the loss of a micro-batch of ``num_samples`` was reduced; to be asked before its backward."""
    root: Any = loss.grad_fn
    if root is None:
        return Reduction("unknown", num_samples, (Term("unknown", operation="no operation at all"),))
    if root.name() == "NllLossBackward0" and root._saved_reduction == _MEAN:  # the most frequent by far
        weight = root._saved_total_weight
        return _plain_mean(weight.tolist()) if weight.is_cpu else Reduction("mean", weight.reshape(()))
    found = _terms(root, num_samples)
    constant = [len(found) > 1 and only_parameters(node) for node, _ in found]
    if all(constant):  # a loss without a model, such as ((parameter - targets) ** 2).mean() + ...
        constant = [False] * len(found)
    terms = tuple(term for (_, term), penalty in zip(found, constant, strict=True) if not penalty)
    once = tuple(node for (node, _), penalty in zip(found, constant, strict=True) if penalty)
    kinds = {term.kind for term in terms}
    if kinds == {"mean"}:
        return Reduction("mean", terms[0].items, terms)
    if kinds == {"sum"}:
        return Reduction("sum", num_samples, terms, once)
    means = [term.items for term in terms if term.kind == "mean"]  # most likely what is to be learnt from
    return Reduction("unknown", means[0] if means else num_samples, terms)


@contextmanager
def graph_alone() -> Iterator[None]:
    """Record the graph without what a backward would need: a loss can be read in the memory that no_grad takes."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.ndim == 0 else tensor.to("meta")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(shape_of, lambda tensor: tensor):
        yield


@lru_cache(maxsize=1024)
def _plain_mean(items: float) -> Reduction:
    """One for each count: they recur, and making one costs as much as reading the loss."""
    return Reduction("mean", items)


_MEAN, _SUM = 1, 2  # at::Reduction
_ADDITIONS = {"Add", "Rsub", "Sub"}
_RESHAPED = {"Alias", "Clone", "Neg", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View"}


def _terms(root: Any, num_samples: int) -> list[tuple[Any, Term]]:
    """The summands under a node, each with its node. A loop, because a sum over a list makes a deep graph."""
    found: list[tuple[Any, Term]] = []
    stack = [root]
    while stack:
        node = stack.pop()
        operation, inputs = operation_of(node), _inputs(node)
        if operation in _ADDITIONS:
            stack.extend(reversed(inputs))
        elif operation in _RESHAPED and inputs:
            stack.append(inputs[0])
        elif operation in ("Mul", "Div"):
            found.extend(_scaled(node, operation, num_samples))
        else:
            found.extend(_reduced(node, operation, num_samples))
    return found


def _scaled(node: Any, operation: str, num_samples: int) -> list[tuple[Any, Term]]:
    """The terms of a product or quotient of scalars."""
    inputs = _inputs(node)
    if len(inputs) == 2:  # one of the two may be learnt, as in exp(-s) * loss + s: a constant within a window
        learnt = [only_parameters(child) for child in inputs]
        if learnt == [True, True]:
            return [(node, _unknown(node))]
        if learnt == [False, True] or (learnt == [True, False] and operation == "Mul"):
            return _at(node, _terms(inputs[learnt.index(False)], num_samples))
        return [(node, _unknown(node))]
    factor = node._saved_self if node.next_functions[0][0] is None else node._saved_other
    other = _value(factor) if isinstance(factor, torch.Tensor) else float(factor)
    terms = _at(node, _terms(inputs[0], num_samples))
    if operation == "Div" and node.next_functions[0][0] is None:
        return [(node, _unknown(node))]
    if operation == "Div":
        is_counted = isinstance(factor, torch.Tensor) and not _is_number(factor)
        return [(at, _divided(term, other, num_samples, is_counted)) for at, term in terms]
    return [(at, _multiplied(term, other, num_samples)) for at, term in terms]


def _at(node: Any, terms: list[tuple[Any, Term]]) -> list[tuple[Any, Term]]:
    """A single term is known by the outermost node that is only about it."""
    return [(node, terms[0][1])] if len(terms) == 1 else terms


def _divided(term: Term, divisor: Count, num_samples: int, is_counted: bool) -> Term:
    """A sum divided by a count is a mean, and a mean by whatever it may be still a mean of as many items.

    A number is a count if the summed tensor's shape says so. Else it may be the count of a mask, or a constant: only
    other micro-batches can tell (``sure``).
    """
    if term.kind != "sum":
        return term
    sure = isinstance(divisor, float) and divisor in {num_samples, *accumulate(term.shape, mul)}
    return Term("mean", divisor, term.shape, sure, is_counted or not sure)


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether it was a Python number: these give way in type promotion, where a tensor would not."""
    small = torch.tensor(0, dtype=torch.float16 if tensor.is_floating_point() else torch.int8)
    return torch.result_type(small, tensor) == small.dtype


def _multiplied(term: Term, factor: Count, num_samples: int) -> Term:
    """A sum stays one, unless the factor is one over a count of its numbers; a half is more likely a constant."""
    if term.kind == "sum" and isinstance(factor, float) and 0 < factor < 0.5:
        count = round(1 / factor)
        if math.isclose(count * factor, 1) and count in {num_samples, *accumulate(term.shape, mul)}:
            return Term("mean", float(count), term.shape, sure=False)
    return term


def _reduced(node: Any, operation: str, num_samples: int) -> list[tuple[Any, Term]]:
    """The terms of a node that makes a scalar of a tensor."""
    if operation in ("Mean", "Sum"):
        sizes = node._saved_self_sym_sizes
        inner = _inputs(node)[0]
        if not sizes:
            return _at(node, _terms(inner, num_samples))
        while operation_of(inner) in _RESHAPED:
            inner = _inputs(inner)[0]
        if operation_of(inner) in ("Stack", "Cat") and len(_inputs(inner)) == math.prod(sizes) != num_samples:
            return [found for child in _inputs(inner) for found in _terms(child, num_samples)]
        if operation_of(inner) in ("Mean", "Sum") and 0 in _dimensions(
            inner
        ):  # here the samples had been reduced before
            operation, sizes = operation_of(inner), inner._saved_self_sym_sizes
            dimensions = _dimensions(inner)
        else:
            dimensions = _dimensions(node)
        is_batch = any(extent % num_samples == 0 for extent in sizes)
        if operation == "Mean":
            return [(node, Term("mean", float(math.prod(sizes[d] for d in dimensions)), sizes, is_batch))]
        return [(node, Term("sum", shape=sizes) if is_batch and not _is_weighted_mean(inner) else _unknown(node))]
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return [(node, _unknown(node))]
    shape = tuple(node._saved_self.shape)
    weight = getattr(node, "_saved_total_weight", None)
    if weight is not None:  # (items, classes) or (samples, classes, height, width)
        shape = (shape[0], *shape[2:])
    if reduction == _SUM:
        return [(node, Term("sum", shape=shape))]
    return [(node, Term("mean", float(math.prod(shape)), shape) if weight is None else Term("mean", _value(weight)))]


def _is_weighted_mean(node: Any) -> bool:
    """Whether what is summed was multiplied with weights that sum to one: a mean over this micro-batch alone."""
    if operation_of(node) != "Mul":
        return False
    factors = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
    weights = [w for w in factors if isinstance(w, torch.Tensor) and w.ndim]
    return any(
        not w.requires_grad and w.is_floating_point() and math.isclose(w.sum(), 1, rel_tol=1e-3) for w in weights
    )


def _value(count: torch.Tensor) -> Count:
    """Read where that waits for nothing. ``tolist`` is no operation, which a dispatch mode would see and fail on."""
    return float(count.tolist()) if count.is_cpu else count.reshape(())


def _dimensions(node: Any) -> list[int]:
    """The dimensions that a sum or a mean reduces; nodes save them as unsigned numbers."""
    sizes = node._saved_self_sym_sizes
    dimensions = getattr(node, "_saved_dim", None) or range(len(sizes))
    return [signed(d) % len(sizes) for d in dimensions]


def signed(number: int) -> int:
    """A number that a node saved, which it does without a sign."""
    return number - 2**64 if number >= 2**63 else number


def is_linear_operation(node: Any) -> bool:
    """Whether a node does no more than add up, scale and reshape what comes from its inputs."""
    operation = operation_of(node)
    if operation in ("Mul", "Div"):
        return len(_inputs(node)) == 1 and node.next_functions[0][0] is not None
    return operation in _ADDITIONS | _RESHAPED | {"Cat", "Expand", "Mean", "Select", "Stack", "Sum", "Unbind"}


def _unknown(node: Any) -> Term:
    return Term("unknown", operation=operation_of(node))


@cache
def _short(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def operation_of(node: Any) -> str:
    """The name without its ending: Add for AddBackward0."""
    return _short(node.name()) if node is not None else ""


def _inputs(node: Any) -> list[Any]:
    """The nodes that made the inputs; a constant has none."""
    return [child for child, _ in node.next_functions if child is not None]


_OF_PENALTIES = _RESHAPED | _ADDITIONS | {"Abs", "Amax", "Cat", "Clamp", "ClampMin", "Diagonal", "Div", "Exp", "Expand"}
_OF_PENALTIES |= {"HuberLoss", "LinalgVectorNorm", "Log", "Maximum", "Max", "Mean", "Mm", "MseLoss", "Mul", "Norm"}
_OF_PENALTIES |= {
    "Permute",
    "Pow",
    "Select",
    "Sgn",
    "SmoothL1Loss",
    "Slice",
    "Softplus",
    "Sqrt",
    "Stack",
    "Sum",
    "T",
    "Trace",
}
_OF_PENALTIES |= {"Transpose", "ViewAsReal"}


def only_parameters(root: Any) -> bool:
    """Whether what a node computes comes from parameters alone, by the operations that penalties are made of.

    No node says "data", but those that multiply with data save them.
    """
    seen: set[Any] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):
                return False
        elif operation_of(node) not in _OF_PENALTIES or any(_is_data(value) for value in _saved(node)):
            return False
        stack.extend(_inputs(node))
    return True


def _saved(node: Any) -> list[Any]:
    return [getattr(node, name, None) for name in ("_saved_self", "_saved_other", "_saved_mat2")]


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def stands_for_none(reduction: Reduction, items: float, loss: torch.Tensor) -> bool:
    """Whether a count of 1 is one of 0 that was kept from it, as by ``mask.sum().clamp(min=1)``: its loss is 0 then.

    And so is its gradient: only the total has to be mended.
    """
    return items == 1 and bool(reduction.terms) and reduction.terms[0].is_counted and not loss.item()


def doubt(sizes: Sequence[int], reductions: Sequence[Reduction]) -> tuple[str, str] | None:
    """(why the micro-batches of a window may not add up to its loss, what to do); None if they do, as far as is seen.

    Args:
        sizes: samples of each micro-batch.
        reductions: how each one's loss was reduced.
    """
    for reduction in reductions:
        if reduction.kind == "unknown":
            unknown = sorted({term.operation for term in reduction.terms if term.kind == "unknown"})
            if not unknown:
                return "it adds a sum to a mean", "Make both of them means, or both sums"
            return f"its graph ends in {' and '.join(map(_in_words, unknown))}, which says nothing of it", _COUNT
    if len({reduction.kind for reduction in reductions}) > 1:
        return "it looks like a mean in some micro-batches and like a sum in others", _COUNT
    if len({len(reduction.terms) for reduction in reductions}) > 1:
        return "its terms are not the same ones in each micro-batch", _COUNT
    for terms in zip(*(reduction.terms for reduction in reductions), strict=True):
        if reductions[0].kind == "sum":
            counts = [float(math.prod(term.shape)) for term in terms]
        else:
            counts = [float(term.items) for term in terms]
        if terms[0].shape and len(counts) > 1 and len(set(counts)) == 1:
            if len(set(sizes)) > 1:
                reason = f"it reduces {counts[0]:g} numbers in every micro-batch, however many samples there are"
                return reason, "Let it end in a mean or a sum over samples"
            if not terms[0].sure and not any(term.sure for term in reductions[0].terms):
                reason = f"it divides by {counts[0]:g} in every micro-batch, which may or may not be a count of its own"
                return reason, (
                    "Divide by the number of samples of the batch that the loss is given (not the window's), or by "
                    "nothing: the plain sum"
                )
        if reductions[0].kind == "mean" and not proportional(
            counts, [float(reduction.terms[0].items) for reduction in reductions]
        ):
            return "it adds means over different numbers of items", (
                "Divide both by the same count, or pass num_items= for the one that matters more"
            )
    return None


_COUNT = (
    "Pass num_items=(micro-batch) -> how many items its loss is a mean over, or let the loss end in one mean, or one "
    "sum, over samples"
)


def _in_words(operation: str) -> str:
    return {"CompiledFunction": "code that torch.compile made", "Rsub": "a subtraction"}.get(operation, operation)


def proportional(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two lists of counts say the same but for a factor."""
    total, other = sum(first), sum(second)
    return all(math.isclose(a * other, b * total, rel_tol=1e-4) for a, b in zip(first, second, strict=True))
