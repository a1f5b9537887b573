"""What the micro-batches of a window, seen together, add up to: a mean, a sum, or something that cannot be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoaccum.loss.reductions import Reduction
from autoaccum.loss.terms import Count, Kind, Term


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
    if all(map(_is_one_for_each, sizes, reductions)):
        return Conclusion(False, ("it has as many terms as there are samples", _COUNT))
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
    is_alone = len(columns) == 1 and not any(reduction.constants for reduction in reductions)
    kept = not is_alone and any(term.is_one and term.is_counted for terms in columns for term in terms)
    if (is_doubtful or kept) and not is_sum:
        return Conclusion(is_sum, ("it divides by 1, which may be the count of one or, kept from 0, of none", _COUNT))
    return Conclusion(is_sum, _doubt_of_constants(sizes, reductions, is_sum))


def _is_one_for_each(size: int, reduction: Reduction) -> bool:
    """Whether there is a term for each sample, none of which reduces what is as long as the batch."""
    return 1 < size == len(reduction.terms) and all(term.numbers % size for term in reduction.terms)


def _finite(divisor: Count) -> float:
    """0 for what was divided by a mean over nothing."""
    value = float(divisor)
    return value if math.isfinite(value) else 0.0


def _kind_of(
    sizes: Sequence[int], terms: Sequence[Term], counts: Sequence[float]
) -> tuple[Kind, tuple[str, str] | None]:
    """What a term is, seen over a window, and what speaks against it."""
    there = [(size, count, term) for size, count, term in zip(sizes, counts, terms, strict=True) if count]
    if not there:
        return terms[0].kind, None
    if len({round(math.log(abs(count)), 6) for _, count, _ in there}) <= 1:
        return _kind_of_constant(there)
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


def _kind_of_constant(there: Sequence[tuple[int, float, Term]]) -> tuple[Kind, tuple[str, str] | None]:
    """What a term is whose divisor is the same in all micro-batches: each comes with its size and the divisor."""
    terms = [term for _, _, term in there]
    numbers = {term.numbers for term in terms}
    guess = terms[0].kind
    if all(term.is_items for term in terms) and all(term.is_sure for term in terms):
        return "mean", None  # counts of targets that happen to be equal
    if len({size for size, _, _ in there}) > 1:
        if len(numbers) == 1:
            reason = f"it reduces {numbers.pop()} numbers in every micro-batch, however many samples there are"
            return guess, (reason, "Let it end in a mean or a sum over samples")
        if not any(term.is_counted for term in terms):
            return "sum", None
    elif all(term.is_sure and term.kind == guess for term in terms):
        return guess, None
    elif len(numbers) > 1 and not any(term.is_counted for term in terms) and guess == "sum":
        return "sum", None  # what was picked by a mask
    return guess, (
        f"it divides by {there[0][1]:g} in every micro-batch, which may be a constant or a count of its own",
        "Divide by the number of samples of the batch that the loss is given (not the window's), or by nothing: "
        "the plain sum",
    )


def _doubt_of_constants(sizes: Sequence[int], reductions: Sequence[Reduction], is_sum: bool) -> tuple[str, str] | None:
    """What speaks against counting terms of parameters alone once a window."""
    if len({len(reduction.constants) for reduction in reductions}) > 1:
        return "its terms are not the same ones in each micro-batch", _COUNT
    for factors in zip(*(map(float, reduction.constants) for reduction in reductions), strict=True):
        grows = is_sum and any(
            size > 1 and factor and factor % size == 0 for size, factor in zip(sizes, factors, strict=True)
        )
        is_shared_out = any(reduction.is_shared_out for reduction in reductions)
        if len({round(factor, 12) for factor in factors}) > 1 or grows or is_shared_out:
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


def stands_for_none(reduction: Reduction, loss: torch.Tensor, num_samples: int) -> tuple[bool, bool]:
    """(whether a count of 1 is taken for one of 0, whether that is in doubt).

    A mask's count is kept from 0 by ``clamp(min=1)``; its loss is 0 then, and so is its gradient: only the total has to
    be mended. But so may be the loss of one sample, by a hinge.
    """
    if not reduction.terms or not reduction.terms[0].is_one or loss.tolist():
        return False, False
    return reduction.terms[0].is_counted or num_samples > 1, num_samples == 1
