"""Reads what the graphs of a window's losses say of it: what they propose, and what speaks against it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autoaccum.events import Notice
from autoaccum.loss.conclusions import BY_ONE, PENALTIES, conclude
from autoaccum.loss.hypotheses import Doubt, Hypothesis
from autoaccum.loss.reductions import is_one
from autoaccum.loss.terms import Reduction
from autoaccum.verification import notices
from autoaccum.window.gradient import Gradient
from autoaccum.window.job import Job


def likely(job: Job, gradient: Gradient) -> Hypothesis:
    """Return what a window looks like that nothing was measured of."""
    if job.num_items is not None:
        return "num_items"
    return "items" if gradient.conclusion is None or not gradient.conclusion.is_sum else "sum"


def is_weighed_alike(gradient: Gradient, before: Hypothesis | None, after: Hypothesis | None) -> bool:
    """Return whether another hypothesis would weigh a window as the one did by which it was run."""
    if before == after or gradient.conclusion is None:
        return True
    return before is None and (after == "num_items" or gradient.conclusion.is_sum == (after == "sum"))


def is_hidden(gradient: Gradient) -> bool:
    """Return whether what micro-batches count cannot be read off them because their loss was compiled."""
    return any(term.is_compiled for reduction in gradient.reductions for term in reduction.terms)


def pieces(gradient: Gradient) -> list[tuple[int, int]]:
    """Return (start, samples) of each micro-batch."""
    starts = accumulate(gradient.sizes, initial=0)
    return list(zip(starts, gradient.sizes, strict=False))


def suspicion(job: Job, sizes: Sequence[int], shown: Sequence[Reduction]) -> Notice | None:
    """Return what the graphs say against a loss that was measured not to add up; None where they say nothing."""
    # What its graph does not tell, the user has told.
    return None if is_told(job) else notices.doubt_of(sizes, shown)


def is_told(job: Job) -> bool:
    """Return whether the user has said what a loss is, or is a mean over."""
    return job.num_items is not None or job.reduction is not None


def doubts(job: Job, gradient: Gradient, shown: Sequence[Reduction]) -> list[Notice]:
    """Return why the gradient may not be that of the window, as far as that can be read, where nothing was measured."""
    if gradient.conclusion is None:
        return []
    said = notices.batch_norm_notices(job.modules)
    doubt = None if job.num_items is not None else _doubt(job, gradient, shown)
    return [*said, *([] if doubt is None else [notices.doubt_notice(*doubt)])]


def _doubt(job: Job, gradient: Gradient, shown: Sequence[Reduction]) -> Doubt | None:
    assert gradient.conclusion is not None
    if job.reduction == "sum":  # which the user says, and which is wrong where penalties stand beside it
        found = conclude(gradient.sizes, shown).doubt if len(shown) == len(gradient.sizes) else None
        return found if found is PENALTIES else None
    has_ones = gradient.is_kept_from_none and any(map(is_one, gradient.reductions))
    return gradient.conclusion.doubt or (BY_ONE if has_ones else None)
