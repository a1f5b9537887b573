"""Reads what the graphs of a window's losses say of it: what they propose, and what speaks against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from autoaccum.events import Notice
from autoaccum.loss.coupling import Crossing, couples_samples
from autoaccum.loss.hypotheses import SUMS, Hypothesis
from autoaccum.loss.reductions import is_one
from autoaccum.loss.terms import Reduction
from autoaccum.verification import notices
from autoaccum.window.gradient import Gradient, are_alike
from autoaccum.window.job import Job

Met = Sequence[tuple[int, set[Crossing]]]
"""Of each micro-batch, its samples, and by which operations they meet."""


def likely(job: Job, gradient: Gradient) -> Hypothesis:
    """Return what a window looks like that nothing was measured of."""
    if job.num_items is not None:
        return "num_items"
    if gradient.conclusion is None or not gradient.conclusion.is_sum:
        return "items"
    return "sum and penalties" if any(reduction.constants for reduction in gradient.reductions) else "sum"


def is_weighed_alike(job: Job, gradient: Gradient, before: Hypothesis | None, after: Hypothesis | None) -> bool:
    """Return whether another hypothesis would weigh a window as the one did by which it was run."""
    found = gradient.conclusion
    if before == after or found is None:
        return True
    if before is not None or after == "num_items":
        return before is None
    if after in SUMS:
        with_terms = any(reduction.constants for reduction in gradient.reductions)
        return found.is_sum and job.num_items is None and (after == "sum and penalties" or not with_terms)
    if after == "items":
        return not found.is_sum and job.num_items is None
    return not found.is_sum and are_alike(gradient.sizes, gradient.counts)  # 0 where something was left out


def claims(gradient: Gradient) -> list[float]:
    """Return what each micro-batch counts, by the user or by its graph."""
    return [float(reduction.items) for reduction in gradient.reductions]


def is_guessed(gradient: Gradient, rivals: Collection[str]) -> bool:
    """Return whether the graphs of micro-batches do not tell what they count, so that samples stand for it.

    It is no matter where samples were measured to do as well, or where all count like samples.
    """
    known = set()
    for reduction in gradient.reductions:
        if reduction.terms:
            known.add(any(term.kind != "unknown" or term.numbers for term in reduction.terms))
    if known == {False}:
        return "samples" not in rivals
    return len(known) > 1 and not are_alike(gradient.sizes, claims(gradient))


def is_hidden(gradient: Gradient, hypothesis: Hypothesis | None, rivals: Collection[str]) -> bool:
    """Return whether micro-batches count items that cannot be read off them because their loss was compiled."""
    # By these no reading decides on a weight.
    if hypothesis in (None, "num_items", "samples", "sum") or "samples" in rivals:
        return False
    return any(term.is_compiled for reduction in gradient.reductions for term in reduction.terms)


def ones(gradient: Gradient) -> list[tuple[int, int]]:
    """Return (start, samples) of the micro-batches that were divided by 1: those that were left out for that, too."""
    found = zip(pieces(gradient), gradient.reductions, strict=True)
    return [piece for piece, reduction in found if is_one(reduction)]


def pieces(gradient: Gradient) -> list[tuple[int, int]]:
    """Return (start, samples) of each micro-batch."""
    starts = accumulate(gradient.sizes, initial=0)
    return list(zip(starts, gradient.sizes, strict=False))


def suspicion(job: Job, met: Met, shown: Sequence[Reduction]) -> Notice | None:
    """Return what the graphs say against a loss that was measured not to add up; None where they say nothing."""
    if couples_samples(met):
        return notices.coupling_notice()
    # What its graph does not tell, the user has told.
    return None if job.num_items is not None else notices.doubt_of([size for size, _ in met], shown)


def doubts(job: Job, gradient: Gradient, met: Met, shown: Sequence[Reduction]) -> list[Notice]:
    """Return why the gradient may not be that of the window, as far as that can be read, where nothing was measured."""
    found = gradient.conclusion
    if found is None:
        return []
    # Of groups, and of running statistics, nothing depends on how windows are cut.
    said = notices.batch_norm_notices(job.modules) if job.batch_norm.kind == "micro" else []
    if couples_samples(met):  # no count makes it exact
        return [*said, notices.coupling_notice()]
    if job.num_items is not None:
        # What the user says is compared with what the losses show, of every micro-batch or not at all.
        if len(shown) == len(gradient.sizes) and not (job.divides or gradient.is_by_name):
            # A count of 0 is no contradiction to one that was kept from 0.
            claimed = claims(gradient)
            rows = [row for row in zip(claimed, gradient.sizes, shown, strict=True) if row[0] or not is_one(row[2])]
            counts, sizes, reductions = zip(*rows, strict=True) if rows else ((), (), ())
            notice = notices.contradiction_notice(counts, sizes, reductions) if rows else None
            said.extend([] if notice is None else [notice])
        return said
    if found.doubt is not None:
        said.append(notices.doubt_notice(*found.doubt))
    return said
