"""How a loss went from its items to one number, read off its autograd graph.

What a mean was divided by is known exactly where the loss was computed, and autograd keeps it: cross entropy saves the
total weight of the targets that it did not ignore, a mean the shape of what it averaged, a division its divisor. So
labels that a model shifts, class weights and masks need no rule of their own, wherever the loss is computed. (PyTorch
documents what nodes save.)

The gradient is linear in the loss, so it is enough to walk down from the root through what is linear: additions,
constant factors, changes of type and shape, sums and means. Each term of the loss is then a sum over the micro-batch,
s_j / d_j, with a divisor d_j that holds everything it was divided by: a count, a constant factor, or both.

Micro-batches weighted with d_j add up to the sum over the window, whatever d_j means. That matters only for what this
sum is divided by in the end (conclusions.py): by sum_j d_j if d_j is a count, as in a mean; by d, the same in all of
them, if it is a constant, as in a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import torch

from autoaccum.loss.graph import ADDITIONS, RESHAPED, inputs_of, only_parameters, operation_of, signed

Count = float | torch.Tensor
"""A number, or a 0-dim tensor that is not read yet, because reading would wait for the device."""
Kind = Literal["mean", "sum", "unknown"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss: a sum over the micro-batch, divided."""

    kind: Kind
    """What it looks like in this micro-batch alone."""
    is_sure: bool = True
    """Whether nothing speaks against that."""
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
    is_items: bool = False
    """Whether the divisor is that of a loss which counts its targets itself."""
    is_one: bool = False
    """Whether something was divided by 1: a count that happens to be 1, or was kept from 0."""
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
    is_shared_out: bool = False
    """Whether one of those was divided by the number of samples, which no constant of a window is."""
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
    if not found:  # 0 * outputs.sum(), as is written where there is nothing to learn from
        return Reduction(0.0)
    of_parameters = [edge is not None and only_parameters(edge[0].next_functions[edge[1]][0]) for edge, _, _ in found]
    if all(of_parameters):  # a loss without a model, such as ((parameter - targets) ** 2).mean() + ...
        of_parameters = [False] * len(found)
    terms = tuple(term for (_, _, term), constant in zip(found, of_parameters, strict=True) if not constant)
    constants = [(edge, factor) for (edge, factor, _), constant in zip(found, of_parameters, strict=True) if constant]
    known = [term.divisor for term in terms if term.kind != "unknown"]
    return Reduction(
        items=known[0] if known else num_samples,
        terms=terms,
        constants=tuple(factor.value for _, factor in constants),
        is_shared_out=any(abs(number) == num_samples > 2 for _, factor in constants for number in factor.divisors),
        edges=tuple(edge for edge, _ in constants if edge is not None),
    )


@lru_cache(maxsize=1024)
def _plain_mean(items: float) -> Reduction:
    """One for each count: they recur, and making one costs as much as reading the loss."""
    return Reduction(items)


