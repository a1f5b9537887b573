"""Decides by a measurement whether the micro-batches of a run may be weighted: by what their losses are taken for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.memory.oom import is_out_of_memory, without_frames
from autoaccum.verification.comparison import MOST_ROUNDING
from autoaccum.verification.draws import UnalignedError, UnsettledError
from autoaccum.verification.findings import Cut, Decision, NotFiniteError, Outcome, ZeroGradientError
from autoaccum.verification.floors import is_right_in_64_bits
from autoaccum.verification.measurement import Measurement
from autoaccum.window.gradient import are_alike
from autoaccum.window.job import Job


def decide(measurement: Measurement, smallest: int, likely: Hypothesis) -> Decision:
    """Measure what a loss is taken for, and the other of mean and sum where that is wrong.

    Where neither is right, and the loss of a sample by itself cannot be computed, both are measured once more on parts
    of at least two.

    Args:
        measurement: entered, and not yet run.
        smallest: the fewest samples of a part.
        likely: the hypothesis that comes first: the one that the run holds, or what its losses look like.

    Raises:
        ZeroGradientError: the gradient of the samples is 0.
        NotFiniteError: the loss of all samples is not finite.
        UnalignedError: what is drawn cannot be compared.
        UnsettledError: the same.
    """
    measurement.run_whole()
    decided = partial(_decided, measurement, likely=likely)
    decision = _on_parts(measurement, smallest, decided)
    if decision.passed or not measurement.has_draws:
        return decision
    # Rows may not be what they look like, as where a batch is made of two copies: a constant has no rows.
    try:
        measurement.with_constants()
        again = _on_parts(measurement, smallest, decided)
    except (UnalignedError, UnsettledError, ZeroGradientError, NotFiniteError):
        return decision
    return again if again.passed and not again.is_vacuous else decision


def _on_parts(measurement: Measurement, smallest: int, decided: Callable[[list[Cut]], Decision]) -> Decision:
    """Measure parts of any size, and larger ones where those of one sample cannot be computed."""
    cuts = measurement.cuts(smallest)
    try:
        return decided(cuts)
    except (UnalignedError, UnsettledError, ZeroGradientError):
        raise
    except Exception as error:  # of the user's code, on one sample perhaps
        wider = measurement.cuts(2) if smallest == 1 else []
        if not wider or is_out_of_memory(error):
            raise
        measurement.state.restore()
        without_frames(error)
    return replace(decided(wider), smallest=2)


def compare_losses(measurement: Measurement, smallest: int, hypothesis: Hypothesis) -> Decision:
    """Compare the losses of samples, whole and in cuts, by one hypothesis.

    Raises:
        UnsettledError: what is drawn cannot be compared.
    """

    def compared(cuts: list[Cut]) -> Decision:
        outcome = _measured(measurement, cuts, hypothesis)
        return Decision.of(outcome, passed=outcome.error <= measurement.tolerance)

    measurement.run_whole()
    return replace(_on_parts(measurement, smallest, compared), hides_draws=measurement.hides_draws)


def hypotheses(job: Job, likely: Hypothesis) -> list[Hypothesis]:
    """Return what is measured: what is likely, and the other of mean and sum where the user says nothing of it."""
    if job.num_items is not None or job.reduction is not None:
        return [likely]
    return [likely, "items" if likely == "sum" else "sum"]


def _decided(measurement: Measurement, cuts: list[Cut], likely: Hypothesis) -> Decision:
    """Measure hypotheses on some cuts until one passes."""
    tolerance = measurement.tolerance
    tried: list[Outcome] = []
    for hypothesis in hypotheses(measurement.job, likely):
        tried.append(_measured(measurement, cuts, hypothesis))
        if tried[-1].error <= tolerance:
            break
    best = min(tried, key=lambda outcome: math.inf if math.isnan(outcome.error) else outcome.error)

    def wide() -> float:
        return measurement.run(cuts, best.hypothesis).error

    # Long sums, as that of a convolution's bias over all places of all pictures, round by more than the tolerance.
    if tolerance < best.error < MOST_ROUNDING and is_right_in_64_bits(measurement, wide):
        tolerance = best.error
    if not best.error <= tolerance:
        best = tried[0]
    return Decision(
        hypothesis=best.hypothesis or "items",
        passed=best.error <= tolerance,
        error=best.error,
        tensor=best.tensor,
        errors=best.errors,
        cuts=tuple(cuts),
        outcomes=tuple(outcome for outcome in tried if outcome is not best),
        tensors=best.tensors,
        counts_samples=_counts_samples(measurement, cuts),
        is_vacuous=best.is_vacuous,
        hides_draws=measurement.hides_draws,
        is_foreign=measurement.draws_foreign,
    )


def _measured(measurement: Measurement, cuts: Sequence[Cut], hypothesis: Hypothesis) -> Outcome:
    """Measure one hypothesis: under the draws of the whole, or under constants where these cannot be found."""
    try:
        return measurement.run(cuts, hypothesis, stop_above=measurement.tolerance)
    except UnalignedError as error:
        try:
            measurement.with_constants()
            return measurement.run(cuts, hypothesis, stop_above=measurement.tolerance)
        except UnalignedError:  # a draw of the parts that the whole has not made
            raise UnsettledError(str(error)) from error


def _counts_samples(measurement: Measurement, cuts: Sequence[Cut]) -> bool:
    """Return whether graphs show of each part that it counts as many items as it has samples, but for a factor."""
    parts = [part for cut in cuts for part in cut if part in measurement.shown]
    shown = [measurement.shown[part] for part in parts]
    if not shown or any(term.kind == "unknown" for reduction in shown for term in reduction.terms):
        return False
    return are_alike([len(part) for part in parts], [float(reduction.items) for reduction in shown])
