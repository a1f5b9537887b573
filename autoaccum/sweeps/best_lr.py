"""The best learning rate of each effective batch, and how it grows with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoaccum.reporting.answers import Answer

_VAGUE = 0.25
"""Call an exponent uncertain above this standard error: half of the 0.5 that lies between the square-root rule and the
linear one, so that both are as likely."""
_APART = math.log(2) / 4
"""Fit nothing to learning rates that are nearer to each other in logarithms: a quarter of an octave, in which a loss
differs by luck sooner than by lr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestLr:
    """The best learning rate at one effective batch, or in an octave of them."""

    effective_batch: int
    lr: float
    num_trials: int
    """Number of finished trials there, those that were ended early included."""
    is_edge: bool
    """True if none was larger there, or none smaller: the best may lie beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A power law, lr = factor * effective_batch ** exponent, fitted by least squares in logarithms."""

    exponent: float
    error: float | None
    """Standard error of the exponent; None for two points, through which the line passes whatever they are."""
    factor: float


def best_lrs_of(tried: Sequence[tuple[int, float, float | None]], *, by_octave: bool) -> tuple[BestLr, ...]:
    """Return the lr of the best value, for each effective batch at which two were tried, and one of them to the end.

    If others on both sides of it came to the end, it is the vertex of the parabola through the three in log lr, which
    is nearer to it than to either: the step of a grid would be read for a law otherwise. Where the three do not bear
    one out, it is the lr that was tried.

    Args:
        tried: (effective batch, lr, value) of each trial, the lowest value the best: of what is maximised its negative;
            None where the trial was ended before.
        by_octave: effective batches within a factor of two, about a power of it, are taken together.
    """
    # By the effective batch, or by its octave's number.
    groups: dict[int, list[tuple[int, float, float | None]]] = {}
    for trial in tried:
        groups.setdefault(round(math.log2(trial[0])) if by_octave else trial[0], []).append(trial)
    found = []
    for _, group in sorted(groups.items()):
        # By lr its lowest value, and the effective batch of that. Two points of one lr would make an interval of no
        # length, through which no parabola passes.
        lowest: dict[float, tuple[float, int]] = {}
        for batch, lr, value in group:
            if value is not None and math.isfinite(value):
                lowest[lr] = min(lowest.get(lr, (math.inf, batch)), (value, batch))
        lrs = {lr for _, lr, _ in group}  # those of trials that were ended too: it is known that they were no better
        if not lowest or len(lrs) < 2:
            continue
        best, complete = min(lowest, key=lambda lr: lowest[lr]), sorted(lowest)
        at = complete.index(best)
        # The best and its two neighbours; fewer where it is the first or the last of those that came to the end.
        around = [(lr, lowest[lr][0]) for lr in complete[at - 1 : at + 2]] if at > 0 else []
        found.append(
            BestLr(
                effective_batch=lowest[best][1],
                lr=_vertex(around) if len(around) == 3 else best,
                num_trials=len(group),
                is_edge=best in (min(lrs), max(lrs)),
            )
        )
    return tuple(found)


def _vertex(points: Sequence[tuple[float, float]]) -> float:
    """Return where a parabola through three points in log lr has its vertex, or the middle point, which is the lowest.

    It is the middle one where another is nearly as large, and where the vertex lies further below it than by half of
    what the three differ by.
    """
    # Parabolic interpolation (Brent 1973, Algorithms for Minimization without Derivatives, chapter 5): with p = below
    # and q = above it is x1 - ((x1 - x0) p - (x2 - x1) q) / (2 (p + q)).
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(lr), value) for lr, value in points)
    below, above = (x1 - x0) * (y2 - y1), (x2 - x1) * (y0 - y1)
    # All three are alike, a parabola without a vertex; or two of them are at one place, but for their luck.
    if not below + above or min(x1 - x0, x2 - x1) < _APART:
        return points[1][0]
    # Neither is negative, so this lies between the middles of the two intervals.
    x = x1 - 0.5 * ((x1 - x0) * below - (x2 - x1) * above) / (below + above)
    # A third at most if one interval is twice the other. Further below all that was seen it comes of a steep rise
    # between two that are near to each other, which is luck.
    depth = (below + above) / ((x1 - x0) * (x2 - x1) * (x2 - x0)) * (x - x1) ** 2
    return math.exp(x) if 2 * depth <= max(y0, y2) - y1 else points[1][0]


def growth_of(best_lrs: Sequence[BestLr]) -> Growth | None:
    """Fit how the best lr grows with the effective batch; return None without two different ones."""
    x = np.log([best.effective_batch for best in best_lrs])
    y = np.log([best.lr for best in best_lrs])
    if len(set(x.tolist())) < 2:
        return None
    centred = x - x.mean()
    spread = float(centred @ centred)
    exponent = float(centred @ y) / spread
    error = None
    if len(x) > 2:  # sqrt(sum of squared residuals / (n - 2) / sum of squares of x), the textbook's
        off = y - y.mean() - exponent * centred
        error = math.sqrt(float(off @ off) / (len(x) - 2) / spread)
    return Growth(exponent=exponent, error=error, factor=math.exp(float(y.mean()) - exponent * float(x.mean())))


def growth_answer(best_lrs: Sequence[BestLr], growth: Growth | None) -> Answer:
    """Put it in a sentence or two."""
    question = "How does the best lr grow with the effective batch?"
    if growth is None:
        text = "It takes two effective batches with two learning rates each, one of them tried to the end."
        return Answer(question=question, text=text, good=None)
    error = "" if growth.error is None else f" ± {growth.error:.2f}"
    batches = [best.effective_batch for best in best_lrs]
    text = (
        f"As its power {growth.exponent:z.2f}{error}, over {len(best_lrs)} effective batches from {min(batches):,} to "
        f"{max(batches):,}; the square-root rule says 0.5, the linear one 1."
    )
    if edges := sum(best.is_edge for best in best_lrs):
        text += (
            f" At {edges} of them the best lr is the largest or the smallest that was tried there, and may lie beyond."
        )
    if growth.error is not None and growth.error > _VAGUE:
        text += " That is too uncertain to tell them apart."
    if growth.error is None:
        text += " Through two points any power fits."
    return Answer(question=question, text=text, good=None)
