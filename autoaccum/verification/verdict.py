"""Measures a window and says what came of it: passed, failed and why, or not measured and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from autoaccum.data.base import Window
from autoaccum.errors import AutoaccumError, MemoryLimitError
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory, without_frames
from autoaccum.verification.decision import compare_losses, decide
from autoaccum.verification.draws import UnalignedError, UnsettledError
from autoaccum.verification.findings import FOREIGN, Decision, NotFiniteError, Verdict, ZeroGradientError
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.mixing import broadcasts, mixes
from autoaccum.verification.samples import MOST, choose, cuts_of
from autoaccum.window.batch_norm import smallest_micro_batch
from autoaccum.window.job import Job
from autoaccum.window.state import State

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
    """
    smallest = max(smallest_micro_batch(job.modules), job.min_micro_batch)
    make = partial(Measurement, job, window, written=list(written), rewind=rewind, like=like)
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
        return mixes(measurement)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        measurement.state.restore()
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
) -> Verdict | RanOut:
    """Measure these samples; they draw by a seed of that number."""
    measurement = make(chosen, forward_only=forward_only, seed=seed)
    try:
        with measurement:
            if forward_only:
                decision = compare_losses(measurement, smallest, likely)
                if not decision.passed and measurement.collates_anew():
                    decision = compare_losses(measurement, smallest, likely)
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
                broadcasts=not decision.passed and broadcasts(measurement),
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
