"""Measures on a few samples whether weighted micro-batches have the gradient of the full batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from autoaccum.data.base import Window
from autoaccum.data.randomness import collated_otherwise
from autoaccum.errors import AutoaccumError, MemoryLimitError
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory, without_frames
from autoaccum.step.findings import FOREIGN, Cut, Decision, NotFiniteError, Outcome, Verdict, ZeroGradientError
from autoaccum.step.gradient import are_alike
from autoaccum.step.job import Job
from autoaccum.step.measured_samples import MOST, are_equal, choose, cuts_of, shapes_of
from autoaccum.step.measurement import Measurement
from autoaccum.step.module_state import smallest_micro_batch
from autoaccum.step.rng_replay import UnalignedError, UnsettledError
from autoaccum.step.rounding import MOST_ROUNDING, is_right_in_64_bits, tolerance_of
from autoaccum.step.snapshot import State
from autoaccum.step.terms import Hypothesis


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


def compare_losses(
    measurement: Measurement, smallest: int, hypothesis: Hypothesis, pair: tuple[range, range] | None = None
) -> Decision:
    """Compare the losses of samples, whole and in cuts or as a pair of micro-batches, by one hypothesis.

    Raises:
        UnsettledError: what is drawn cannot be compared.
    """

    def compared(cuts: list[Cut]) -> Decision:
        outcome = _measure_hypothesis(measurement, cuts, hypothesis)
        return Decision.of(outcome, passed=outcome.error <= measurement.tolerance)

    def compared_pair(cut: Cut) -> Decision:
        # A failure is final here, while that of a few samples is only why gradients are compared.
        outcome = _measure_hypothesis(measurement, [cut], hypothesis)
        tolerance = tolerance_of(measurement.parameters)

        def wide() -> float:
            return measurement.run([cut], hypothesis).error

        passed = outcome.error <= tolerance or (
            outcome.error < MOST_ROUNDING and is_right_in_64_bits(measurement, wide)
        )
        return replace(Decision.of(outcome, passed=passed), cuts=(cut,))

    measurement.run_whole()
    if pair is None:
        return replace(_on_parts(measurement, smallest, compared), hides_draws=measurement.hides_draws)
    first = len(pair[0])
    cut = tuple(range(first)), tuple(range(first, measurement.num_samples))
    decision = compared_pair(cut)
    if decision.passed or not measurement.has_draws:
        return decision
    measurement.with_constants()  # as in ``decide``
    return compared_pair(cut)


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
        tried.append(_measure_hypothesis(measurement, cuts, hypothesis))
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


def _measure_hypothesis(measurement: Measurement, cuts: Sequence[Cut], hypothesis: Hypothesis) -> Outcome:
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


_FEW = 3
"""Samples that are measured where there is no memory for all."""
_GROUPS = 3
"""Groups of samples of a window: gradients are compared on the first, losses on the others."""
_COINS = 4
"""Seeds by which the first samples draw once more, where something is drawn for all of them together."""
_ROUNDING = 0.1
"""Errors up to which gradients of 16 bits may be wrong, or no more than rounded: right ones are seen at 0.01."""


def measure(
    job: Job,
    window: Window,
    likely: Hypothesis,
    *,
    most: int,
    written: Iterable[torch.Tensor] = (),
    rewind: Callable[[], None] = lambda: None,
    like: State | None = None,
    forward_only: bool = False,
    pair: tuple[range, range] | None = None,
) -> Verdict:
    """Measure some samples of a window; of that nothing remains.

    Args:
        job: what the run computes.
        window: the samples.
        likely: the hypothesis that is measured first.
        most: samples that there is room for at once.
        written: parameters that forwards have been seen to write to.
        rewind: puts the state back that the window began with.
        like: that state, as far as it is remembered.
        forward_only: compare losses alone, by that hypothesis alone.
        pair: positions of two micro-batches whose losses are compared with that of both; None for a few samples.
    """
    smallest = max(smallest_micro_batch(job.modules), job.min_micro_batch)
    make = partial(Measurement, job, window, written=list(written), rewind=rewind, like=like)
    if pair is not None:
        found = attempt(partial(_measured_of, [*pair[0], *pair[1]], likely, True, smallest=1, make=make, pair=pair))
        return found if isinstance(found, Verdict) else Verdict(unmeasured="memory ran out in the attempt")
    why = "there is not enough memory for three samples at once"
    # Three parts of the smallest size that there may be, two of them where there is no room for more.
    for count in (MOST, _FEW, 2) if smallest < 3 else (3 * smallest, 2 * smallest):
        count = min(count, window.num_samples, most)
        if not cuts_of(count, smallest):
            if not cuts_of(window.num_samples, smallest):  # a larger window will tell
                return Verdict(unmeasured=f"it has no two parts of at least {smallest}", is_passing=True)
            why = f"there is no room for two parts of at least {smallest} at once"
            continue
        run = partial(_measured, job, window, likely, count, smallest, make, forward_only)
        outcome = attempt(run)
        if isinstance(outcome, Verdict):
            return outcome
        why = "memory ran out in the attempt"
    return Verdict(unmeasured=why, ran_out=True)


def _measured(
    job: Job,
    window: Window,
    likely: Hypothesis,
    count: int,
    smallest: int,
    make: Callable[..., Measurement],
    forward_only: bool,
) -> Verdict | RanOut:
    """Measure so many samples; where they have passed, or tell nothing, ask others too."""
    measured = partial(_measured_of, smallest=smallest, make=make)
    groups = _groups(job, window, count)
    first = next(groups)
    found = measured(first, likely, forward_only)
    for seed, others in enumerate(groups, 1):
        if isinstance(found, RanOut):
            break
        if found.decision is None:
            found = measured(others, likely, forward_only, seed=seed) if found.is_passing else found
        elif found.decision.passed and not forward_only:
            # A term of the loss may be 0 for those few: then these have to show what it adds up to.
            found = _upheld(found, others, found.decision.hypothesis, partial(measured, seed=seed))
    for seed in range(_GROUPS, _GROUPS + _COINS):
        if isinstance(found, RanOut) or not found.draws_once or forward_only:
            break
        # What is drawn once for all samples may be a coin: whether they are mixed, say.
        if found.decision is not None and found.decision.passed:
            found = _upheld(found, first, found.decision.hypothesis, partial(measured, seed=seed))
    return found


def _groups(job: Job, window: Window, count: int) -> Iterator[list[int]]:
    """Choose samples, and then others, until all have been chosen."""
    seen: dict[int, None] = {}
    for _ in range(_GROUPS):
        if len(seen) < window.num_samples:
            # Samples are collated to be looked at, by what may have a generator of its own.
            kept = State((), (job.collate_fn,), job.device, ())
            chosen = choose(window, window.num_samples, count, list(seen))
            kept.restore()
            seen.update(dict.fromkeys(chosen))
            yield chosen


def _upheld(
    found: Verdict, others: Sequence[int], held: Hypothesis, measured: Callable[..., Verdict | RanOut]
) -> Verdict | RanOut:
    """Return what was found, unless the losses of other samples, and then their gradients, speak against it."""
    compared = measured(others, held, True)
    if isinstance(compared, RanOut) or compared.decision is None:
        return found
    if compared.decision.passed:
        assert found.decision is not None
        hides_draws = found.decision.hides_draws or compared.decision.hides_draws
        return replace(found, decision=replace(found.decision, hides_draws=hides_draws))
    again = measured(others, held, False)
    if isinstance(again, RanOut) or again.decision is None:
        return found
    if not again.decision.passed:
        return again
    # Some samples pass by the one only, others by the other.
    failed = _failed(again.decision, held)
    return found if failed is None else replace(again, decision=failed)


def _mixes(measurement: Measurement) -> bool:
    """Return whether a collate_fn mixes samples, as far as its batches can be told apart into rows."""
    try:
        return _is_mixed(measurement)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        measurement.state.restore()
        return False


def _is_mixed(measurement: Measurement) -> bool:
    """Return whether the batch that samples are collated to holds another first row where the others change places."""
    others = list(range(1, measurement.num_samples))
    for way in range(1, 4):  # what is drawn may mix the first sample with itself
        made = []
        for order in ((0, *others), (0, *others[1:], *others[:1]), (0, *others)):
            measurement.state.restore()  # generators that a collate_fn keeps too
            with collated_otherwise(way):
                made.append(measurement.make(order))
        measurement.state.restore()
        if not are_equal(made[0], made.pop()):  # it draws by what nobody can put back
            return False
        first, second = (
            [measurement.parts.rows(batch, (index,)) for index in range(len(others) + 1)] for batch in made
        )
        # One that sorts samples has the same rows at other places, and one that draws lengths pads otherwise.
        if shapes_of(first[0]) == shapes_of(second[0]) and not any(are_equal(row, second[0]) for row in first):
            return True
    return False


def _failed(decision: Decision, hypothesis: Hypothesis) -> Decision | None:
    """Return what was measured of a hypothesis that has failed where another one has passed; None where it was not."""
    outcomes = [outcome for outcome in decision.outcomes if outcome.hypothesis == hypothesis]
    return replace(Decision.of(outcomes[0], passed=False), cuts=decision.cuts) if outcomes else None


def _measured_of(
    chosen: Sequence[int],
    likely: Hypothesis,
    forward_only: bool,
    *,
    smallest: int,
    make: Callable[..., Measurement],
    seed: int = 0,
    pair: tuple[range, range] | None = None,
) -> Verdict | RanOut:
    """Measure these samples, in three cuts or as that pair; they draw by a seed of that number."""
    measurement = make(chosen, forward_only=forward_only, seed=seed)
    try:
        with measurement:
            if forward_only:
                compare = partial(compare_losses, measurement, smallest, likely, pair)
                decision = compare()
                if not decision.passed and measurement.collates_anew():
                    decision = compare()
                return Verdict(decision=decision, chosen=tuple(chosen), tolerance=measurement.tolerance)
            decision = decide(measurement, smallest, likely)
            # What mixes samples is no augmentation of each, and not the same for a part as for the whole.
            is_mixed = not decision.passed and _mixes(measurement)
            if collates_anew := not decision.passed and not is_mixed and measurement.collates_anew():
                decision = decide(measurement, smallest, likely)
            if decision.passed and decision.is_vacuous:
                # Nothing passes by more than chance; what fails does not do so by chance.
                return Verdict(
                    unmeasured="fewer than two of a few samples count",
                    is_passing=True,
                    failed=_failed(decision, likely),
                    chosen=tuple(chosen),
                    tolerance=measurement.tolerance,
                )
            if not decision.passed:
                if measurement.is_rounded and decision.error < _ROUNDING:
                    return Verdict(unmeasured="its parameters have 16 bits, whose rounding hides what is looked for")
                # What Python's or NumPy's generator draws differs in each part, and nothing says by how much.
                if decision.is_foreign:
                    return Verdict(unmeasured=FOREIGN)
            return Verdict(
                decision=decision,
                chosen=tuple(chosen),
                tolerance=max(measurement.tolerance, decision.error) if decision.passed else measurement.tolerance,
                trained=frozenset(measurement.trained),
                left=tuple(measurement.left),
                draws_once=measurement.draws_once,
                collates_anew=collates_anew,
                mixes=is_mixed,
            )
    except NotFiniteError:
        return Verdict(unmeasured="the loss of a few samples is not finite", is_passing=True)
    except MemoryLimitError as error:  # after several attempts to put something back
        return RanOut(without_frames(error))
    except ZeroGradientError:
        return Verdict(unmeasured="the gradient of a few samples is 0", is_passing=True)
    except (UnalignedError, UnsettledError) as error:
        return Verdict(unmeasured=f"what {error} draws for a few samples cannot be found among what it draws for all")
    except Exception as error:
        if is_out_of_memory(error):
            raise
        words = str(error).partition("\n")[0]
        name = type(error).__name__
        if isinstance(error, AutoaccumError):
            name = "the loss cannot be computed"
        return Verdict(unmeasured=f"on a few samples by themselves it fails ({name}: {words})")
