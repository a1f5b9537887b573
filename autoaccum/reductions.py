"""How a loss went from its items to one number, read off its autograd graph.

What a mean was divided by is known exactly where the loss was computed, and autograd keeps it: cross entropy saves the
total weight of the targets that it did not ignore, a mean the shape of what it averaged, a division its divisor. So
labels that a model shifts, class weights and masks need no rule of their own, wherever the loss is computed. (PyTorch
documents what nodes save: "Saved tensors" in its notes on autograd mechanics.)

The gradient is linear in the loss, so it is enough to walk down from the root through what is linear: additions,
constant factors, changes of type and shape, sums and means. Each term of the loss is then a sum over the micro-batch,
s_j / d_j, with a divisor d_j that holds everything it was divided by: a count, a constant factor, or both.

Micro-batches weighted with d_j add up to the sum over the window, whatever d_j means. That matters only for what this
sum is divided by in the end (``conclude``): by sum_j d_j if d_j is a count, as in a mean; by d, the same in all of
them, if it is a constant, as in a sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import torch
from torch import nn

Count = float | torch.Tensor
"""A number, or a 0-dim tensor that is not read yet, because reading would wait for the device."""
Kind = Literal["mean", "sum", "unclear", "unknown"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss: a sum over the micro-batch, divided."""

    kind: Kind
    """What it looks like in this micro-batch alone."""
    divisor: Count = 1.0
    """All that the sum was divided by."""
    numbers: int = 0
    """How many were reduced; 0 where that bounds no count."""
    factor: Count = 1.0
    """The constant part of 1 / divisor."""
    is_counted: bool = False
    """Whether tensors computed the divisor, such as the count of a mask: it is no constant of the program then."""
    is_multiplied: bool = False
    """Whether they did so by a factor, which may be anything, rather than a divisor, which is a count or a weight."""
    is_one: bool = False
    """Whether a factor of 1 was written down: a count that happens to be 1, or was kept from 0."""
    operation: str = ""
    """The one that is unknown."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the loss of one micro-batch was reduced."""

    items: Count
    """The divisor of its first term: what it counts for in the window."""
    terms: tuple[Term, ...] = ()
    """Those that depend on the batch; empty for one mean that leaves nothing to doubt."""
    constants: tuple[Count, ...] = ()
    """The factors of terms that depend on parameters alone, such as a weight penalty."""
    edges: tuple[tuple[Any, int], ...] = ()
    """Where those enter the loss: (node, which of its inputs)."""

    @property
    def is_sum(self) -> bool:
        """Whether it looks like a sum over samples, from this micro-batch alone."""
        return bool(self.terms) and all(term.kind == "sum" for term in self.terms)


def read(loss: torch.Tensor, num_samples: int) -> Reduction:
    """How the loss of a micro-batch of ``num_samples`` was reduced; to be asked before its backward."""
    root: Any = loss.grad_fn
    if root is None:
        return Reduction(num_samples, (Term("unknown", operation="no operation at all"),))
    if root.name() == "NllLossBackward0" and root._saved_reduction == _MEAN:  # the most frequent by far
        weight = root._saved_total_weight
        return _plain_mean(weight.tolist()) if weight.is_cpu else Reduction(weight.reshape(()))
    found = _Walk(num_samples).terms(root)
    of_parameters = [edge is not None and only_parameters(edge[0].next_functions[edge[1]][0]) for edge, _, _ in found]
    if all(of_parameters):  # a loss without a model, such as ((parameter - targets) ** 2).mean() + ...
        of_parameters = [False] * len(found)
    terms = tuple(term for (_, _, term), constant in zip(found, of_parameters, strict=True) if not constant)
    constants = [(edge, factor) for (edge, factor, _), constant in zip(found, of_parameters, strict=True) if constant]
    known = [term.divisor for term in terms if term.kind != "unknown"]
    return Reduction(
        items=known[0] if known else num_samples,
        terms=terms,
        constants=tuple(factor for _, factor in constants),
        edges=tuple(edge for edge, _ in constants if edge is not None),
    )


