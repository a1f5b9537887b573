"""Decides by a measurement what the windows of a run are made of: the first hypothesis that passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from autoaccum.loss.conclusions import conclude
from autoaccum.loss.hypotheses import Hypothesis, is_stated
from autoaccum.loss.reductions import is_one
from autoaccum.loss.terms import Reduction
from autoaccum.memory.oom import is_out_of_memory, without_frames
from autoaccum.verification.comparison import MAY_BE_ROUNDING, MOST_ROUNDING
from autoaccum.verification.draws import UnalignedError, UnsettledError
from autoaccum.verification.findings import Cut, Decision, NotFiniteError, Outcome, ZeroGradientError
from autoaccum.verification.floors import is_right_in_64_bits
from autoaccum.verification.measurement import Measurement

Rival = Literal["num_items", "items", "samples"]


def decide(measurement: Measurement, smallest: int, likely: Hypothesis) -> Decision:
    """Measure hypotheses in their order until one passes.

    Where none does, and the loss of a sample by itself cannot be computed, all of them are measured once more on parts
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
    decision = _decided_on_parts(measurement, smallest, likely)
    if decision.passed or not measurement.has_draws:
        return decision
    # Rows may not be what they look like, as where a batch is made of two copies: a constant has no rows.
    try:
        measurement.with_constants()
        again = _decided_on_parts(measurement, smallest, likely)
    except (UnalignedError, UnsettledError, ZeroGradientError, NotFiniteError):
        return decision
    return again if again.passed and not again.is_vacuous else decision


def _decided_on_parts(measurement: Measurement, smallest: int, likely: Hypothesis) -> Decision:
    """Measure hypotheses on parts of any size, and on larger ones where those of one sample cannot be computed."""
    cuts = measurement.cuts(smallest)
    wider = measurement.cuts(2) if smallest == 1 else []
    refused: Exception | None = None
    try:
        decision = _decided(measurement, cuts, likely)
        if decision.passed:
            return decision
    except (UnalignedError, UnsettledError, ZeroGradientError):
        raise
    except Exception as error:  # of the user's code, on one sample perhaps
        if not wider or is_out_of_memory(error):
            raise
        measurement.state.restore()
        refused = without_frames(error)
    if not wider or (refused is None and not measurement.dropped):
        # What a part counts that was divided by 1 its graph does not tell; windows that hold such parts are joined.
        has_ones = any(map(is_one, measurement.shown.values()))
        cuts = _cuts_without_ones(measurement, smallest) if has_ones else []
        return _decided(measurement, cuts, likely) if cuts else decision
    of_pairs = _decided(measurement, wider, likely)
    # Where single samples were left out, for their loss is not a number, that was no fault if pairs fail alike.
    if refused is not None or (of_pairs.passed and not of_pairs.is_vacuous):
        return replace(of_pairs, smallest=2)
    return replace(decision, smallest=2)


def compare_losses(measurement: Measurement, smallest: int, hypothesis: Hypothesis) -> Decision:
    """Compare the losses of samples, whole and in one cut, by one hypothesis.

    Raises:
        UnsettledError: what is drawn cannot be compared.
    """
    measurement.run_whole()
    outcome = _measured(measurement, measurement.cuts(smallest)[:1], hypothesis)
    return Decision.of(outcome, passed=outcome.error <= measurement.tolerance)


def _cuts_without_ones(measurement: Measurement, smallest: int) -> list[Cut]:
    """Return at most two cuts into two parts, none of which is divided by 1."""
    count, granule = measurement.num_samples, measurement.job.batch_norm.group
    cuts: list[Cut] = []
    for first in range(0, count, granule):
        for few in range(max(2, smallest), count - max(2, smallest) + 1, granule):
            order = [(first + index) % count for index in range(count)]
            cut = (tuple(order[:few]), tuple(order[few:]))
            if len(cuts) < 2 and not any(is_one(measurement.shown_of(part)) for part in cut):
                cuts.append(cut)
    return cuts


