"""The best learning rate of each effective batch, and how it grows with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoaccum.reporting.facts import Answer

_VAGUE = 0.25
"""Half of what lies between the two rules: a larger standard error leaves both as likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestLr:
    """The best learning rate at one effective batch, or in an octave of them."""

    effective_batch: int
    lr: float
    num_trials: int
    """Finished ones there."""
    is_edge: bool
    """Whether none was larger there, or none smaller: the best may lie beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """lr = factor * effective_batch ** exponent, by least squares in logarithms."""

    exponent: float
    error: float | None
    """Standard error of the exponent; None for two points, through which the line passes."""
    factor: float


def best_lrs_of(tried: Sequence[tuple[int, float, float | None]], *, by_octave: bool) -> tuple[BestLr, ...]:
    """Where at least two learning rates were tried, and one to the end: the lr of the best value.

    If others on both sides of it came to the end, it is the vertex of the parabola through the three in log lr, which
    is nearer to it than to either: the step of a grid would be read for a law otherwise.

    Args:
        tried: (effective batch, lr, value) of each trial, the lowest value the best: of what is maximised its negative;
            None where the trial was ended before.
        by_octave: effective batches within a factor of two, about a power of it, are taken together.
    """
    groups: dict[int, list[tuple[int, float, float | None]]] = {}
    for trial in tried:
        groups.setdefault(round(math.log2(trial[0])) if by_octave else trial[0], []).append(trial)
    found = []
    for _, group in sorted(groups.items()):
        # Of the same lr the better one, else the interval to the other would have no length.
        lowest: dict[float, tuple[float, int]] = {}
        for batch, lr, value in group:
            if value is not None and math.isfinite(value):
                lowest[lr] = min(lowest.get(lr, (math.inf, batch)), (value, batch))
        lrs = {lr for _, lr, _ in group}
        if not lowest or len(lrs) < 2:
            continue
        best, complete = min(lowest, key=lambda lr: lowest[lr]), sorted(lowest)
        at = complete.index(best)
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
    """Of a parabola through three points in log lr, the middle one the lowest."""
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(lr), value) for lr, value in points)
    below, above = (x1 - x0) * (y2 - y1), (x2 - x1) * (y0 - y1)
    if not below + above:
        return points[1][0]
    # Neither is negative, so this lies between the middles of the two intervals.
    return math.exp(x1 - 0.5 * ((x1 - x0) * below - (x2 - x1) * above) / (below + above))


def growth_of(best_lrs: Sequence[BestLr]) -> Growth | None:
    """How the best lr grows with the effective batch; None without two of these."""
    x = np.log([best.effective_batch for best in best_lrs])
    y = np.log([best.lr for best in best_lrs])
    if len(set(x.tolist())) < 2:
        return None
    centred = x - x.mean()
    spread = float(centred @ centred)
    exponent = float(centred @ y) / spread
    error = None
    if len(x) > 2:
        off = y - y.mean() - exponent * centred
        error = math.sqrt(float(off @ off) / (len(x) - 2) / spread)
    return Growth(exponent=exponent, error=error, factor=math.exp(float(y.mean()) - exponent * float(x.mean())))


def growth_answer(best_lrs: Sequence[BestLr], growth: Growth | None) -> Answer:
    """In a sentence or two."""
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
