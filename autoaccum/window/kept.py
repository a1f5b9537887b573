"""Tells which counts of terms may be kept from 0, as by ``clamp(min=1)``, and so be larger than what they stand for.

A count that is kept from below is the same number each time, and no count is lower. What a micro-batch truly counts is
measured, or told by the batch: see ``verification.kept`` and ``window.totals``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autoaccum.loss.terms import Term

ROUNDING = 1e-6
"""Relative difference up to which counts are the same: they may be sums of weights in 32 bits."""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A count that may be kept from 0."""

    index: int
    """Which micro-batch of the window."""
    name: str
    """The term's."""
    count: float
    """What its graph shows."""
    assumed: float
    """What it is taken for until that is known."""
    is_zero: bool = False
    """Whether the term is 0 there."""


class Least(NamedTuple):
    """What the counts of a term have shown so far."""

    lowest: float = math.inf
    """The lowest of them."""
    is_uneven: bool = False
    """Whether other counts were no whole multiples of it: then they are sums of weights, which may be below it."""
    is_always_one: bool = True
    """Whether something was divided by 1 in each micro-batch: then that is a constant of the program."""


def least_of(counts: Sequence[float], terms: Sequence[Term | None], before: Least) -> Least:
    """Return the lowest count of a term, of a window and of those before it.

    Args:
        counts: of each micro-batch; 0 where it counts nothing.
        terms: the term as each of them has it.
        before: that of the windows before.
    """
    found = [abs(count) for count, term in zip(counts, terms, strict=True) if _may_be_kept(count, term)]
    # Ratios, for all of them may be multiplied with a constant.
    lowest = min([before.lowest, *found])
    ratios = [count / lowest for count in (*found, before.lowest) if math.isfinite(count)]
    is_uneven = before.is_uneven or any(abs(ratio - round(ratio)) > ROUNDING * ratio for ratio in ratios)
    are_ones = [term.is_one for count, term in zip(counts, terms, strict=True) if term and _may_be_kept(count, term)]
    return Least(lowest, is_uneven, before.is_always_one and all(are_ones))


def doubtful(
    counts: Sequence[float],
    terms: Sequence[Term | None],
    values: Sequence[torch.Tensor | None],
    least: Least,
    *,
    is_known: bool,
    also_ones: bool,
) -> list[int]:
    """Return the micro-batches of which a term may count less than its graph shows.

    Args:
        counts: of each micro-batch; 0 where it counts nothing.
        terms: the term as each of them has it.
        values: what each of them adds to the loss; None where that was not seen.
        least: the lowest count, these included.
        is_known: whether some counts of the term are known to be kept from 0.
        also_ones: whether that is so where the term is not 0, as of a sum over all there is, divided by a few; whatever
            the lowest count is, for it may be multiplied with a constant, or be kept at more than 1.
    """
    # Where the graph of any shows no count, samples stand for those of all.
    if any(term is not None and term.kind == "unknown" and not term.numbers for term in terms):
        return []
    found = []
    # Where all are ones they may be a constant of the program's, or all of them kept.
    has_weights = is_known if least.is_always_one else least.is_uneven
    # Other counts than whole multiples of the lowest show the same of what is known to be kept, as by clamp(min=2).
    are_all = also_ones or (is_known and least.is_uneven)
    for index, (count, term, value) in enumerate(zip(counts, terms, values, strict=True)):
        if not _may_be_kept(count, term) or abs(count) > least.lowest * (1 + ROUNDING):
            continue
        # What counts nothing adds nothing; but weights that add up to less than 1 add something.
        is_zero = value is not None and not value.tolist()  # which reads it without an operation
        if is_zero or are_all or (term is not None and term.is_one and (value is None or has_weights)):
            found.append(index)
    return found


def _may_be_kept(count: float, term: Term | None) -> bool:
    # PyTorch's own means over nothing are no numbers, and what the user counts is taken at its word. Of a micro-batch
    # that counts nothing it is known.
    return bool(count) and term is not None and not term.is_items


def may_stand_for(true: float, count: float) -> bool:
    """Return whether a count may be what a lower one, or the same, was kept at."""
    # Both have the sign of what the term is multiplied with.
    return -ROUNDING <= true / count <= 1 + ROUNDING


def is_same(first: float, second: float) -> bool:
    """Return whether two counts are the same but for rounding."""
    return math.isclose(first, second, rel_tol=ROUNDING, abs_tol=1e-12)
