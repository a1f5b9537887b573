"""Measures a window and says what came of it: passed, failed and why, or not measured and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from autoaccum.data.base import Window
from autoaccum.errors import AutoaccumError, MemoryLimitError
from autoaccum.loss.coupling import smallest_micro_batch
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory, without_frames
from autoaccum.verification.decision import decide, explained_by_ones
from autoaccum.verification.draws import UnalignedError, UnsettledError
from autoaccum.verification.findings import Cause, Decision, Verdict
from autoaccum.verification.measurement import Measurement, NotFiniteError, ZeroGradientError
from autoaccum.verification.samples import MOST, choose, cuts_of
from autoaccum.verification.suspects import name_cause, pads
from autoaccum.window.job import Job

_FEW = 3
"""Samples that are measured where there is no memory for all."""
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
    drops_gradients: bool = False,
    include: Sequence[int] = (),
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
        drops_gradients: whether parts whose gradient is not finite are left out.
        include: positions of samples that are to be among them.
        forward_only: compare losses alone, by that hypothesis alone.
    """
    smallest = smallest_micro_batch(job.modules)
    make = partial(Measurement, job, window, written=list(written), rewind=rewind, drops_gradients=drops_gradients)
    why = "there is not enough memory for three samples at once"
    for count in (MOST, _FEW, 2):
        count = min(count, window.num_samples, most)
        if not cuts_of(count, smallest):
            if not cuts_of(window.num_samples, smallest):  # a larger window will tell
                return Verdict(unmeasured=f"it has no two parts of at least {smallest}", is_passing=True)
            why = f"there is no room for two parts of at least {smallest} at once"
            continue
        run = partial(_measured, window, likely, count, smallest, make, include, forward_only)
        outcome = attempt(run)
        if isinstance(outcome, Verdict):
            return outcome
        why = "memory ran out in the attempt"
    return Verdict(unmeasured=why)


def _measured(
    window: Window,
    likely: Hypothesis,
    count: int,
    smallest: int,
    make: Callable[..., Measurement],
    include: Sequence[int],
    forward_only: bool,
) -> Verdict | RanOut:
    """Measure so many samples."""
    chosen = choose(window, window.num_samples, count, include)
    measurement = make(chosen, forward_only=forward_only)
    try:
        with measurement:
            if forward_only:
                measurement.run_whole()
                outcome = measurement.run(cuts_of(count, smallest)[::2], likely)
                decision = Decision.of(outcome, passed=outcome.error <= measurement.tolerance)
                return Verdict(decision=decision, samples=count, tolerance=measurement.tolerance)
            decision = decide(measurement, smallest, likely)
            ones: Decision | None = None
            if decision.has_ones and not decision.passed:
                without = explained_by_ones(measurement, smallest, likely)
                decision, ones = (decision, None) if without is None else (without, decision)
            if decision.passed and decision.is_vacuous:
                return Verdict(unmeasured="fewer than two of a few samples count", is_passing=True)
            causes: tuple[Cause, ...] = ()
            if not decision.passed:
                causes = tuple(name_cause(measurement, decision.cuts, decision.hypothesis))
                if measurement.is_rounded and decision.error < _ROUNDING:
                    return Verdict(unmeasured="its parameters have 16 bits, whose rounding hides what is looked for")
                # What Python's or NumPy's generator draws differs in each part, and nothing says by how much.
                if decision.is_foreign and not causes:
                    return Verdict(unmeasured="it draws from Python's or NumPy's generator, other numbers in each part")
            return Verdict(
                decision=decision,
                causes=causes,
                ones=ones,
                samples=count,
                tolerance=measurement.tolerance,
                rebinds=measurement.rebinds,
                pads=bool(not decision.passed and not causes and pads(measurement)),
                counts_nothing=0 in measurement.dropped,
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


def measure_part(job: Job, window: Window, hypothesis: Hypothesis, *, start: int, size: int) -> float | None:
    """Measure a window's own micro-batch, beside a few more of its samples: are they weighed rightly together?

    Args:
        job: what the run computes.
        window: the samples.
        hypothesis: the one that is held.
        start: where the micro-batch begins.
        size: its samples.

    Returns:
        the error, where it is larger than the tolerance; None where it is not, or cannot be measured.
    """
    own = list(range(start, start + size))
    others = [position for position in range(window.num_samples) if position not in own][: max(2, MOST - size)]
    chosen = [*own, *others]

    def measured() -> float | None:
        with Measurement(job, window, chosen) as measurement:
            measurement.run_whole()
            cut = (tuple(range(size)), tuple(range(size, len(chosen))))
            outcome = measurement.run([cut], hypothesis)
            return outcome.error if outcome.error > measurement.tolerance else None

    try:
        outcome = attempt(measured)
    except Exception:  # what cannot be computed of these samples has been said, or will be
        return None
    return None if isinstance(outcome, RanOut) else outcome