@lru_cache(maxsize=1024)
def _plain_mean(items: float) -> Reduction:
    """One for each count: they recur, and making one costs as much as reading the loss."""
    return Reduction(items)


@contextmanager
def graph_alone() -> Iterator[None]:
    """Record the graph without what a backward would need: a loss can be read in the memory that no_grad takes."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.numel() == 1 else tensor.to("meta")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(shape_of, lambda tensor: tensor):
        yield


_MEAN, _SUM = 1, 2  # at::Reduction
_ADDITIONS = {"Add", "Rsub", "Sub"}
_RESHAPED = {
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
_LONGEST = 20_000
"""Steps of a walk: a graph of more is not a loss that a person wrote."""

_By = int
_NUMBERS, _ONE, _BY = 0, 1, {"Div": 2, "Mul": 3}
"""What a factor is made of: numbers of the program, and a 1 among them; divisors that tensors computed, or factors."""

Edge = tuple[Any, int] | None
"""(node, which of its inputs); None for the root."""


class _Walk:
    """From the root of a loss down to where its terms are reduced."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._found: list[tuple[Edge, Count, Term]] = []
        self._stack: list[tuple[Any, Edge, Count, _By]] = []

    def terms(self, root: Any) -> list[tuple[Edge, Count, Term]]:
        """Each term with where it enters the loss and the factor it has there. A loop: sums over lists are deep."""
        self._stack.append((root, None, 1.0, _NUMBERS))
        steps = 0
        while self._stack:
            node, edge, factor, by = self._stack.pop()
            steps += 1
            if steps > _LONGEST:
                return [(None, 1.0, Term("unknown", operation="a very long graph"))]
            operation = operation_of(node)
            if operation in _ADDITIONS:
                self._add(node, factor, by)
            elif operation in _RESHAPED or (operation == "Select" and node._saved_self_sym_sizes == (1,)):
                self._stack.append((_inputs(node)[0], edge, factor, by))
            elif operation in ("Mul", "Div"):
                self._scale(node, operation, edge, factor, by)
            elif operation in ("Mean", "Sum") and not node._saved_self_sym_sizes:  # of what is a scalar already
                self._stack.append((_inputs(node)[0], edge, factor, by))
            else:
                self._reduce(node, edge, factor, by)
        return self._found

    def _add(self, node: Any, factor: Count, by: _By) -> None:
        alpha = getattr(node, "_saved_alpha", 1)
        for index, (child, _) in reversed(list(enumerate(node.next_functions))):
            if child is not None:
                self._stack.append((child, (node, index), factor * alpha if index else factor, by))

    def _scale(self, node: Any, operation: str, edge: Edge, factor: Count, by: _By) -> None:
        indices = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(indices) == 2:  # one of the two may be learnt, as in exp(-s) * loss + s: a constant within a window
            learnt = [only_parameters(child) for child, _ in node.next_functions]
            if learnt == [False, True] or (learnt == [True, False] and operation == "Mul"):
                self._stack.append((node.next_functions[learnt.index(False)][0], edge, factor, by))
            else:
                self._found.append((edge, factor, _unknown(node)))
            return
        constant = _constant(node, indices[0])
        if (operation == "Div" and indices[0] == 1) or constant is None:
            self._found.append((edge, factor, _unknown(node)))
            return
        value, is_number = constant
        if isinstance(value, float) and value == 0 and operation == "Mul":
            return  # as in loss + 0.0 * outputs.sum()
        child = node.next_functions[indices[0]][0]
        factor = _divide(factor, value) if operation == "Div" else factor * value
        self._stack.append((child, edge, factor, max(by, _made_by(operation, value, is_number))))

    def _reduce(self, node: Any, edge: Edge, factor: Count, by: _By) -> None:
        """A node that makes a scalar of a tensor, with the linear operations right under it."""
        averaged: list[int] = []
        summed: list[int] = []
        shapes: list[tuple[int, ...]] = []
        divisor: Count = 1.0
        is_items = False  # whether the divisor is of a loss that counts
        weighted: torch.Tensor | None = None
        is_suspect = False
        inner, operation = node, operation_of(node)
        while True:
            if operation in ("Mean", "Nansum", "Sum"):
                sizes = _sizes(inner)
                dimensions = _dimensions(inner, len(sizes))
                extents = [sizes[d] for d in dimensions]
                is_suspect = is_suspect and 0 not in dimensions  # weights of what the samples were reduced to
                (averaged if operation == "Mean" else summed).extend(extents)
                divisor = divisor * math.prod(extents) if operation == "Mean" else divisor
                shapes.append(sizes)
            elif getattr(inner, "_saved_reduction", 0) in (_MEAN, _SUM):
                shape = tuple(inner._saved_self.shape)
                weight = getattr(inner, "_saved_total_weight", None)
                shape = shape if weight is None else (shape[0], *shape[2:])  # without the classes
                shapes.append(shape)
                if inner._saved_reduction == _SUM:
                    summed.extend(shape)
                else:
                    averaged.extend(shape)
                    divisor = divisor * (math.prod(shape) if weight is None else _value(weight))
                    is_items = weight is not None
                break
            elif operation in ("Mul", "Div") and len(_inputs(inner)) == 1 and inner is not node:
                index = 0 if inner.next_functions[0][0] is not None else 1
                constant = _constant(inner, index)
                if operation == "Div" and index == 1:
                    break
                weights = inner._saved_other if index == 0 else inner._saved_self
                of_each = isinstance(weights, torch.Tensor) and weights.ndim > 0 and math.prod(shapes[-1]) == 1
                if constant is None or of_each:  # a constant for each number, be it a single one
                    weighted = weights if operation == "Mul" else None
                    is_suspect = is_suspect or (operation == "Mul" and _is_normalised(weights))
                    if of_each and self._num_samples == 1 and weights.item() == 1:
                        by = max(by, _ONE)  # a weight of one, or one that was divided by itself
                else:
                    value, is_number = constant
                    if isinstance(value, float) and value == 0:
                        break
                    factor = _divide(factor, value) if operation == "Div" else factor * value
                    by = max(by, _made_by(operation, value, is_number))
            elif operation not in _RESHAPED:
                break
            children = _inputs(inner)
            if operation_of(children[0]) in ("Stack", "Cat") and len(shapes) == 1 and len(shapes[0]) == 1:
                parts = children[0].next_functions
                if len(parts) == shapes[0][0] != self._num_samples:  # a list of losses, not one of samples
                    self._split(children[0], _divide(factor, divisor), weighted, by)
                    return
            inner = children[0]
            operation = operation_of(inner)
        if not shapes:
            self._found.append((edge, factor, _unknown(node)))
            return
        if is_suspect:
            self._found.append((edge, factor, Term("unknown", operation="weights that sum to one")))
            return
        by_tensors = by >= _BY["Div"]
        kind = self._kind(averaged, summed, shapes, factor, by_tensors, is_items)
        if self._num_samples == 1 and (by == _ONE or (by == _BY["Mul"] and factor == 1)):
            kind = "unclear"
        numbers = math.prod(shapes[-1])
        term = Term(
            kind=kind,
            divisor=_divide(divisor, factor),
            numbers=numbers,
            factor=factor,
            is_counted=is_items or by_tensors,
            is_multiplied=by == _BY["Mul"],
            is_one=by == _ONE or (by_tensors and not is_items and isinstance(factor, float) and factor == 1),
        )
        self._found.append((edge, factor, term))

    def _split(self, node: Any, factor: Count, weights: torch.Tensor | None, by: _By) -> None:
        """The scalars of a list, perhaps each with a weight of its own."""
        for index, (part, _) in enumerate(node.next_functions):
            if part is None:
                continue
            share = factor
            if weights is not None and weights.numel() == len(node.next_functions):
                share = share * _value(weights.flatten()[index])
            self._stack.append((part, (node, index), share, by))

    def _kind(
        self,
        averaged: list[int],
        summed: list[int],
        shapes: list[tuple[int, ...]],
        factor: Count,
        is_counted: bool,
        is_items: bool,
    ) -> Kind:
        """Whether samples were averaged or summed, by the extents of what was reduced.

        An extent that equals the samples is theirs, rather than one that is a multiple, as of samples and times flat.
        """
        counts = {n for shape in shapes for n in accumulate(shape, mul)} | {self._num_samples}
        by_number = isinstance(factor, float) and not is_counted and factor > 0
        if is_items or averaged:
            if by_number and self._num_samples > 1 and (factor in counts or 1 / factor in counts) and factor != 1:
                return "unclear"  # a mean that is multiplied, or divided once more, by a count
            if is_items:
                return "mean"
            n = self._num_samples
            ours, theirs = n in averaged, n in summed
            if ours != theirs:
                return "mean" if ours else "sum"
            if n == 1:  # everything is a multiple
                return "unclear"
            ours, theirs = (any(e % n == 0 for e in extents) for extents in (averaged, summed))
            return "unclear" if theirs or not ours else "mean"
        if is_counted:
            return "mean"
        if by_number and factor < 0.5 and any(math.isclose(factor * count, 1) for count in counts):
            return "mean"
        n = self._num_samples
        return "sum" if n in summed or (n > 1 and any(extent % n == 0 for extent in summed)) else "unclear"