_MEAN, _SUM = 1, 2  # at::Reduction
_LONGEST = 20_000
"""Steps of a walk: a graph of more is not a loss that a person wrote."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """The constants between the root and a term."""

    value: Count = 1.0
    divisors: tuple[float, ...] = ()
    """Numbers that the program wrote down to divide by."""
    multipliers: tuple[float, ...] = ()
    """Numbers that it wrote down to multiply with."""
    tensors: Literal["", "Div", "Mul"] = ""
    """How those came in that tensors computed: by division, or also by multiplication."""

    def times(self, operation: str, value: Count, is_number: bool) -> _Factor:
        """With another constant, by that operation."""
        product = _divide(self.value, value) if operation == "Div" else self.value * value
        if not is_number:
            return replace(self, value=product, tensors="Mul" if "Mul" in (operation, self.tensors) else "Div")
        if value == 0:  # the loss is not finite, and shall be seen to be so
            return self
        if operation == "Div":
            return replace(self, value=product, divisors=(*self.divisors, float(value)))
        return replace(self, value=product, multipliers=(*self.multipliers, float(value)))


Edge = tuple[Any, int] | None
"""(node, which of its inputs); None for the root."""


class _Walk:
    """From the root of a loss down to where its terms are reduced."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._found: list[tuple[Edge, _Factor, Term]] = []
        self._stack: list[tuple[Any, Edge, _Factor]] = []

    def terms(self, root: Any) -> list[tuple[Edge, _Factor, Term]]:
        """Each term with where it enters the loss and the factor it has there. A loop: sums over lists are deep."""
        self._stack.append((root, None, _Factor()))
        steps = 0
        while self._stack:
            node, edge, factor = self._stack.pop()
            steps += 1
            if steps > _LONGEST:
                return [(None, _Factor(), Term("unknown", operation="a very long graph"))]
            operation = operation_of(node)
            if operation in ADDITIONS:
                self._add(node, factor)
            elif operation in RESHAPED or (operation == "Select" and node._saved_self_sym_sizes == (1,)):
                self._stack.append((inputs_of(node)[0], edge, factor))
            elif operation in ("Mul", "Div"):
                self._scale(node, operation, edge, factor)
            elif operation in ("Mean", "Sum") and not node._saved_self_sym_sizes:  # of what is a scalar already
                self._stack.append((inputs_of(node)[0], edge, factor))
            else:
                self._reduce(node, edge, factor)
        return self._found

    def _add(self, node: Any, factor: _Factor) -> None:
        alpha = getattr(node, "_saved_alpha", 1)
        for index, (child, _) in reversed(list(enumerate(node.next_functions))):
            if child is not None:
                scaled = factor if index == 0 or alpha == 1 else factor.times("Mul", float(alpha), True)
                self._stack.append((child, (node, index), scaled))

    def _scale(self, node: Any, operation: str, edge: Edge, factor: _Factor) -> None:
        indices = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(indices) == 2:  # one of the two may be learnt, as in exp(-s) * loss + s: a constant within a window
            learnt = [only_parameters(child) for child, _ in node.next_functions]
            if learnt == [False, True] or (learnt == [True, False] and operation == "Mul"):
                self._stack.append((node.next_functions[learnt.index(False)][0], edge, factor))
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
        self._stack.append((child, edge, factor.times(operation, value, is_number)))

    def _reduce(self, node: Any, edge: Edge, factor: _Factor) -> None:
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
            elif operation in ("Mul", "Div") and len(inputs_of(inner)) == 1 and inner is not node:
                index = 0 if inner.next_functions[0][0] is not None else 1
                constant = _constant(inner, index)
                if operation == "Div" and index == 1:
                    break
                weights = inner._saved_other if index == 0 else inner._saved_self
                of_each = isinstance(weights, torch.Tensor) and weights.ndim > 0 and math.prod(shapes[-1]) == 1
                if constant is None or of_each:  # a constant for each number, be it a single one
                    weighted = weights if operation == "Mul" else None
                    is_of_samples = len(weights) == self._num_samples > 1 and weights.ndim == len(shapes[-1])
                    if operation == "Mul" and is_of_samples:
                        is_suspect = is_suspect or _is_normalised(weights)
                    elif of_each and weights.item() == 1:  # a weight of one, or one that was divided by itself
                        factor = factor.times("Div", 1.0, True)
                else:
                    value, is_number = constant
                    if isinstance(value, float) and value == 0:
                        break
                    factor = factor.times(operation, value, is_number)
            elif operation not in RESHAPED:
                break
            children = inputs_of(inner)
            if operation_of(children[0]) in ("Stack", "Cat") and len(shapes) == 1 and len(shapes[0]) == 1:
                parts = children[0].next_functions
                if len(parts) == shapes[0][0]:
                    if len(parts) == self._num_samples > 1:  # of losses, or of samples
                        unknown = Term("unknown", operation="a list as long as the batch")
                        self._found.append((edge, factor, unknown))
                        return
                    self._split(children[0], replace(factor, value=_divide(factor.value, divisor)), weighted)
                    return
            inner = children[0]
            operation = operation_of(inner)
        if not shapes:
            self._found.append((edge, factor, _unknown(node)))
            return
        if is_suspect:
            self._found.append((edge, factor, Term("unknown", operation="weights that sum to one")))
            return
        kind, is_sure = self._kind(averaged, summed, shapes, factor, is_items)
        value = factor.value
        is_one = 1.0 in (*factor.divisors, *factor.multipliers)
        is_one = is_one or (bool(factor.tensors) and isinstance(value, float) and value == 1)
        term = Term(
            kind=kind,
            is_sure=is_sure,
            divisor=_divide(divisor, value),
            numbers=math.prod(shapes[-1]),
            factor=value,
            is_counted=is_items or bool(factor.tensors),
            is_multiplied=factor.tensors == "Mul",
            is_items=is_items,
            is_one=1.0 in (*factor.divisors, *factor.multipliers)
            or (bool(factor.tensors) and isinstance(value, float) and value == 1),
        )
        self._found.append((edge, factor, term))

    def _split(self, node: Any, factor: _Factor, weights: torch.Tensor | None) -> None:
        """The scalars of a list, perhaps each with a weight of its own."""
        for index, (part, _) in enumerate(node.next_functions):
            if part is None:
                continue
            share = factor
            if weights is not None and weights.numel() == len(node.next_functions):
                share = replace(factor, value=factor.value * _value(weights.flatten()[index]))
            self._stack.append((part, (node, index), share))

    def _kind(
        self,
        averaged: list[int],
        summed: list[int],
        shapes: list[tuple[int, ...]],
        factor: _Factor,
        is_items: bool,
    ) -> tuple[Kind, bool]:
        """(whether samples were averaged or summed, whether that is sure), of this micro-batch alone.

        By the extents of what was reduced: one that equals the samples is theirs, rather than one that is a multiple,
        as of samples and times flat.
        """
        n = self._num_samples
        kind: Kind
        if is_items or (n in averaged and n not in summed):
            kind, is_sure = "mean", True
        elif averaged and n not in summed and n > 1:
            kind, is_sure = "mean", any(e % n == 0 for e in averaged) and not any(e % n == 0 for e in summed)
        elif averaged and n in averaged:
            kind, is_sure = "mean", False
        elif factor.tensors:
            kind, is_sure = "mean", n > 1 and self._may_count(factor, shapes)
        else:
            kind, is_sure = "sum", n in summed or (n > 1 and any(extent % n == 0 for extent in summed))
        counts = {count for shape in shapes for count in accumulate(shape, mul)} | {n}
        return self._with_numbers(kind, is_sure, factor, counts)

    def _with_numbers(self, kind: Kind, is_sure: bool, factor: _Factor, counts: set[int]) -> tuple[Kind, bool]:
        """The same, by what the program divided by: a count makes a mean of a sum, a multiple of the samples may."""
        n = self._num_samples
        for number in (*factor.divisors, *(1 / number for number in factor.multipliers)):
            is_count = any(math.isclose(abs(number), count) for count in counts)
            if n == 1 or abs(number) in (2, 0.5):  # as often a constant as a count
                is_sure = (
                    is_sure and number != 1 and (kind == "mean" or bool(factor.tensors) or not (n == 1 or is_count))
                )
                if kind == "sum" and is_count and number in factor.divisors:
                    kind = "mean"
            elif kind == "sum" and is_count:
                kind = "mean"
            elif is_count or any(math.isclose(abs(1 / number), count) for count in counts - {1}):
                is_sure = False  # a mean that is multiplied, or once more divided, by a count
            elif kind == "sum" and number in factor.divisors and _is_multiple(number, n):
                kind, is_sure = ("mean" if abs(number) <= 4 * n else "sum"), False
        if (
            n > 1
            and kind == "sum"
            and any(_is_multiple(1 / number, n) and 1 / number <= 4 * n for number in factor.multipliers)
        ):
            is_sure = False  # one over twice the samples, perhaps
        return kind, is_sure

    def _may_count(self, factor: _Factor, shapes: list[tuple[int, ...]]) -> bool:
        """Whether a divisor that tensors computed is as many for each sample: else it is a count only if it varies."""
        of_tensors = _divide(math.prod(factor.multipliers) / math.prod(factor.divisors), factor.value)
        if isinstance(of_tensors, torch.Tensor):
            return True
        return _is_multiple(of_tensors, self._num_samples) and of_tensors <= math.prod(shapes[-1])


def _is_multiple(number: float, count: int) -> bool:
    """Of either sign."""
    ratio = abs(number) / count
    return math.isfinite(ratio) and ratio >= 1 - 1e-9 and math.isclose(ratio, round(ratio), rel_tol=1e-9)


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


def _unknown(node: Any) -> Term:
    return Term("unknown", operation=operation_of(node))


def without_graph(reduction: Reduction) -> Reduction:
    """The same, holding no node."""
    return replace(reduction, edges=()) if reduction.edges else reduction
