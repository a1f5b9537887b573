"""Measures a window and says what came of it: passed, failed and why, or not measured and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from autoaccum.data.base import Window
from autoaccum.errors import AutoaccumError
from autoaccum.loss.coupling import smallest_micro_batch
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory
from autoaccum.verification.decision import Decision, decide, decide_without_ones
from autoaccum.verification.draws import UnalignedError, UnsettledError
from autoaccum.verification.measurement import Measurement, NotFiniteError, ZeroGradientError
from autoaccum.verification.samples import MOST, choose, cuts_of
from autoaccum.verification.suspects import Cause, name_cause
from autoaccum.window.job import Job

_FEW = 3
"""Samples that are measured where there is no memory for all."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a measurement has come to."""

    decision: Decision | None = None
    """What was measured; None where nothing was."""
    causes: tuple[Cause, ...] = ()
    """What is to blame where it failed, as far as it could be switched off."""
    rebinds: bool = False
    """Whether forwards leave other things in attributes of modules."""
    unmeasured: str = ""
    """Why nothing was measured; empty where something was."""
    is_zero: bool = False
    """Whether that is a gradient of 0 or a loss that is not finite, which may be another one in the next window."""
    ones: Decision | None = None
    """What was measured of windows that hold a count of 1, which may stand for none; None where it does not matter. The
    decision itself where no cut of these samples is without one."""
    counts_nothing: bool = False
    """Whether the first sample was found to have nothing to count."""
    samples: int = 0
    """How many samples were measured."""
    tolerance: float = 0.0
    """Up to which error gradients are the same."""


def measure(
    job: Job,
    window: Window,
    likely: Hypothesis,
    *,
    most: int,
    written: Iterable[torch.Tensor] = (),
    rewind: Callable[[], None] = lambda: None,
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
        include: positions of samples that are to be among them.
        forward_only: compare losses alone, by that hypothesis alone.
    """
    smallest = smallest_micro_batch(job.modules)
    make = partial(Measurement, job, window, written=list(written), rewind=rewind)
    why = "there is not enough memory for three samples at once"
    for count in (MOST, _FEW, 2):
        count = min(count, window.num_samples, most)
        if not cuts_of(count, smallest):
            why = f"there is no room, or no sample, for two parts of at least {smallest}"
            continue
        run = partial(_measured, window, likely, count, smallest, make, include, forward_only)
        outcome = attempt(run)
        if not isinstance(outcome, RanOut):
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
) -> Verdict:
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
                # Where no part is divided by 1 the count is what it says.
                without = decide_without_ones(measurement, smallest, likely)
                decision, ones = without or decision, decision
            causes: tuple[Cause, ...] = ()
            if not decision.passed:
                ones = ones if decision is ones else None
                causes = tuple(name_cause(measurement, decision.cuts, decision.hypothesis))
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
                counts_nothing=0 in measurement.dropped,
            )
    except NotFiniteError:
        return Verdict(unmeasured="the loss of a few samples is not finite", is_zero=True)
    except ZeroGradientError:
        return Verdict(unmeasured="the gradient of a few samples is 0", is_zero=True)
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