def _decided(measurement: Measurement, cuts: list[Cut], likely: Hypothesis) -> Decision:
    """Measure hypotheses on some cuts until one passes."""
    tolerance = measurement.tolerance
    tried: list[Outcome] = []
    order, contradicting, contradiction = [likely], list[Hypothesis](), None
    while order:
        hypothesis = order.pop(0)
        outcome = _measured(measurement, cuts, hypothesis)
        tried.append(outcome)
        if outcome.error <= tolerance and is_stated(hypothesis, measurement.job.reduction):
            break
        if len(tried) == 1:  # what the graphs of parts show is known when they have been run, by whatever hypothesis
            others = [other for other in _order(measurement, cuts) if other != hypothesis]
            order = [other for other in others if is_stated(other, measurement.job.reduction)]
            contradicting = [other for other in (likely, *others) if other not in (*order, hypothesis)]
    # What the user says of the loss is not put aside for what passes beside it: that is told.
    stated = [outcome for outcome in tried if is_stated(outcome.hypothesis or "items", measurement.job.reduction)]
    if measurement.job.reduction is not None and not any(outcome.error <= tolerance for outcome in stated):
        rest = (_measured(measurement, cuts, other) for other in contradicting)
        unstated = [outcome for outcome in tried if outcome not in stated]
        passing = next((outcome for outcome in (*unstated, *rest) if outcome.error <= tolerance), None)
        contradiction, tried = (None if passing is None else passing.hypothesis), stated or tried
    best = min(tried, key=lambda outcome: math.inf if math.isnan(outcome.error) else outcome.error)
    if tolerance < best.error < MAY_BE_ROUNDING:
        tolerance = max(tolerance, measurement.floor())
    # Long sums, as that of a convolution's bias over all places of all pictures, round by more than turned bits.
    if tolerance < best.error < MOST_ROUNDING and is_right_in_64_bits(measurement, cuts, best.hypothesis):
        tolerance = best.error
    if not best.error <= tolerance:
        best = tried[0]  # a few samples do not tell which of several wrong ones is the least wrong for a window
    return Decision(
        hypothesis=best.hypothesis or "items",
        passed=best.error <= tolerance,
        error=best.error,
        tensor=best.tensor,
        errors=best.errors,
        cuts=tuple(cuts),
        outcomes=tuple(outcome for outcome in tried if outcome is not best),
        rivals=_rivals(measurement, cuts, best.hypothesis) if best.error <= tolerance else frozenset(),
        is_vacuous=best.is_vacuous,
        is_foreign=measurement.draws_foreign,
        contradiction=contradiction,
    )


def _measured(measurement: Measurement, cuts: list[Cut], hypothesis: Hypothesis) -> Outcome:
    """Measure one hypothesis: under the draws of the whole, or under constants where these cannot be found."""
    try:
        return measurement.run(cuts, hypothesis, stop_above=measurement.tolerance)
    except UnalignedError as error:
        try:
            measurement.with_constants()
            return measurement.run(cuts, hypothesis, stop_above=measurement.tolerance)
        except UnalignedError:  # a draw of the parts that the whole has not made
            raise UnsettledError(str(error)) from error


def _order(measurement: Measurement, cuts: list[Cut]) -> list[Hypothesis]:
    shown = [(len(part), measurement.shown[part]) for part in cuts[0] if part in measurement.shown]
    sizes, reductions = [size for size, _ in shown], [reduction for _, reduction in shown]
    return in_order(sizes, reductions, counts_items=measurement.job.num_items is not None)


def _rivals(measurement: Measurement, cuts: list[Cut], held: Hypothesis | None) -> frozenset[str]:
    """Return the other means that weigh the parts of every cut as the one that is held."""
    counts_of: dict[str, list[float]] = {}
    parts = [part for cut in cuts for part in cut]
    counts_of["samples"] = [float(len(part)) for part in parts]
    if all(part in measurement.shown for part in parts):
        counts_of["items"] = [float(measurement.shown[part].items) for part in parts]
    if measurement.counted and all(part in measurement.counted for part in parts):
        counts_of["num_items"] = [measurement.counted[part] for part in parts]
    if held not in counts_of:
        return frozenset()
    mine = counts_of.pop(held)
    return frozenset(name for name, counts in counts_of.items() if _are_proportional(cuts, mine, counts))


def _are_proportional(cuts: list[Cut], mine: list[float], other: list[float]) -> bool:
    start = 0
    for cut in cuts:
        stop = start + len(cut)
        first, second = mine[start:stop], other[start:stop]
        total, sum_of_other = sum(first), sum(second)
        for a, b in zip(first, second, strict=True):
            if not math.isclose(a * sum_of_other, b * total, rel_tol=1e-6, abs_tol=1e-12):
                return False
        start = stop
    return True


def in_order(sizes: Sequence[int], reductions: Sequence[Reduction], *, counts_items: bool) -> list[Hypothesis]:
    """List the hypotheses in the order in which they are to be measured: what is likely first.

    Args:
        sizes: samples of some micro-batches.
        reductions: what the graph of each one's loss shows.
        counts_items: whether the user counts items.
    """
    # What the graph proposes comes before what it does not, so that most runs measure one hypothesis only.
    sums: list[Hypothesis] = ["sum"]
    if any(reduction.constants for reduction in reductions):
        sums = ["sum and penalties", "sum"]
    means: list[Hypothesis] = ["items", "samples"]
    found = [*sums, *means] if bool(reductions) and conclude(sizes, reductions).is_sum else [*means, *sums]
    return ["num_items", *found] if counts_items else found
