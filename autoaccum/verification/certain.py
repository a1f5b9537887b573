"""Decides whether micro-batches may be weighted: only by one certain count.

A measurement shows that a weight is right for a few samples of one window. If the whole loss is divided by the same
count, the weight is right for other windows too. If terms have different counts, or a count is clamped, it may not be,
and the run joins micro-batches instead (see ``docs/joined.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.loss import conclusions
from autoaccum.loss.reductions import is_one
from autoaccum.loss.terms import Reduction
from autoaccum.verification.readings import is_told
from autoaccum.window.gradient import are_alike, are_terms_apart
from autoaccum.window.job import Job

SEVERAL = "The terms of the loss are divided by different counts"
PENALTIES = "The loss is a sum over samples plus terms of parameters alone"
CLAMPED = "The loss of a micro-batch is divided by exactly 1, which may stand for a count of 0"
KEPT = "The loss of a micro-batch that counts items is 0, which may be a count that is kept from 0"
HIDDEN = "The autograd graph does not show what the loss is divided by"
DRAWN = "What the step draws at random was not found to be each sample's own, and may mix samples"
NOT_FINITE = "The loss of a micro-batch, or its gradient, is not finite"

_SHOWN = {conclusions.SEVERAL: SEVERAL, conclusions.BY_ONE: CLAMPED, conclusions.PENALTIES: PENALTIES}
"""What graphs show of a window, by which no weight is certain whatever a measurement says."""


def why_unweighted(
    job: Job, sizes: Sequence[int], counts: Sequence[float], reductions: Sequence[Reduction]
) -> str | None:
    """Return why no weight of micro-batches is certain, as their graphs show; None where one may be.

    Args:
        job: what is computed. A count or a reduction that the user passed is certain.
        sizes: samples of each micro-batch of a window of which nothing was measured.
        counts: what each was found to count; 0 for none.
        reductions: how the loss of each was reduced.
    """
    doubt = conclusions.conclude(sizes, reductions).doubt
    if doubt is None or is_told(job):
        return None
    # As long as each sample counts alike, it is no matter what is counted.
    return None if doubt is conclusions.BY_ONE and are_alike(sizes, counts) else _SHOWN.get(doubt)


def why_uncertain(
    job: Job,
    sizes: Sequence[int],
    counts: Sequence[float],
    reductions: Sequence[Reduction],
    *,
    is_sum: bool,
    counts_samples: bool,
) -> str | None:
    """Return why a weight that was measured to be right may be wrong for another window; None where it is certain.

    Args:
        job: what is computed. A count or a reduction that the user passed is certain.
        sizes: samples of each micro-batch of a window.
        counts: what each was found to count; 0 for none.
        reductions: how the loss of each was reduced.
        is_sum: whether it was measured to be a sum.
        counts_samples: whether graphs of code that is not compiled have shown samples to count alike.
    """
    if is_told(job) or not any(counts):
        return None
    if is_sum:
        return SEVERAL if are_terms_apart(counts, reductions) else None
    found = [reduction for reduction, count in zip(reductions, counts, strict=True) if count]
    terms = [term for reduction in found for term in reduction.terms]
    unknown = [term for term in terms if term.kind == "unknown" and not (term.is_compiled and counts_samples)]
    if not all(term.numbers for term in unknown):
        return HIDDEN
    # A term that some micro-batches lack is over other items than the rest.
    if len({max(1, len(reduction.terms)) for reduction in found}) > 1:
        return SEVERAL
    # As long as each sample counts alike, it is no matter what is counted.
    if are_alike(sizes, counts):
        return None
    # Terms that are means over the same count, as cross entropy and a z-loss of the same tokens, are one path twice.
    differ = are_terms_apart(counts, reductions)
    if len(terms) > len(found) and (differ or any(term.kind != "mean" for term in terms)):
        return SEVERAL
    return CLAMPED if any(map(is_one, found)) else HIDDEN if unknown else None
