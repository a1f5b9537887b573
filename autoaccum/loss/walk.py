"""Walks from the root of a loss down to where each of its terms is reduced from the batch to one number."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from autoaccum.loss.graph import (
    ADDITIONS,
    MEAN,
    RESHAPED,
    SUM,
    constant_beside,
    dimensions_of,
    inputs_of,
    only_parameters,
    operation_of,
    sizes_of,
    value_of,
)
from autoaccum.loss.terms import Count, Division, Factor, Term, divide

Found = tuple[Any, Factor, Term]
"""The node by which a term enters a sum (None when it is all of the loss), all factors that it has there, and it."""

_LONGEST = 20_000
"""Steps of a walk: a graph of more is not a loss that a person wrote."""


class Walk:
    """A walk from the root of a loss, through what is linear, down to where its terms are reduced."""

    def __init__(self, num_samples: int) -> None:
        """Prepare to read the loss of a micro-batch of ``num_samples``."""
        self._num_samples = num_samples
        self._found: list[Found] = []
        self.divisions: list[Division] = []
        """Where something is divided by what is not read yet."""
        # Nodes yet to be visited, each with its summand of the loss and the constants on the way to it. A stack and no
        # recursion: a sum over a list of a thousand losses is a thousand additions deep.
        self._stack: list[tuple[Any, Any, Factor]] = []

    def terms(self, root: Any) -> list[Found]:
        """Find the terms of the loss whose node is ``root``; those of a sum in the order of its summands."""
        self._stack.append((root, None, Factor()))
        steps = 0
        while self._stack:
            node, summand, factor = self._stack.pop()
            steps += 1
            if steps > _LONGEST:
                return [(None, Factor(), Term(operation="a very long graph"))]
            operation = operation_of(node)
            if operation in ADDITIONS:
                self._add(node, factor)
            elif operation in ("Neg", *RESHAPED) or (operation == "Select" and node._saved_self_sym_sizes == (1,)):
                self._stack.append((inputs_of(node)[0], summand, factor))
            elif operation in ("Mul", "Div"):
                self._scale(node, operation, summand, factor)
            elif operation in ("Mean", "Sum") and not node._saved_self_sym_sizes:  # of what is a scalar already
                self._stack.append((inputs_of(node)[0], summand, factor))
            else:
                self._reduce(node, operation, summand, factor)
        return self._found

    def _add(self, node: Any, factor: Factor) -> None:
        alpha = getattr(node, "_saved_alpha", 1)  # torch.add(a, b, alpha=2) is a + 2 * b
        for index, (child, _) in reversed(list(enumerate(node.next_functions))):  # the first one ends up on top
            if child is not None:
                scaled = factor if index == 0 or alpha == 1 else factor.times("Mul", float(alpha), True)
                self._stack.append((child, child, scaled))

    def _scale(self, node: Any, operation: str, summand: Any, factor: Factor) -> None:
        indices = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(indices) == 2:
            # One of the two may be learnt, as in exp(-s) * loss + s: a constant within a window, which is the same in
            # all of its micro-batches and so is not asked for.
            learnt = [only_parameters(child) for child, _ in node.next_functions]
            if learnt == [False, True] or (learnt == [True, False] and operation == "Mul"):
                child = node.next_functions[learnt.index(False)][0]
                self._stack.append((child, summand, factor))
            else:
                self._found.append((summand, factor, _unknown(node)))
            return
        constant = constant_beside(node, indices[0])
        if (operation == "Div" and indices[0] == 1) or constant is None:  # one over the loss, or a weight a number
            self._found.append((summand, factor, _unknown(node)))
            return
        value, is_number = constant
        if isinstance(value, float) and value == 0 and operation == "Mul":
            return  # as in loss + 0.0 * outputs.sum()
        self._note_division(node, indices[0], operation, value)
        child = node.next_functions[indices[0]][0]
        self._stack.append((child, summand, factor.times(operation, value, is_number)))

    def _note_division(self, node: Any, place: int, operation: str, number: Count) -> None:
        # A number of the program, or of the host, is known by now: a mean over nothing is told from it at once.
        if isinstance(number, torch.Tensor):
            self.divisions.append(Division(node, place, operation == "Mul", number))

    def _reduce(self, node: Any, operation: str, summand: Any, factor: Factor) -> None:
        """Note the term that a node reduces a tensor to; the scalars of a list go back to the stack instead."""
        descent = _Descent(self._num_samples, factor)
        inner = node
        while descent.takes_in(inner, operation):
            if descent.number is not None:
                place = 0 if inner.next_functions[0][0] is not None else 1
                self._note_division(inner, place, operation, descent.number)
            inner = inputs_of(inner)[0]
            operation = operation_of(inner)
            if operation in ("Stack", "Cat") and descent.is_of_list(length := len(inner.next_functions)):
                if length == self._num_samples > 1:  # the list may be of losses, or of samples
                    term = Term(operation="a list as long as the batch")
                    self._found.append((summand, descent.factor, term))
                else:
                    self._split(inner, descent, summand)
                return
        self._found.append((summand, descent.factor, descent.term(node)))

    def _split(self, node: Any, descent: _Descent, summand: Any) -> None:
        """Put the scalars of a list on the stack, each perhaps with a weight of its own."""
        factor = replace(descent.factor, value=divide(descent.factor.value, descent.divisor))
        weights = descent.weights
        for index, (part, _) in enumerate(node.next_functions):
            if part is None:
                continue
            share = factor
            if weights is not None and weights.numel() == len(node.next_functions):
                share = replace(factor, value=factor.value * value_of(weights.flatten()[index]))
            # A list of one is what is in it.
            self._stack.append((part, part if len(node.next_functions) > 1 else summand, share))


class _Descent:
    """The way down from a node that makes a scalar of a tensor, and what the linear operations on it amount to.

    A plain class, for one is made for each term in each micro-batch.
    """

    __slots__ = (
        "_averaged",
        "_counts_items",
        "_num_samples",
        "_ones",
        "_shapes",
        "_summed",
        "_weights",
        "divisor",
        "factor",
        "number",
        "weights",
    )

    def __init__(self, num_samples: int, factor: Factor) -> None:
        self._num_samples = num_samples
        self.factor = factor
        self.divisor: Count = 1.0  # of the means alone; the constants are in the factor
        self.number: Count | None = None  # the constant that was taken in last, if that is what the last node was
        self.weights: torch.Tensor | None = None  # what the numbers were multiplied with last, each by one of its own
        self._averaged: list[int] = []  # extents of the dimensions that were averaged
        self._summed: list[int] = []  # and of those that were summed
        self._shapes: list[tuple[int, ...]] = []  # of what was reduced, the first one nearest to the loss
        self._counts_items = False  # whether the divisor is that of a loss which counts its targets
        # Weights of the samples: their sum, the least and the most, which may lie on a device, and how many there are.
        self._weights: list[tuple[torch.Tensor, int]] = []
        self._ones: list[Count] = []  # weights of one number

    def takes_in(self, node: Any, operation: str) -> bool:
        """Take a node in; return whether what lies under it is to be taken in as well."""
        self.number = None
        if operation in ("Mean", "Nansum", "Sum"):
            self._take_reduction(node, operation)
            return True
        if getattr(node, "_saved_reduction", 0) in (MEAN, SUM):
            self._take_loss(node)
            return False  # it reduces what it computed of each sample: under it nothing is linear
        # The first node is none of these: a product or a quotient that is a scalar has been walked through before.
        if operation in ("Mul", "Div") and len(inputs_of(node)) == 1:
            return self._take_constant(node, operation)
        return operation in RESHAPED

    def _take_reduction(self, node: Any, operation: str) -> None:
        sizes = sizes_of(node)
        dimensions = dimensions_of(node, len(sizes))
        extents = [sizes[d] for d in dimensions]
        if 0 in dimensions:
            # The samples are reduced under the weights, which then are not theirs, but of classes, say.
            self._weights.clear()
        if operation == "Mean":
            self._averaged.extend(extents)
            self.divisor = self.divisor * math.prod(extents)
        else:
            self._summed.extend(extents)
        self._shapes.append(sizes)

    def _take_loss(self, node: Any) -> None:
        """Take in one of PyTorch's losses that reduces by itself, such as mse_loss or nll_loss."""
        shape = tuple(node._saved_self.shape)
        total_weight = getattr(node, "_saved_total_weight", None)  # of the targets that nll_loss did not ignore
        if total_weight is not None:
            shape = (shape[0], *shape[2:])  # without the classes
        self._shapes.append(shape)
        if node._saved_reduction == SUM:
            self._summed.extend(shape)
            return
        self._averaged.extend(shape)
        self.divisor = self.divisor * (math.prod(shape) if total_weight is None else value_of(total_weight))
        self._counts_items = total_weight is not None

    def _take_constant(self, node: Any, operation: str) -> bool:
        """Take in a product with a constant, or a quotient; return whether the walk goes on under it."""
        index = 0 if node.next_functions[0][0] is not None else 1
        constant = constant_beside(node, index)
        if operation == "Div" and index == 1:
            return False  # the constant is divided by what lies under it, which is not linear
        beside = node._saved_other if index == 0 else node._saved_self
        # Of a tensor of one number a tensor of one number may be the weight, as it is in larger micro-batches; and of
        # the numbers of a single sample, as those of (samples, 1) are beside (samples, times).
        of_each = isinstance(beside, torch.Tensor) and beside.ndim > 0 and beside.numel() == 1
        of_each = of_each and (math.prod(self._shapes[-1]) == 1 or self._is_of_a_sample(beside))
        if constant is None or of_each:
            self._take_weights(beside, operation, of_each)
            return True
        value, is_number = constant
        if isinstance(value, float) and value == 0:
            return False
        self.factor, self.number = self.factor.times(operation, value, is_number), value
        return True

    def _is_of_a_sample(self, constant: torch.Tensor) -> bool:
        return self._num_samples == 1 and constant.ndim == len(self._shapes[-1])

    def _take_weights(self, weights: torch.Tensor, operation: str, of_each: bool) -> None:
        """Take in a constant for each number: it changes what is summed, and not what the sum is divided by."""
        self.weights = weights if operation == "Mul" else None
        is_of_samples = len(weights) == self._num_samples > 1 and weights.ndim == len(self._shapes[-1])
        if operation == "Mul" and is_of_samples and weights.is_floating_point() and not weights.is_meta:
            # By operations rather than over the list of all: there may be millions.
            self._weights.append((torch.stack([weights.sum(), weights.min(), weights.max()]), weights.numel()))
        elif of_each and not weights.is_meta:
            self._ones.append(value_of(weights))

    def is_of_list(self, length: int) -> bool:
        """Return whether nothing was reduced but a list of ``length`` scalars."""
        return len(self._shapes) == 1 and len(self._shapes[0]) == 1 and self._shapes[0][0] == length

    def term(self, node: Any) -> Term:
        """Return what was gathered as a term; ``node`` is the one that made the scalar."""
        if not self._shapes:
            return _unknown(node)
        return Term(
            means=self.divisor,
            factor=self.factor,
            averages=self._averages(),
            numbers=math.prod(self._shapes[-1]),
            counts_items=self._counts_items,
            weights=tuple(self._weights),
            ones=tuple(self._ones),
        )

    def _averages(self) -> bool:
        """Return whether samples look averaged."""
        n = self._num_samples
        if n in self._averaged or (self._averaged and n not in self._summed):
            return True
        # What the program divides by may be what the first dimensions of a shape hold, such as samples * times.
        counts = {count for shape in self._shapes for count in accumulate(shape, mul)} | {n}
        numbers = (*self.factor.divisors, *(1 / number for number in self.factor.multipliers))
        return any(math.isclose(abs(number), count) for number in numbers for count in counts if count > 1 or n == 1)


def _unknown(node: Any) -> Term:
    return Term(operation=operation_of(node))
