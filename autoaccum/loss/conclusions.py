"""Concludes what the micro-batches of a window add up to: a mean, a sum, or something that cannot be told.

One micro-batch shows what its loss was divided by, and not what that number means: 4 may be its samples, the targets
that happened to count, or a constant. Micro-batches of different sizes and counts tell these apart: a count changes
with them, a constant does not. Where they do not tell, that is a doubt, and is announced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoaccum.loss.hypotheses import Conclusion, Doubt
from autoaccum.loss.terms import Count, Kind, Reduction, Term

_COUNT = (
    "Pass num_items=(micro-batch) -> how many items its loss is a mean over (of losses in a dict, a dict of such "
    "functions by the same names), or let the loss end in one mean, or one sum, over samples"
)
_WHOLE = "or pass accumulate='joined', which computes it of the whole window"
_ROOT = f"Let the loss end in one mean, or one sum, over samples, of which no root or power is taken; {_WHOLE}"
_OF_ROOTS = {
    "Abs",
    "Exp",
    "Expm1",
    "Log",
    "Log10",
    "Log1P",
    "Log2",
    "Pow",
    "Rsqrt",
    "Sigmoid",
    "Softplus",
    "Sqrt",
    "Tanh",
}
"""Operations on a mean by which no count makes one of the others."""


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


_BY_FACTORS: Doubt = (
    "it is multiplied by another factor in each micro-batch",
    "Leave the factor out, pass accumulate='joined', by which it is drawn once for the full batch, or pass num_items= "
    "where it is a count",
)


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
    if all(map(_is_one_for_each, sizes, reductions)):
        return Conclusion(False, ("it has as many terms as there are samples", _COUNT))
    # Then what each term is: a column holds one term in all micro-batches.
    columns = list(zip(*(reduction.terms for reduction in reductions), strict=True))
    divisors = [[finite(term.divisor) for term in terms] for terms in columns]
    kinds = []
    for terms, counts in zip(columns, divisors, strict=True):
        kind, doubt = _kind_of(sizes, terms, counts)
        kinds.append(kind)
        if doubt is not None:
            return Conclusion(kinds[0] == "sum", doubt)
    # A micro-batch has one weight, that of its first term.
    is_sum = kinds[0] == "sum"
    are_alike = is_sum or all(proportional(counts, divisors[0]) for counts in divisors[1:])
    if len(set(kinds)) > 1 or not are_alike:
        return Conclusion(is_sum, SEVERAL)
    # Where its term is all of the loss, an empty mask gives itself away by a loss of 0.
    is_alone = len(columns) == 1 and not any(reduction.constants for reduction in reductions)
    pairs = zip(columns, divisors, strict=True)
    if not is_sum and not is_alone and any(_may_be_kept(sizes, terms, counts) for terms, counts in pairs):
        return Conclusion(is_sum, BY_ONE)
    return Conclusion(is_sum, _doubt_of_constants(reductions, is_sum))


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
            cure = f"{_COUNT}; {_WHOLE}" if _OF_ROOTS.isdisjoint(unknown) else _ROOT
            return f"its graph leads to {' and '.join(unknown)}, which says nothing of it", cure
    return None


def _may_be_kept(sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]) -> bool:
    """Return whether a count of 1 may stand for none: one that tensors counted, or a number that varies."""
    if any(term.is_one and term.is_counted for term in terms):
        return True
    is_one = {term.is_one for term, count in zip(terms, counts, strict=True) if count}
    return len(is_one) > 1 and not proportional(counts, sizes)


def _is_one_for_each(size: int, reduction: Reduction) -> bool:
    """Return whether there is a term for each sample, none of which reduces what is as long as the batch.

    Such a loss adds up those of its samples in a loop: its terms differ with the size of a micro-batch.
    """
    return 1 < size == len(reduction.terms) and all(term.numbers % size for term in reduction.terms)


def finite(divisor: Count) -> float:
    """Read a divisor; return 0 for that of a mean over nothing."""
    value = float(divisor)
    return value if math.isfinite(value) else 0.0


def _kind_of(sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]) -> tuple[Kind, Doubt | None]:
    """Tell what a term is from all micro-batches of a window, and what speaks against it.

    Args:
        sizes: samples of each micro-batch.
        terms: the term as each of them has it.
        counts: the divisors of these; 0 where there was nothing to divide.
    """
    with_items = [(size, count, term) for size, count, term in zip(sizes, counts, terms, strict=True) if count]
    if not with_items:
        return terms[0].kind, None
    first = with_items[0][2]
    if len({round(math.log(abs(count)), 6) for _, count, _ in with_items}) > 1:
        # A divisor that varies is a count, unless it is a factor that is drawn or annealed.
        known = [(term, float(term.factor.value), count) for _, count, term in with_items]
        is_one_factor = len({factor for _, factor, _ in known}) == 1 or proportional(counts, sizes)
        by_division = all(
            term.factor.tensors == "Div" and math.isclose(count * factor, 1, rel_tol=1e-4)
            for term, factor, count in known
        )
        by_count = all(
            math.isclose(count, round(count), rel_tol=1e-4) and count <= term.numbers * 1.0001
            for term, _, count in known
        )
        return "mean", None if is_one_factor or by_division or by_count else _BY_FACTORS
    is_counted = any(term.is_counted for _, _, term in with_items)
    if len({size for size, _, _ in with_items}) > 1 and not is_counted:
        # Neither a mean nor a sum over samples reduces as many numbers of more samples.
        if len({term.numbers for _, _, term in with_items}) == 1:
            reason = f"it reduces {first.numbers} numbers in every micro-batch, however many samples there are"
            return first.kind, (reason, "Let it end in a mean or a sum over samples")
        return "sum", None  # a count of samples would have changed with them
    # A half stands in many losses.
    if is_counted or first.averages or all(abs(number) == 2 for number in first.factor.divisors):
        return first.kind, None
    return "sum", (
        f"it divides by {with_items[0][1]:g} in every micro-batch, which may be a constant or a count of its own",
        "Divide by the number of samples of the batch that the loss is given (not the window's), or by nothing: "
        'the plain sum; where it sets samples against each other, pass accumulate="joined"',
    )


def _doubt_of_constants(reductions: Sequence[Reduction], is_sum: bool) -> Doubt | None:
    """Return what speaks against counting the terms of parameters alone once a window; None when nothing does.

    It is exact for a term that is the same in each micro-batch as in the window: one that is multiplied, or divided, by
    a count of samples is not.
    """
    if len({len(reduction.constants) for reduction in reductions}) > 1:
        return "its terms are not the same ones in each micro-batch", _COUNT
    if is_sum and any(reduction.constants for reduction in reductions):
        return PENALTIES
    is_shared_out = any(reduction.is_shared_out for reduction in reductions)
    for factors in zip(*(map(float, reduction.constants) for reduction in reductions), strict=True):
        if len({round(factor, 12) for factor in factors}) > 1 or is_shared_out:
            return (
                "a term that depends on the parameters alone is multiplied or divided by a count of samples",
                "Add such terms as they are: they are counted once a window",
            )
    return None


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
