"""The search: the micro-batch size to try next, from the history of trials.

One policy with two drivers: a probe asks ``next_trial`` until it has no more to ask; training asks ``Tuner`` for the
sizes of each window, and the tuner tries what ``next_trial`` says on samples that had to be trained on anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoaccum.planning.costs import PLATEAU, MemoryModel, Trial, bounds, memory_model
from autoaccum.planning.extrapolation import Reach, reach

TOLERANCE = 0.02
"""End the search when no size that is larger than the largest that fitted by this fraction is expected to fit."""
UNHURRIED = 4
"""Let each trial beyond so many make the search content with one tolerance more, where it may take large steps."""
WORTH_AN_ERROR = 1.2
"""Try what may not fit at the end of a search where it is larger than what does by this factor."""
FAR, UNSURE = 64, 16
"""Try no size that is more than the first times the largest success; nor the second, while slopes are not compared."""
GRID = 0.93
"""Ratio of neighbouring sizes that a search without peaks tells apart, or whole numbers that are farther apart."""
MOST_ERRORS = 3
"""Out-of-memory errors that a search without peaks may meet, if it chooses all of its sizes."""


def next_trial(
    history: Sequence[Trial],
    *,
    limit_bytes: int,
    ceiling: int,
    smallest: int = 1,
    first: int | None = None,
    growth: int = 2,
    prior: MemoryModel | None = None,
    start_bytes: int | None = None,
) -> int | None:
    """Return the size to try next, or None when the search is over and ``bounds(history)[0]`` is its answer.

    With peaks, two sizes are known of each ``Reach``: that which likely fits, by the slope of the last trials, and that
    which surely does, by the steepest there can be. The likely one is tried where samples get cheaper, and where four
    sizes are on a line; the sure one where it is nearly the same, half of the way to the other, or at least twice the
    largest success; and one between them where little is known. After a failure that the peaks did not foretell it is a
    size between, as ``by_errors`` counts them. So it is for all where no peak is known. Where tensors are told
    apart, and may fill the limit much further than the peaks say, that is tried once.

    Args:
        history: the trials so far, oldest first.
        limit_bytes: peak that is to be kept.
        ceiling: the largest size of any use.
        smallest: the size not to go below.
        first: the size to begin with; the smallest when left out.
        growth: how far beyond the largest success a trial may go.
        prior: the memory model of an earlier run: trusted for what a sample adds, once one trial has told the rest.
        start_bytes: what was in use before the first trial; None where nobody tells.
    """
    fits, fails = bounds(history)
    # Nothing larger is of use, or nothing smaller is allowed.
    if fits >= ceiling or (fails is not None and fails <= smallest):
        return None
    if fits == 0:
        return _first_trial(fails, ceiling=ceiling, smallest=smallest, first=first)
    beyond = ceiling + 1 if fails is None else min(fails, ceiling + 1)
    most = min(fits * growth, beyond - 1)
    model = memory_model(history, prior)  # None with a single trial that belies an earlier run too
    before = prior.of_sample() if prior is not None and model is not None else None
    known = reach(history, start_bytes=start_bytes, sample_bytes=before)
    if known is None and fails is None and growth <= FEW_SIZES_GROWTH:  # on real work, which each trial is part of
        return most
    # In a probe, where an error costs a trial and no work, as few trials as can be.
    if known is None:
        size = by_errors(fits, beyond, errors_left(history), is_open=fails is None or fails > ceiling)
        return None if size is None else min(size, most)
    # Without large steps most trials are on the way to the limit, and only two or three near it.
    hurry = len(history) - UNHURRIED + 1 if growth > 2 else 1
    step = max(1, int(TOLERANCE * max(1, hurry) * fits))  # a gain of fewer samples is not worth a trial
    likely = known.likely(limit_bytes)
    above = None if fails is None else _peak_of(history, fails)
    if fails is not None and above is not None and above > known.peak_bytes:
        # It ran, and took more than it may: so it is on the curve too.
        share = (limit_bytes - known.peak_bytes) / (above - known.peak_bytes)
        likely = min(likely, known.size + int(share * (fails - known.size)))
    # An allocator that grows in steps may hold as much for twice the samples: that is worth one error at most.
    snugly = int(min(known.snugly(limit_bytes), fits * FAR, ceiling))
    is_near = likely < 2 * fits and snugly >= WORTH_AN_ERROR * max(fits, likely)
    if is_near and all(t.fits or _may_be_a_step(t, snugly) for t in history):
        return snugly
    if likely < fits + step or (fails is not None and fails - fits <= step):
        return None
    jump = _jump(known, limit_bytes, fits, likely, step, is_started=start_bytes is not None)
    # Weights of samples that differ in length are noisy, and errors in training dear: there both have to agree.
    if start_bytes is None and model is not None and (within := model.largest_within(limit_bytes)) >= fits + step:
        jump = min(jump, within)
    if fails is not None and jump >= fails:
        jump = _back(known, fits, fails, known.surely(limit_bytes), errors_left(history))
    # Where two took a little too much, peaks are noisier than what lies between: a third would do as they did.
    close = [t for t in history if not t.fits and t.peak_bytes is not None and beyond <= t.micro_batch < beyond + step]
    if len(close) > 1:
        jump = min(jump, beyond - step)
    return int(max(fits + 1, min(jump, most)))


def _jump(known: Reach, limit_bytes: int, fits: int, likely: float, step: int, *, is_started: bool) -> float:
    """Return the size to try by what peaks tell."""
    surely = min(likely, known.surely(limit_bytes)) if known.slope else known.surely(limit_bytes)
    far = min(likely, fits * (FAR if is_started or known.alike else UNSURE))
    if known.slope is None:
        # Where one sample takes more than is left, it may be a workspace: to tell takes a second size.
        return min(max(surely, 2 * fits), far)
    # What gets cheaper fits at least as far as the last slope says.
    if known.is_falling:
        return far
    if known.alike > 1 and math.isfinite(far) and known.predict(int(far)) is not None:
        return far
    is_rising = len(known.slopes) > 1 and known.slope > 0
    if known.is_narrow or surely - fits >= max(step, (likely - fits) / 2) or (is_rising and surely >= 2 * fits):
        return min(surely, far)
    # Little is known: nearer to what is likely, for an error costs one trial, and a small step at least one more.
    between: float = max(surely, fits) ** (1 / 3) * far ** (2 / 3)
    return between


def _back(known: Reach, fits: int, fails: int, surely: float, errors: int) -> float:
    """Return a size between the largest success and a failure that was not foretold."""
    gap = fails - fits
    if min(1.5 * fits, fits + gap / 3) <= surely <= fails - gap / 4:
        return surely
    if (known.is_narrow or known.alike) and fails >= 0.6 * surely:
        # The slope is about right, so that the truth is near the failure; of peaks that are noisy half-way to it.
        return fits + (0.75 if fails > 1.1 * fits else 0.5) * gap
    return by_errors(fits, fails, errors) or (fits + fails) // 2


def _may_be_a_step(failed: Trial, size: int) -> bool:
    """Return whether a trial went past the limit, without an error, far below a size that may fit all the same."""
    return failed.peak_bytes is not None and WORTH_AN_ERROR * failed.micro_batch <= size


def _peak_of(history: Sequence[Trial], size: int) -> int | None:
    """Return the newest peak of a size that did not fit; None where it ran out of memory."""
    return next((t.peak_bytes for t in reversed(history) if t.micro_batch == size and not t.fits), None)


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


# Without peaks a trial shows only whether its size fits.


def told_apart(trials: int, errors: int) -> int:
    """Return how many sizes a search can distinguish with that many trials, of which ``errors`` may run out of memory.

    The first trial distinguishes two cases: f(d, e) = f(d - 1, e - 1) + f(d - 1, e) + 1, which is the sum of the
    binomials (d over 1) to (d over e). Known as the egg-drop problem: Boardman, "The Egg-Drop Numbers", Mathematics
    Magazine 77 (2004).

    >>> told_apart(9, 3), told_apart(7, 3), told_apart(7, 1)
    (129, 63, 7)
    """
    return sum(math.comb(trials, failed) for failed in range(1, errors + 1))


def by_errors(fits: int, beyond: int, errors: int, *, is_open: bool = False) -> int | None:
    """Return the size to try between one that fits and one that does not, if trials show only whether a size fits.

    Candidates are 0.93 apart, so the largest candidate that fits is at least 0.93 of the true limit. The returned size
    is the first of the fewest trials that distinguish all candidates with the errors that are left: the largest
    candidate below which the remaining trials can still search after an error.

    Args:
        fits: the largest that fits, 1 at least.
        beyond: the smallest that does not, or that is of no use.
        errors: how many may still run out of memory, 1 at least.
        is_open: whether nothing has failed; then the last useful size is a candidate too.
    """
    # The true limit lies between the last candidate that fits and the next one.
    sizes, size = [], fits
    while (size := int(size / GRID) + 1) < beyond:
        sizes.append(size)
    if is_open and beyond - 1 > max(sizes, default=fits):
        sizes.append(beyond - 1)
    if not sizes:
        return None
    trials = 1
    while told_apart(trials, errors) < len(sizes):
        trials += 1
    return sizes[min(len(sizes) - 1, told_apart(trials - 1, errors - 1))]


def errors_left(history: Sequence[Trial]) -> int:
    """Return how many more errors a search may meet; 2, for one more halving, if it has met all of them."""
    fits, _ = bounds(history)
    met = sum(not trial.fits and trial.micro_batch > fits for trial in history)
    return MOST_ERRORS - met if met < MOST_ERRORS else 2
