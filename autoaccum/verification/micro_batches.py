"""Measures micro-batches of a window themselves: divided by 1, left out, and two of the largest joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from autoaccum.data.base import Window
from autoaccum.events import Notice
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.terms import without_none
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.verification import notices, readings
from autoaccum.verification.comparison import MAY_BE_ROUNDING, MOST_ROUNDING, tolerance_of
from autoaccum.verification.draws import UnsettledError
from autoaccum.verification.findings import FOREIGN, NotFiniteError
from autoaccum.verification.floors import is_right_in_64_bits
from autoaccum.verification.kinds import Kinds
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.samples import MOST
from autoaccum.window.gradient import Gradient, are_alike
from autoaccum.window.job import Job
from autoaccum.window.state import State

_MOST_PARTS = 3
"""Micro-batches of a window that are measured by themselves, for they were divided by 1, or left out."""

Found = tuple[Notice, float]
"""What is to be said, and the error that was measured."""


class MicroBatches:
    """Those of the windows of one run, weighed by the hypothesis that is held."""

    def __init__(self, job: Job, kinds: Kinds, drops_gradients: Callable[[], bool]) -> None:
        """Set up.

        Args:
            job: what the run computes.
            kinds: what is known of its batches.
            drops_gradients: returns whether what has no finite gradient is left out.
        """
        self.job = job
        """What is computed."""
        self._kinds = kinds
        self._drops_gradients = drops_gradients

    def ones(self, window: Window, gradient: Gradient, hypothesis: Hypothesis | None) -> Found | None:
        """Measure those whose count may stand for none: divided by 1, or by less than any that was measured."""
        if hypothesis not in ("items", "num_items"):
            return None
        pieces = readings.pieces(gradient)
        lowest = [pieces[index] for index in gradient.suspects]
        for piece in list(dict.fromkeys([*lowest, *readings.ones(gradient)]))[:_MOST_PARTS]:
            error = self._error_of(window, gradient, hypothesis, *piece)
            if error:
                return notices.ones_notice(error), error
        return None

    def dropped(self, window: Window, gradient: Gradient, hypothesis: Hypothesis) -> float | None:
        """Measure those that were left out, for their loss is not a number: do they count nothing?

        Returns:
            the largest error, 0 where there is none, infinite where the loss of the whole is not a number either; None
            where that cannot be measured.
        """
        pieces = [piece for piece in readings.pieces(gradient) if piece[0] in gradient.dropped]
        errors = [self._error_of(window, gradient, hypothesis, *piece) for piece in pieces[:_MOST_PARTS]]
        return max((error for error in errors if error is not None), default=None)

    def joined(
        self,
        window: Window,
        gradient: Gradient,
        hypothesis: Hypothesis | None,
        *,
        number: int,
        most: int,
        is_due: bool,
        suspicion: Callable[[], Notice | None],
        rewind: Callable[[], None],
        like: State | None,
    ) -> Found | None:
        """Measure two of the largest, joined and apart, when a measurement is due or they have grown.

        Args:
            window: the samples.
            gradient: that of the window.
            hypothesis: the one that is held.
            number: of the window; others are taken each time.
            most: samples that there is room for in a forward.
            is_due: whether a measurement is.
            suspicion: returns what the graphs say against the loss.
            rewind: puts the state back that the window began with.
            like: that state, as far as it is remembered.
        """
        largest = max(gradient.sizes)
        # The losses of a sum beside terms of the parameters alone add up to more than that of the whole.
        if not (is_due or largest > self._kinds.largest_joined) or hypothesis in (None, "sum and penalties"):
            return None
        if gradient.is_by_name:  # no one count is that of all losses
            return None
        counted = zip(readings.pieces(gradient), gradient.counts, strict=True)
        of_them = [(piece, count) for piece, count in counted if without_none(count) and 2 * piece[1] > largest]
        if len(of_them) < 2 or most < 2 * largest:
            return None
        # Of halves of one of them nothing is learnt that begins with its own size, such as the 16 hardest of a batch.
        self._kinds.accept_joined(largest)
        pair = [of_them[(number + index) % len(of_them)] for index in range(2)]
        # One that ends within a group, as a window may, has no other behind it.
        first, second = sorted(pair, key=lambda one: one[0][1] % self.job.batch_norm.group != 0)
        parts = tuple(range(start, start + size) for (start, size), _ in (first, second))
        error = measure_joined(
            self.job,
            window,
            hypothesis,
            (parts[0], parts[1]),
            (first[1], second[1]),
            rewind=rewind,
            like=like,
        )
        if not error:
            return None
        notice = notices.joined_notice(
            error,
            sum(map(len, parts)),
            suspicion(),
            counts_items=self.job.num_items is not None,
        )
        return notice, error

    def _error_of(
        self,
        window: Window,
        gradient: Gradient,
        hypothesis: Hypothesis,
        start: int,
        size: int,
    ) -> float | None:
        """Measure a micro-batch beside those that count."""
        counted = zip(gradient.counts, readings.pieces(gradient), strict=True)
        others = [(abs(count) / piece[1], *piece) for count, piece in counted if count and piece[0] != start]
        # Those first of which the most samples count.
        others.sort(key=lambda other: -other[0])
        return measure_part(
            self.job,
            window,
            hypothesis,
            range(start, start + size),
            [position for _, first, length in others for position in range(first, first + length)],
            drops_gradients=self._drops_gradients(),
        )


def measure_part(
    job: Job,
    window: Window,
    hypothesis: Hypothesis,
    part: Sequence[int],
    others: Sequence[int],
    *,
    drops_gradients: bool = False,
) -> float | None:
    """Measure a window's own micro-batch, beside a few more of its samples: are they weighed rightly together?

    Args:
        job: what the run computes.
        window: the samples.
        hypothesis: the one that is held.
        part: the positions of the micro-batch's samples.
        others: those of samples that have been seen to count; the first few of them are taken.
        drops_gradients: whether a part whose gradient is not finite is left out.

    Returns:
        the error, 0 where it is within the tolerance, infinite where the loss is finite without that micro-batch only;
        None where it cannot be measured.
    """
    # Those alone are run where all together have no finite loss: it may be their own fault, and tell nothing.
    # Not one or two, for it is not known which of them count; and a whole group, where there are groups.
    granule = job.batch_norm.group
    few = list(others)[: granule if granule > 1 else max(MOST, job.min_micro_batch)]
    if len(few) < max(granule, job.min_micro_batch):
        return None
    # The last micro-batch may hold less than a whole group: it comes last here too.
    first, second = (few, list(part)) if granule > 1 else (list(part), few)

    def measured(chosen: list[int]) -> float:
        with Measurement(job, window, chosen, drops_gradients=drops_gradients) as measurement:
            measurement.run_whole()
            if len(chosen) == len(few):
                return math.inf  # what is not finite is the fault of those that were left out here
            cut = (tuple(range(len(first))), tuple(range(len(first), len(chosen))))
            error, tolerance = measurement.run([cut], hypothesis).error, measurement.tolerance
            if error > tolerance and measurement.collates_anew():
                measurement.run_whole()
                error = measurement.run([cut], hypothesis).error
            if tolerance < error < MAY_BE_ROUNDING:  # as in ``decide``
                tolerance = max(tolerance, measurement.floor())
            if error > tolerance and measurement.draws_foreign:
                raise UnsettledError(FOREIGN)
            is_right = error <= tolerance or (
                error < MOST_ROUNDING and is_right_in_64_bits(measurement, [cut], hypothesis)
            )
            return 0.0 if is_right else error

    for chosen in ([*first, *second], few):
        try:
            outcome = attempt(partial(measured, chosen))
        except NotFiniteError:
            continue
        except Exception:  # what cannot be computed of these samples has been said, or will be
            break
        return None if isinstance(outcome, RanOut) else outcome
    return None


def measure_joined(
    job: Job,
    window: Window,
    hypothesis: Hypothesis,
    parts: tuple[Sequence[int], Sequence[int]],
    counts: tuple[float, float],
    *,
    rewind: Callable[[], None] = lambda: None,
    like: State | None = None,
) -> float | None:
    """Compare the losses of two of a window's micro-batches, joined and apart: what six samples show may be of few.

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
    sizes = float(len(parts[0])), float(len(parts[1]))
    weights, is_by_samples = (sizes if hypothesis == "samples" else counts), are_alike(sizes, counts)

    def measured() -> float:
        chosen = [*parts[0], *parts[1]]
        with Measurement(job, window, chosen, rewind=rewind, like=like, forward_only=True) as measurement:
            if measurement.is_divided_by_none():
                return 0.0  # of some term, which has no mean in these
            joined = partial(measurement.joined_error, len(parts[0]), weights, is_sum=hypothesis == "sum")
            tolerance = tolerance_of(measurement.parameters)
            error = joined()
            # What is drawn, in forwards or while samples are collated, may decide what counts, and was drawn otherwise
            # when it was counted.
            is_counted = hypothesis not in ("samples", "sum")
            if measurement.draws_anything and is_counted and not is_by_samples:
                return 0.0
            if error > tolerance and measurement.collates_anew():
                error = 0.0 if is_counted else joined()
            if error > tolerance and measurement.has_draws:  # as in ``decide``
                error = joined(has_constants=True)
            # The opposite order is another loss where it decides, as in which expert is full; then that is no rounding.
            is_rounded = tolerance < error < MAY_BE_ROUNDING and error < 10 * measurement.rounding()
            return error if error > tolerance and not is_rounded else 0.0

    try:
        outcome = attempt(measured)
    except Exception:  # what cannot be computed of so many samples at once, or without a graph
        return None
    return None if isinstance(outcome, RanOut) or math.isnan(outcome) else outcome
