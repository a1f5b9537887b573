"""Concludes what the micro-batches of a window add up to: a mean, a sum, or something that cannot be told.

One micro-batch shows what its loss was divided by, and not what that number means: 4 may be its samples, the targets
that happened to count, or a constant. Micro-batches of different sizes and counts tell these apart: a count changes
with them, a constant does not. Where they do not tell, that is a doubt, and is announced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoaccum.step.terms import Conclusion, Count, Doubt, Kind, Reduction, Term

_CURE = (
    "Pass num_items=(micro-batch) -> how many items its loss is a mean over (of losses in a dict, a dict of such "
    "functions by the same names), let the loss end in one mean, or one sum, over samples, or pass "
    "accumulate='joined', which computes it of the whole window"
)


SEVERAL: Doubt = (
    "its terms are divided by different counts, or one is a sum and another a mean",
    "Pass accumulate='joined', or return them by name, as a dict, with num_items={name: (micro-batch) -> how many "
    "items that one is a mean over}",
)
"""What speaks against one weight for all terms of a loss."""

BY_ONE: Doubt = (
    "it divides by 1, which may be the count of one or, kept from 0, of none",
    "Pass accumulate='joined', which divides by the count of the whole window",
)
"""What speaks against a count of exactly 1."""

PENALTIES: Doubt = (
    "a term of parameters alone stands beside a sum over samples",
    "Pass accumulate='joined', by which it is counted once, or divide the sum by the number of samples",
)
"""What speaks against adding up sums in which terms stand that are the same in each micro-batch."""


_UNCLEAR: Doubt = ("what it divides or multiplies by may be a constant or a count of its own", _CURE)


def conclude(sizes: Sequence[int], reductions: Sequence[Reduction]) -> Conclusion:
    """Conclude what the losses of a window's micro-batches add up to.

    Args:
        sizes: samples of each.
        reductions: how each one's loss was reduced.
    """
    # Reductions without terms are plain means, or counts of the user's: there is nothing to tell.
    if not any(reduction.terms for reduction in reductions):
        return Conclusion(is_sum=False)
    # What was left out of the window, for it counts nothing, says nothing.
    shown = [(size, each) for size, each in zip(sizes, reductions, strict=True) if each.terms or float(each.items)]
    sizes, reductions = [size for size, _ in shown], [each for _, each in shown]
    # First, whether the terms can be compared at all.
    doubt = doubt_of_unknown(reductions)
    if doubt is not None:
        return Conclusion(False, doubt)
    if len({len(reduction.terms) for reduction in reductions}) > 1:
        return Conclusion(False, SEVERAL)
    # Then what each term is: a column holds one term in all micro-batches.
    columns = list(zip(*(reduction.terms for reduction in reductions), strict=True))
    divisors = [[finite(term.divisor) for term in terms] for terms in columns]
    found = [_kind_of(sizes, terms, counts) for terms, counts in zip(columns, divisors, strict=True)]
    # A micro-batch has one weight, that of its first term.
    is_sum = found[0][0] == "sum"
    if not all(is_clear for _, is_clear in found):
        return Conclusion(is_sum, _UNCLEAR)
    are_alike = is_sum or all(proportional(counts, divisors[0]) for counts in divisors[1:])
    # A term of parameters alone is counted once if it is the same in each micro-batch.
    factors = {tuple(round(float(factor), 12) for factor in reduction.constants) for reduction in reductions}
    if len({kind for kind, _ in found}) > 1 or not are_alike or len(factors) > 1:
        return Conclusion(is_sum, SEVERAL)
    # Where its term is all of the loss, an empty mask gives itself away by a loss of 0.
    is_alone, pairs = len(columns) == 1 and factors == {()}, zip(columns, divisors, strict=True)
    if not is_sum and not is_alone and any(_may_be_kept(sizes, terms, counts) for terms, counts in pairs):
        return Conclusion(is_sum, BY_ONE)
    return Conclusion(is_sum, PENALTIES if is_sum and factors != {()} else None)


def num_contributing(losses: Sequence[torch.Tensor | None], reductions: Sequence[Reduction]) -> int:
    """Return how many micro-batches add to a gradient: a loss of 0 adds nothing.

    Beside terms of the parameters alone it is these, and the same each time.
    """
    found = [loss.tolist() for loss in losses if loss is not None]
    if any(reduction.constants for reduction in reductions):
        return sum(found.count(loss) == 1 for loss in found)
    return sum(map(bool, found))


def doubt_of_unknown(reductions: Sequence[Reduction]) -> Doubt | None:
    """Return that the graph of a loss leads to operations that say nothing of it, where that is so."""
    for reduction in reductions:
        found = [term for term in reduction.terms if term.kind == "unknown"]
        unknown = sorted({term.in_words() for term in found})
        if found and all(term.numbers and term.is_one for term in found):  # a mask of one entry
            return BY_ONE if len(reduction.terms) == 1 else SEVERAL
        if unknown:
            return f"its graph leads to {' and '.join(unknown)}, which says nothing of it", _CURE
    return None


def _may_be_kept(sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]) -> bool:
    """Return whether a count of 1 may stand for none: one that tensors counted, or a number that varies."""
    if any(term.is_one and term.is_counted for term in terms):
        return True
    is_one = {term.is_one for term, count in zip(terms, counts, strict=True) if count}
    return len(is_one) > 1 and not proportional(counts, sizes)


def finite(divisor: Count) -> float:
    """Read a divisor; return 0 for that of a mean over nothing."""
    value = float(divisor)
    return value if math.isfinite(value) else 0.0


def _kind_of(sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]) -> tuple[Kind, bool]:
    """Tell what a term is from all micro-batches of a window, and whether that is clear.

    Args:
        sizes: samples of each micro-batch.
        terms: the term as each of them has it.
        counts: the divisors of these; 0 where there was nothing to divide.
    """
    with_items = [(size, count, term) for size, count, term in zip(sizes, counts, terms, strict=True) if count]
    if not with_items:
        return terms[0].kind, True
    first = with_items[0][2]
    if len({round(math.log(abs(count)), 6) for _, count, _ in with_items}) > 1:
        # A divisor that varies is a count, unless it is a factor that is drawn or annealed.
        is_factor = len({float(term.factor.value) for _, _, term in with_items}) > 1 and any(
            term.factor.tensors != "Div" and not math.isclose(count, round(count), rel_tol=1e-4)
            for _, count, term in with_items
        )
        return "mean", not is_factor or proportional(counts, sizes)
    is_counted = any(term.is_counted for _, _, term in with_items)
    if len({size for size, _, _ in with_items}) > 1 and not is_counted:
        # Neither a mean nor a sum over samples reduces as many numbers of more samples, and a count of them changes.
        is_same = len({term.numbers for _, _, term in with_items}) == 1
        return (first.kind, False) if is_same else ("sum", True)
    # A half stands in many losses.
    if is_counted or first.averages or all(abs(number) == 2 for number in first.factor.divisors):
        return first.kind, True
    return "sum", False


def proportional(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two lists of counts are the same but for a factor."""
    total, other = sum(first), sum(second)
    return all(math.isclose(a * other, b * total, rel_tol=1e-4) for a, b in zip(first, second, strict=True))


def stands_for_none(reduction: Reduction, loss: float, num_samples: int) -> bool:
    """Return whether a count of 1 stands for a count of 0.

    A mask's count is kept from 0 by ``clamp(min=1)``; its loss is 0 then, and so is its gradient: only the total has to
    be mended. But the loss of one sample may be 0 as well, by a hinge.
    """
    if loss or not reduction.terms or not reduction.terms[0].is_one:
        return False
    return reduction.terms[0].is_counted or num_samples > 1
