"""Describes the terms of a loss: what each was divided by, and whether that makes it a mean or a sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, Literal, NamedTuple, overload

import torch

Count = float | torch.Tensor
"""A number, or a 0-dim tensor that is not read yet, because reading would wait for the device."""
NONE = 2.0**-100
"""What stands for a count of 0 beside a sum that may have a value all the same: next to nothing beside any count. Such
a sum is divided by 1, and weighed by 1."""
Kind = Literal["mean", "sum", "unknown"]
"""How a term averages over samples; unknown where its graph leads to an operation that is not linear."""


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
    """How many numbers were reduced; 0 where that bounds no count."""
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
    """The name of the operation that is unknown."""
    unread: Shown | None = None
    """What it is made of again once the numbers of a device are read; None where they are on the host."""

    @property
    def is_compiled(self) -> bool:
        """Tell whether the graph ends where torch.compile's code begins, which says nothing of it."""
        return "CompiledFunction" in self.operation

    def numbers_unread(self) -> list[Count]:
        """Return all of its numbers that may be on a device."""
        return [self.divisor, self.factor, *(() if self.unread is None else self.unread.numbers())]


class Edge(NamedTuple):
    """Where a term enters the loss."""

    node: Any
    """The addition, or the list."""
    place: int
    """Which of its inputs the term is."""
    above: Count | None
    """What the sum is multiplied with on its way to the loss; None where that is learnt."""


class Division(NamedTuple):
    """Where what depends on the batch is divided by a number on a device."""

    node: Any
    """The division, or the product with what is one over it."""
    place: int
    """Which of its inputs depends on the batch."""
    is_product: bool
    """Whether it is a product."""
    number: torch.Tensor
    """What it is divided by, or multiplied with."""


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
    edges: tuple[Edge, ...] = ()
    """Where those enter the loss."""
    entries: tuple[Edge | None, ...] = ()
    """Where the terms do, each by its place among them."""
    divisions: tuple[Division, ...] = ()
    """Where something is divided by what is not read yet, and may be 0."""

    @property
    def is_sum(self) -> bool:
        """Tell whether the loss looks like a sum over samples, from this micro-batch alone."""
        return bool(self.terms) and all(term.kind == "sum" for term in self.terms)


@dataclass(frozen=True, slots=True)
class Factor:
    """The constants between the root of a loss and one of its terms."""

    value: Count = 1.0
    """Their product, where a divisor d counts as 1 / d."""
    divisors: tuple[float, ...] = ()
    """Numbers that the program wrote down to divide by, each twice at most: a recurrence has hundreds of one."""
    multipliers: tuple[float, ...] = ()
    """Numbers that it wrote down to multiply with, likewise."""
    written: float = 1.0
    """The product of all of these, where a divisor d counts as 1 / d."""
    tensors: Literal["", "Div", "Mul"] = ""
    """How constants came in that tensors computed: not at all, by division alone, or also by multiplication."""
    sign: float = 1.0
    """-1 where it is subtracted: no matter to what it was divided by."""
    is_learnt: bool = False
    """Whether something learnt came in too, which is not in the product."""

    def times(self, operation: str, value: Count, is_number: bool) -> Factor:
        """Return the factor with one more constant.

        Args:
            operation: ``"Mul"`` or ``"Div"``.
            value: the constant.
            is_number: whether the program wrote it down as a number; else a tensor held it.
        """
        product = divide(self.value, value) if operation == "Div" else self.value * value
        if not is_number:
            return replace(self, value=product, tensors="Mul" if "Mul" in (operation, self.tensors) else "Div")
        if value == 0:  # the loss is not finite, and shall be seen to be so
            return self
        number = float(value)
        if operation == "Div":
            divisors = _with(self.divisors, number)
            return replace(self, value=product, divisors=divisors, written=self.written / number)
        multipliers = _with(self.multipliers, number)
        return replace(self, value=product, multipliers=multipliers, written=self.written * number)


def _with(numbers: tuple[float, ...], number: float) -> tuple[float, ...]:
    return numbers if numbers.count(number) > 1 else (*numbers, number)


def divide(first: Count, second: Count) -> Count:
    """Divide two counts; by a number that is 0 to infinity.

    The divisor of a mean over nothing, which is 0 / 0, is infinite too: it had no items.
    """
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first / second
    return first / second if second else math.inf


