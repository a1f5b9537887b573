"""What an earlier run of the same cost has told, and what this one has to tell a later one.

Only costs are handed on. Whether a trial fitted was a matter of that run's limit, and how large a micro-batch may be
now is found out anew; but it is known what a sample adds, so that the search begins near its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoaccum.planning.costs import MemoryModel, TimeModel, Trial, fit_memory_model, fit_time_model, weigher
from autoaccum.planning.history import History, in_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """What the trials of an earlier run say of this one."""

    memory: MemoryModel
    """Peak bytes by weight."""
    known: int
    """The largest weight that was measured."""
    times: TimeModel | None
    """Seconds by weight; None where nothing was timed."""


def recalled(past: Sequence[Trial], held_bytes: int) -> Recalled | None:
    """Return what the trials of an earlier run say of this one; None when they are too few for a memory model.

    Args:
        past: the trials, in samples and lengths.
        held_bytes: what is in use now before the first sample, which that run may have had less of.

    >>> trials = [Trial(micro_batch=size, fits=True, peak_bytes=100 + 10 * size) for size in (1, 4)]
    >>> recalled(trials, held_bytes=500).memory
    MemoryModel(fixed_bytes=500, bytes_per_sample=10.0, bytes_per_square=0.0)
    """
    # By its own trials, so that the weights are in the units of the model that is fitted to them.
    weighed = in_weights(past, weigher(past))
    model = fit_memory_model(weighed)
    if model is None:
        return None
    return Recalled(
        # What a sample adds is a matter of the code; what is there without any may have grown since.
        memory=model.moved_to(max(model.fixed_bytes, held_bytes)),
        known=max(trial.micro_batch for trial in weighed if trial.peak_bytes is not None),
        times=fit_time_model(weighed),
    )


def learnt(history: History, times: TimeModel | None, *, has_lengths: bool) -> tuple[Trial, ...]:
    """Return what a later run may begin from: the trials, with the seconds that windows of them took.

    Args:
        history: what was tried.
        times: seconds by weight, where plans were timed.
        has_lengths: whether samples differ in length.
    """
    if has_lengths:  # no window is like another: they are timed again
        return tuple(replace(trial, seconds=None) for trial in history.trials)
    # What trials took themselves is all there is: a later run is told it, and checks it on its first windows.
    if times is None:
        return tuple(history.trials)
    # Sizes that were timed in windows need not have been trials. A trial of the same size is worth more, for its peak
    # was measured; but its time was that of a cold run, and gives way to the windows'.
    model = history.model
    trials = {}
    for size, _ in times.points:
        peak_bytes = None if model is None else model.predict(size)
        trials[size] = Trial(micro_batch=size, fits=True, peak_bytes=peak_bytes)
    for trial in history.trials:
        trials[trial.micro_batch] = trial
    return tuple(replace(trial, seconds=times.predict(size)) for size, trial in trials.items())