def _divide(first: Count, second: Count) -> Count:
    """Nothing divided by nothing, as a mean over nothing is, has no divisor at all."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first / second
    return first / second if second else math.inf


def _constant(node: Any, index: int) -> tuple[Count, bool] | None:
    """(value of the constant beside the input ``index``, whether it is a Python number); None for a weight a number."""
    other = node._saved_other if index == 0 else node._saved_self
    value: Count
    if not isinstance(other, torch.Tensor):
        value, is_number = float(other), True
    elif other.numel() != 1:
        return None
    else:
        value, is_number = _value(other), _is_number(other)
    if is_number and not math.isfinite(float(value)):  # the loss is not finite then, and shall be seen to be so
        return 1.0, True
    return value, is_number


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether it was a Python number: these give way in type promotion, where a tensor would not."""
    if tensor.ndim or not tensor.is_cpu:
        return False
    small = torch.tensor(0, dtype=torch.float16 if tensor.is_floating_point() else torch.int8)
    return torch.result_type(small, tensor) == small.dtype


def _made_by(operation: str, value: Count, is_number: bool) -> _By:
    if not is_number:
        return _BY[operation]
    return _ONE if value == 1 else _NUMBERS


def _is_normalised(weights: torch.Tensor) -> bool:
    """Whether weights that differ sum, or average, to one: as they do when divided by what this micro-batch holds."""
    if not weights.is_floating_point() or weights.device.type == "meta":
        return False
    total, least, most = weights.sum().item(), weights.min().item(), weights.max().item()
    return least != most and any(math.isclose(total, one, rel_tol=1e-3) for one in (1, weights.numel()))