class Shown(NamedTuple):
    """What a graph shows of a term, all of which but the numbers of a device is known at once."""

    num_samples: int
    """Of the micro-batch."""
    averaged: tuple[int, ...]
    """Extents of the dimensions that were averaged."""
    summed: tuple[int, ...]
    """Extents of those that were summed."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what was reduced, the first one nearest to the loss."""
    factor: Factor
    """The constants that it is multiplied with."""
    divisor: Count
    """That of its means."""
    counts_items: bool
    """Whether a loss counted its targets."""
    is_suspect: bool
    """Whether there are weights of the samples that sum to one."""
    weights: tuple[tuple[torch.Tensor, int], ...] = ()
    """Of weights that may do so, which are not read yet, their sum, the least and the most; and how many there are."""
    ones: tuple[torch.Tensor, ...] = ()
    """Weights of a single number, which may be 1."""

    def numbers(self) -> list[Count]:
        """Return all that may be on a device."""
        return [self.factor.value, self.divisor, *[found for found, _ in self.weights], *self.ones]

    def read(self, on_host: Callable[[Count], Any]) -> Shown:
        """Return the same with its numbers as ``on_host`` gives them: as a number, or a list of several."""
        # In the order of the walk, so that it ends as it would have on the host.
        factor = replace(self.factor, value=on_host(self.factor.value))
        for weight in self.ones:
            if on_host(weight) == 1:
                factor = factor.times("Div", 1.0, True)
        # The same question as on the host, where it is asked in the walk.
        is_suspect = self.is_suspect or any(_are_normalised(on_host, *weights) for weights in self.weights)
        divisor = on_host(self.divisor)
        return self._replace(factor=factor, divisor=divisor, is_suspect=is_suspect, weights=(), ones=())

    def term(self) -> Term:
        """Return what it shows as a term."""
        factor, of_device = self.factor, isinstance(self.factor.value, torch.Tensor)
        kind, is_sure = kind_of(self.num_samples, self.averaged, self.summed, self.shapes, factor, self.counts_items)
        is_unread = of_device or isinstance(self.divisor, torch.Tensor) or self.weights or self.ones
        # They may sum to one by chance: what the sum was divided by is told all the same.
        return Term(
            kind="unknown" if self.is_suspect else kind,
            operation="weights that sum to one" if self.is_suspect else "",
            is_sure=is_sure,
            divisor=divide(self.divisor, factor.value),
            numbers=math.prod(self.shapes[-1]),
            factor=factor.value,
            is_counted=self.counts_items or bool(factor.tensors),
            is_multiplied=factor.tensors == "Mul",
            is_items=self.counts_items,
            is_one=_is_one(factor),
            unread=self if is_unread else None,
        )


def is_normalised(total: float, least: float, most: float, numbers: int) -> bool:
    """Return whether weights that differ sum, or average, to one.

    They do when the program divided them by their sum over the micro-batch: cutting the window then changes the loss.

    Args:
        total: their sum.
        least: the smallest of them.
        most: the largest.
        numbers: how many there are.
    """
    return least != most and any(math.isclose(total, one, rel_tol=1e-3) for one in (1, numbers))


def _are_normalised(on_host: Callable[[Count], Any], found: torch.Tensor, numbers: int) -> bool:
    total, least, most = on_host(found)
    return is_normalised(total, least, most, numbers)


def _is_one(factor: Factor) -> bool:
    """Return whether something was divided by 1, or by minus 1, beside the constants that the program wrote down."""
    if any(abs(number) == 1 for number in (*factor.divisors, *factor.multipliers)):
        return True
    if not factor.tensors or isinstance(factor.value, torch.Tensor):
        return False
    return math.isclose(abs(factor.value), abs(factor.written), rel_tol=1e-12)


