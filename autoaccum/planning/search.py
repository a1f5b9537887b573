"""Which micro-batch size to try next, from the history of trials.

One policy with two drivers: a probe asks ``next_trial`` until it has no more to ask; training asks ``Tuner`` for the
sizes of each window, and the tuner tries what ``next_trial`` says on samples that had to be trained on anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoaccum.planning.costs import MemoryModel, Trial, fit_memory_model

TOLERANCE = 0.02
"""The search ends when no size this much larger than the largest that fitted is expected to fit."""

TRUST = 4
"""A memory model of n sizes is trusted for sizes up to this to the power of n times the largest success."""


def target_bytes(limit_bytes: int, headroom: float, least_bytes: int) -> int:
    """The peak that plans keep to; ``least_bytes`` is that of the smallest micro-batch, or 0.

    >>> target_bytes(1000, 0.05, 400), target_bytes(1000, 0.05, 980)
    (950, 999)
    """
    target = int(limit_bytes * (1 - headroom))
    if not target < least_bytes <= limit_bytes:
        return target
    # The least there can be is past it already: free stays the same fraction of what is left above that.
    return int(least_bytes + (limit_bytes - least_bytes) * (1 - headroom))


def bounds(history: Sequence[Trial]) -> tuple[int, int | None]:
    """(largest size that fits, smallest that does not) by the newest word on each: memory may have moved meanwhile.

    The first is 0 while nothing fitted; the second None while nothing failed.
    """
    fits: set[int] = set()
    fails: set[int] = set()
    for trial in history:
        if trial.fits:
            fits.add(trial.micro_batch)
            fails = {size for size in fails if size > trial.micro_batch}
        else:
            fails.add(trial.micro_batch)
            fits = {size for size in fits if size < trial.micro_batch}
    return max(fits, default=0), min(fails, default=None)


def next_trial(
    history: Sequence[Trial],
    *,
    limit_bytes: int,
    ceiling: int,
    smallest: int = 1,
    first: int | None = None,
    growth: int = 2,
    prior: MemoryModel | None = None,
) -> int | None:
    """The size to try next, or None when the search is over and ``bounds(history)[0]`` is its answer.

    Sizes grow until two trials give a memory model, then jump to what the model predicts, never beyond ``growth``
    times the largest success; a prediction that failed falls back to bisection.

    Args:
        history: the trials so far, oldest first.
        limit_bytes: peak that is to be kept.
        ceiling: the largest size of any use.
        smallest: the size not to go below.
        first: the size to begin with; the smallest when left out.
        growth: how far beyond the largest success a trial may go.
        prior: the memory model of an earlier run: trusted for what a sample adds, once one trial has told the rest.
    """
    fits, fails = bounds(history)
    if fits >= ceiling or (fails is not None and fails <= smallest):
        return None
    if fits == 0:
        first = max(smallest, first or 0)
        return min(first if fails is None or first < fails else max(smallest, fails // 2), ceiling)
    step = max(1, int(TOLERANCE * fits))
    if fails is not None and fails - fits <= step:
        return None
    model = memory_model(history, prior)
    if model is None:
        return min(fits * (2 if first is None else growth), ceiling) if fails is None else (fits + fails) // 2
    sizes = {trial.micro_batch for trial in history if trial.peak_bytes is not None}
    growth = min(growth, TRUST ** len(sizes))  # two small trials may show hardly more than the allocator's first step
    largest = min(fits * growth, ceiling, ceiling if fails is None else fails - 1)
    predicted = model.largest_within(limit_bytes)
    if predicted < fits + step:
        return None
    if fails is not None and predicted >= fails:  # the model has been wrong about this size: halve the gap instead
        return (fits + fails) // 2
    return int(min(predicted, largest))


def memory_model(history: Sequence[Trial], prior: MemoryModel | None = None) -> MemoryModel | None:
    """Fitted to the trials, or until they suffice that of an earlier run, moved to where the newest of them lies."""
    model = fit_memory_model(history)
    if model is not None or prior is None:
        return model
    for trial in reversed(history):
        if trial.peak_bytes is not None:
            fixed_bytes = trial.peak_bytes - prior.bytes_per_sample * trial.micro_batch
            # Samples that would take more than there was in use have become cheaper: a code that has changed.
            return replace(prior, fixed_bytes=fixed_bytes) if fixed_bytes >= 0 else None
    return prior


COARSE_FIRST, COARSE_GROWTH = 16, 4
"""The size to begin with, and the factor to grow by, where few sizes should be tried."""

PLATEAU = 1.03
"""Micro-batches four times as large that are faster by less than this factor are not worth their memory."""
CATCHING_UP = 1.5
"""Micro-batches whose last doubling made them faster by this factor may yet overtake small ones."""


def has_plateaued(history: Sequence[Trial]) -> bool:
    """Whether trials stopped to gain samples per second as they grew.

    What disturbs a timing makes it longer, and the first of all most: so the best of the two last doublings stands
    against the best before them. What costs the same from some size on, such as waking other threads, makes the first
    of these sizes slow and each doubling twice as fast: that is no plateau.
    """
    rates = {t.micro_batch: t.micro_batch / t.seconds for t in history if t.fits and t.seconds}
    largest = max(rates, default=0)
    before = [rate for size, rate in rates.items() if 4 * size <= largest]
    since = [rate for size, rate in rates.items() if 4 * size > largest]
    return len(before) > 1 and max(since) < PLATEAU * max(before) and rates[largest] < CATCHING_UP * min(since)