def _value(count: torch.Tensor) -> Count:
    """Read where that waits for nothing. ``tolist`` is no operation, which a dispatch mode would see and fail on."""
    if not count.is_cpu:
        exact = torch.float32 if count.device.type == "mps" else torch.float64  # MPS has no other
        return count.reshape(()) if count.is_floating_point() else count.reshape(()).to(exact)
    value = count.tolist()
    while isinstance(value, list):
        value = value[0]
    return float(value)


def _sizes(node: Any) -> tuple[int, ...]:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(node._saved_self.shape if sizes is None else sizes)


def _dimensions(node: Any, count: int) -> list[int]:
    """The dimensions that a sum or a mean reduces."""
    dimensions = getattr(node, "_saved_dim", None) or range(count)
    return [signed(d) % count for d in dimensions]


def signed(number: int) -> int:
    """A number that a node saved, which it does without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _unknown(node: Any) -> Term:
    return Term("unknown", operation=operation_of(node))


@cache
def _short(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def operation_of(node: Any) -> str:
    """The name without its ending: Add for AddBackward0. A Function of the user's may bear any name."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return f"the autograd.Function {_short(type(node).__name__)}"
    return _short(node.name()) if node is not None else ""


def _inputs(node: Any) -> list[Any]:
    """The nodes that made the inputs; a constant has none."""
    return [child for child, _ in node.next_functions if child is not None]


