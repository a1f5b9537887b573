"""The search: the micro-batch size to try next, from the history of trials.

One policy with two drivers: a probe asks ``next_trial`` until it has no more to ask; training asks ``Tuner`` for the
sizes of each window, and the tuner tries what ``next_trial`` says on samples that had to be trained on anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.planning.costs import MemoryModel, Trial, bounds, memory_model

TOLERANCE = 0.02
"""End the search when no size that is larger than the largest that fitted by this fraction is expected to fit."""

TRUST = 4
"""Trust a memory model of n sizes up to this to the power of n times the largest success."""


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
    """Return the size to try next, or None when the search is over and ``bounds(history)[0]`` is its answer.

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
    # Nothing larger is of use, or nothing smaller is allowed.
    if fits >= ceiling or (fails is not None and fails <= smallest):
        return None
    if fits == 0:
        return _first_trial(fails, ceiling=ceiling, smallest=smallest, first=first)
    step = max(1, int(TOLERANCE * fits))  # a gain of fewer samples is not worth a trial
    if fails is not None and fails - fits <= step:
        return None
    model = memory_model(history, prior)
    if model is None:
        if fails is not None:
            return (fits + fails) // 2
        # A beginning that was chosen is a size of some use: what a sample adds shows only in one that is far larger.
        return min(fits * (2 if first is None else growth), ceiling)
    # Two small trials may show hardly more than the allocator's first step: few sizes are not trusted far.
    sizes = {trial.micro_batch for trial in history if trial.peak_bytes is not None}
    largest = min(fits * min(growth, TRUST ** len(sizes)), ceiling)
    if fails is not None:
        largest = min(largest, fails - 1)
    predicted = model.largest_within(limit_bytes)  # infinite where samples cost nothing
    if predicted < fits + step:
        return None
    if fails is not None and predicted >= fails:
        # The model has been wrong about this size, so that it cannot be asked again: halve the gap instead.
        return (fits + fails) // 2
    return int(min(predicted, largest))


def _first_trial(fails: int | None, *, ceiling: int, smallest: int, first: int | None) -> int:
    """Return the size to try while nothing has fitted; ``fails`` is the smallest that did not, if any."""
    size = max(smallest, first or 0)
    if fails is not None and size >= fails:
        size = max(smallest, fails // 2)
    # A failure may be of an earlier run with larger windows, and half of it beyond any use in these.
    return min(size, ceiling)


FEW_SIZES_FIRST, FEW_SIZES_GROWTH = 16, 4
"""The size to begin with, and the factor to grow by, where a size costs so much that few should be tried.

So it is for models that are compiled for each size anew, and for those for which small sizes are
poor, as statistics of few samples are.
"""

PLATEAU = 1.03
"""End the search where micro-batches four times as large have more samples per second by less than this factor."""
CATCHING_UP = 1.5
"""Go on all the same where the last doubling made them faster by this factor: they may yet overtake small ones."""


def has_plateaued(history: Sequence[Trial]) -> bool:
    """Return whether trials stopped to gain samples per second as they grew.

    What disturbs a timing makes it longer, and the first of all most: so the best of the two last doublings stands
    against the best before them. What costs the same from some size on, such as waking other threads, makes the first
    of these sizes slow and each doubling twice as fast: that is no plateau.
    """
    rates = {t.micro_batch: t.micro_batch / t.seconds for t in history if t.fits and t.seconds}
    largest = max(rates, default=0)
    before = [rate for size, rate in rates.items() if 4 * size <= largest]
    since = [rate for size, rate in rates.items() if 4 * size > largest]
    # One size alone before may be the first, whose kernels were loaded in its time: it proves nothing.
    return len(before) > 1 and max(since) < PLATEAU * max(before) and rates[largest] < CATCHING_UP * min(since)