def kind_of(
    num_samples: int,
    averaged: Sequence[int],
    summed: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    factor: Factor,
    counts_items: bool,
) -> tuple[Kind, bool]:
    """Tell from one micro-batch whether a term averages its samples or sums them.

    Args:
        num_samples: samples of the micro-batch.
        averaged: the extents of the dimensions that were averaged.
        summed: the extents of those that were summed.
        shapes: of what was reduced, the last one farthest from the loss.
        factor: the constants that the term is multiplied with.
        counts_items: whether a loss counted its targets itself.

    Returns:
        The kind, and whether it is sure.
    """
    # An extent that equals the samples is theirs. One that is a multiple of them may hold them too, as that of samples
    # and times flattened into one dimension does.
    n = num_samples
    kind: Kind
    if counts_items or (n in averaged and n not in summed):
        kind, is_sure = "mean", True
    elif averaged and n not in summed and n > 1:
        kind = "mean"
        is_sure = any(extent % n == 0 for extent in averaged) and not any(extent % n == 0 for extent in summed)
    elif averaged and n in averaged:
        # One dimension as long as the samples was averaged and another one summed: either may be theirs.
        kind, is_sure = "mean", False
    elif factor.tensors:
        # What tensors computed, such as mask.sum(), is a count: a sum that is divided by it is a mean.
        kind, is_sure = "mean", n > 1 and _may_count(n, factor, shapes)
    else:
        kind, is_sure = "sum", n in summed or (n > 1 and any(extent % n == 0 for extent in summed))
    if not (factor.divisors or factor.multipliers):
        return kind, is_sure
    # Whatever the program may have counted: the samples, and what the first dimensions of a shape hold together, such
    # as samples * times.
    counts = {count for shape in shapes for count in accumulate(shape, mul)} | {n}
    return _with_numbers(n, kind, is_sure, factor, counts)


def _with_numbers(n: int, kind: Kind, is_sure: bool, factor: Factor, counts: set[int]) -> tuple[Kind, bool]:
    """Correct a kind by the numbers that the program divided by.

    A number that is a count, as in ``loss.sum() / len(x)``, makes a mean of a sum; a multiple of the samples may.

    Args:
        n: samples of the micro-batch.
        kind: what the extents alone say.
        is_sure: whether that is sure.
        factor: holds the numbers.
        counts: everything that may be a count.
    """
    # To multiply with 1 / 6 is to divide by 6.
    for number in (*factor.divisors, *(1 / number for number in factor.multipliers)):
        is_count = any(math.isclose(abs(number), count) for count in counts)
        if n == 1 or abs(number) in (2, 0.5):
            # As often a constant as a count: a half stands in many losses, and of one sample every count may be 1.
            is_told_otherwise = kind == "mean" or bool(factor.tensors) or not (n == 1 or is_count)
            is_sure = is_sure and number != 1 and is_told_otherwise
            if kind == "sum" and is_count and number in factor.divisors:
                kind = "mean"
        elif kind == "sum" and is_count:
            kind = "mean"
        elif is_count or any(math.isclose(abs(1 / number), count) for count in counts - {1}):
            is_sure = False  # a mean that is multiplied, or once more divided, by a count
        elif kind == "sum" and number in factor.divisors and is_multiple(number, n):
            # Two or four things of each sample are counted, but hardly a hundred: that is rather a constant.
            kind, is_sure = ("mean" if abs(number) <= 4 * n else "sum"), False
    if n > 1 and kind == "sum":
        for number in factor.multipliers:
            if is_multiple(1 / number, n) and 1 / number <= 4 * n:
                is_sure = False  # one over twice the samples, perhaps
    return kind, is_sure


def _may_count(n: int, factor: Factor, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the divisor that tensors computed may be a count that is the same for each of ``n`` samples.

    A divisor of which that is not so is a count only if it varies from one micro-batch to the next.
    """
    # The factor without what the program wrote down as numbers: one over what tensors computed.
    of_tensors = divide(factor.written, factor.value)
    if isinstance(of_tensors, torch.Tensor):  # on an accelerator, and not read now
        return True
    return is_multiple(of_tensors, n) and of_tensors <= math.prod(shapes[-1])


def is_multiple(number: float, count: int) -> bool:
    """Return whether a number of either sign is a whole multiple of a count, 0 times excepted."""
    ratio = abs(number) / count
    return math.isfinite(ratio) and ratio >= 1 - 1e-9 and math.isclose(ratio, round(ratio), rel_tol=1e-9)


@overload
def divisor_of(items: float) -> float: ...
@overload
def divisor_of(items: torch.Tensor) -> torch.Tensor: ...
def divisor_of(items: Count) -> Count:
    """Return what a sum is divided by that counts so many: these, and 1 for ``NONE``."""
    if isinstance(items, torch.Tensor):
        return torch.where(items == NONE, 1.0, items)
    return 1.0 if items == NONE else items


def without_none(items: Count) -> Count:
    """Return 0 for ``NONE``, and any other count as it is."""
    if isinstance(items, torch.Tensor):
        return torch.where(items.abs() <= NONE, 0.0, items)
    return 0.0 if abs(items) <= NONE else items