def is_linear_operation(node: Any) -> bool:
    """Whether a node does no more than add up, scale and reshape what comes from its inputs."""
    operation = operation_of(node)
    if operation in ("Mul", "Div"):
        return len(_inputs(node)) == 1 and node.next_functions[0][0] is not None
    return operation in _ADDITIONS | _RESHAPED | {"Cat", "Expand", "Mean", "Select", "Stack", "Sum", "Unbind"}


_OF_PENALTIES = (
    _RESHAPED | _ADDITIONS | {"Abs", "Amax", "Cat", "Clamp", "ClampMin", "Diagonal", "Div", "Exp", "HuberLoss"}
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
        elif operation_of(node) not in _OF_PENALTIES:
            return False
        else:
            constants.update(tuple(value.shape) for value in _saved(node) if _is_constant(value))
        stack.extend(_inputs(node))
    return constants <= shapes


def _saved(node: Any) -> list[Any]:
    names = ("_saved_self", "_saved_other", "_saved_mat2", "_saved_target")
    return [getattr(node, name, None) for name in names]


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def stands_for_none(reduction: Reduction, items: float, loss: torch.Tensor, num_samples: int) -> bool | None:
    """Whether a count of 1 is one of 0 that was kept from it, as by ``mask.sum().clamp(min=1)``: its loss is 0 then.

    And so is its gradient: only the total has to be mended. None when it may be the one sample itself.
    """
    if items != 1 or not reduction.terms:
        return False
    term = reduction.terms[0]
    if not (term.is_counted or term.is_one) or loss.tolist():
        return False
    return None if num_samples == 1 and not term.is_counted else True


def without_graph(reduction: Reduction) -> Reduction:
    """The same, holding no node."""
    return replace(reduction, edges=()) if reduction.edges else reduction


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the micro-batches of a window, seen together, are."""

    is_sum: bool
    """Whether their sum is divided by what each was, rather than by the total of it."""
    doubt: tuple[str, str] | None = None
    """(why they may not add up to the loss of the window, what to do)"""


def conclude(sizes: Sequence[int], reductions: Sequence[Reduction], is_doubtful: bool = False) -> Conclusion:
    """What the losses of a window's micro-batches add up to.

    Args:
        sizes: samples of each.
        reductions: how each one's loss was reduced.
        is_doubtful: whether a count may be of one or of none: see ``stands_for_none``.
    """
    if not any(reduction.terms for reduction in reductions):
        return Conclusion(is_sum=False)
    for reduction in reductions:
        unknown = sorted({_in_words(term.operation) for term in reduction.terms if term.kind == "unknown"})
        if unknown:
            return Conclusion(False, (f"its graph leads to {' and '.join(unknown)}, which says nothing of it", _COUNT))
    if len({len(reduction.terms) for reduction in reductions}) > 1:
        return Conclusion(False, ("its terms are not the same ones in each micro-batch", _COUNT))
    columns = list(zip(*(reduction.terms for reduction in reductions), strict=True))
    divisors = [[_finite(term.divisor) for term in terms] for terms in columns]
    kinds = []
    for terms, counts in zip(columns, divisors, strict=True):
        kind, doubt = _kind_of(sizes, terms, counts)
        kinds.append(kind)
        if doubt is not None:
            return Conclusion(kinds[0] == "sum", doubt)
    if len(set(kinds)) > 1:
        return Conclusion(kinds[0] == "sum", ("it adds a sum to a mean", "Make both of them means, or both sums"))
    is_sum = kinds[0] == "sum"
    if not is_sum and not all(proportional(counts, divisors[0]) for counts in divisors[1:]):
        cure = "Divide both by the same count, or pass num_items= for the one that matters more"
        return Conclusion(is_sum, ("it adds means over different numbers of items", cure))
    kept = len(columns) > 1 and any(term.is_one and term.is_counted for terms in columns for term in terms)
    if (is_doubtful or kept) and not is_sum:
        return Conclusion(is_sum, ("it divides by 1, which may be the count of one or, kept from 0, of none", _COUNT))
    return Conclusion(is_sum, _doubt_of_constants(sizes, reductions, is_sum))


def _finite(divisor: Count) -> float:
    """0 for what was divided by a mean over nothing."""
    value = float(divisor)
    return value if math.isfinite(value) else 0.0


def _kind_of(
    sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]
) -> tuple[Kind, tuple[str, str] | None]:
    """What a term is, seen over a window, and what speaks against it."""
    there = [(size, count) for size, count in zip(sizes, counts, strict=True) if count]
    votes = {term.kind for term in terms}
    counted = all(term.is_counted for term in terms)
    if len({round(math.log(abs(count)), 6) for _, count in there}) <= 1:
        if len({size for size, _ in there}) > 1:
            return ("mean" if counted and votes == {"mean"} else "sum"), None
        if votes <= {"mean"} or votes <= {"sum"}:
            return terms[0].kind, None
        if votes <= {"sum", "unclear"} and len({term.numbers for term in terms}) > 1:  # what was picked by a mask
            return "sum", None
        divided = f"{there[0][1]:g}" if there else "nothing"
        return ("mean" if "mean" in votes else "sum"), (
            f"it divides by {divided} in every micro-batch, which may be a constant or a count of its own",
            "Divide by the number of samples of the batch that the loss is given (not the window's), or by nothing: "
            "the plain sum",
        )
    known = [(term, float(term.factor), count) for term, count in zip(terms, counts, strict=True) if count]
    by_division = all(
        term.is_counted and not term.is_multiplied and math.isclose(count * factor, 1, rel_tol=1e-4)
        for term, factor, count in known
    )
    by_count = all(
        math.isclose(count, round(count), rel_tol=1e-4, abs_tol=1e-4) and count <= term.numbers * 1.0001
        for term, _, count in known
    )
    same_factor = len({factor for _, factor, _ in known}) == 1
    plausible = same_factor or by_division or by_count or proportional(counts, sizes)
    if plausible:
        return "mean", None
    return "mean", (
        "it is multiplied by another factor in each micro-batch",
        "Leave the factor out, or pass num_items=",
    )


def _doubt_of_constants(sizes: Sequence[int], reductions: Sequence[Reduction], is_sum: bool) -> tuple[str, str] | None:
    """What speaks against counting terms of parameters alone once a window."""
    if len({len(reduction.constants) for reduction in reductions}) > 1:
        return "its terms are not the same ones in each micro-batch", _COUNT
    for factors in zip(*(map(float, reduction.constants) for reduction in reductions), strict=True):
        grows = is_sum and any(
            size > 1 and factor and factor % size == 0 for size, factor in zip(sizes, factors, strict=True)
        )
        if len({round(factor, 12) for factor in factors}) > 1 or grows:
            return (
                "a term that depends on the parameters alone is multiplied or divided by a count of samples",
                "Add such terms as they are: they are counted once a window",
            )
    return None


_COUNT = (
    "Pass num_items=(micro-batch) -> how many items its loss is a mean over, or let the loss end in one mean, or one "
    "sum, over samples"
)


def _in_words(operation: str) -> str:
    return "code that torch.compile made" if "CompiledFunction" in operation else operation


def proportional(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two lists of counts say the same but for a factor."""
    total, other = sum(first), sum(second)
    return all(math.isclose(a * other, b * total, rel_tol=1e-4) for a, b in zip(first, second, strict=True))
