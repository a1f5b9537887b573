"""Compares two of the largest micro-batches of a window, joined and apart: what six samples show may be of few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from autoaccum.data.base import Window
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.terms import without_none
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.verification import readings
from autoaccum.verification.comparison import MOST_ROUNDING, tolerance_of
from autoaccum.verification.floors import is_right_in_64_bits
from autoaccum.verification.measurement import Measurement
from autoaccum.window.gradient import Gradient, are_alike
from autoaccum.window.job import Job
from autoaccum.window.state import State


def pair_of(gradient: Gradient, number: int, most: int) -> list[tuple[range, float]] | None:
    """Choose two of a window's largest micro-batches; None where there are none that count, or no room for both.

    Args:
        gradient: of the window.
        number: of it; others are taken each time.
        most: samples that there is room for in a forward.

    Returns:
        the positions of the samples of each, and what it counts.
    """
    if gradient.is_by_name or not gradient.sizes:  # no one count is that of all losses
        return None
    largest = max(gradient.sizes)
    # Of halves of one of them nothing is learnt that begins with its own size, such as the 16 hardest of a batch.
    counted = zip(readings.pieces(gradient), gradient.counts, strict=True)
    of_them = [(piece, count) for piece, count in counted if without_none(count) and 2 * piece[1] > largest]
    if len(of_them) < 2 or most < 2 * largest:
        return None
    pair = [of_them[(number + index) % len(of_them)] for index in range(2)]
    return [(range(start, start + size), count) for (start, size), count in pair]


def measure_pair(
    job: Job,
    window: Window,
    hypothesis: Hypothesis,
    parts: Sequence[range],
    counts: Sequence[float],
    *,
    rewind: Callable[[], None] = lambda: None,
    like: State | None = None,
) -> float | None:
    """Compare the losses of two of a window's micro-batches, joined and apart.

    Args:
        job: what the run computes.
        window: the samples.
        hypothesis: the one that is held.
        parts: the positions of the samples of each.
        counts: what each was found to count.
        rewind: puts the state back that the window began with.
        like: that state, as far as it is remembered.

    Returns:
        the error, 0 where it is within the tolerance; None where it cannot be measured.
    """
    is_by_samples, is_sum = are_alike(list(map(len, parts)), counts), hypothesis == "sum"

    def measured() -> float:
        chosen = [*parts[0], *parts[1]]
        with Measurement(job, window, chosen, rewind=rewind, like=like, forward_only=True) as measurement:
            if measurement.is_divided_by_none():
                return 0.0  # of some term, which has no mean in these
            weights = counts[0], counts[1]
            joined = partial(measurement.joined_error, len(parts[0]), weights, is_sum=is_sum)
            tolerance = tolerance_of(measurement.parameters)
            error = joined()
            # What is drawn, in forwards or while samples are collated, may decide what counts, and was drawn otherwise
            # when it was counted.
            if measurement.draws_anything and not is_sum and not is_by_samples:
                return 0.0
            if error > tolerance and measurement.collates_anew():
                error = joined() if is_sum else 0.0
            if error > tolerance and measurement.has_draws:  # as in ``decide``
                error = joined(has_constants=True)
            is_rounded = tolerance < error < MOST_ROUNDING and is_right_in_64_bits(measurement, joined)
            return error if error > tolerance and not is_rounded else 0.0

    try:
        outcome = attempt(measured)
    except Exception:  # what cannot be computed of so many samples at once, or without a graph
        return None
    return None if isinstance(outcome, RanOut) or math.isnan(outcome) else outcome
