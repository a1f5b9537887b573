"""Law 6, of the search: against every true limit, and a tuner that searches on windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.costs import Trial
from autoaccum.search import bounds, next_trial

FIXED, PER_SAMPLE = 1000, 7


def probe(
    peak: Callable[[int], int], limit_bytes: int, *, ceiling: int = 20_000, growth: int = 16, hidden: int = 0
) -> list[Trial]:
    """Trials on a device that refuses what passes ``limit_bytes``; ``hidden`` bytes show in no peak."""
    history: list[Trial] = []
    while size := next_trial(history, limit_bytes=limit_bytes, ceiling=ceiling, growth=growth):
        assert size not in [t.micro_batch for t in history], "tried twice"
        assert size <= ceiling
        assert len(history) < 60
        fits = peak(size) + hidden <= limit_bytes
        history.append(Trial(micro_batch=size, fits=fits, peak_bytes=peak(size) if fits else None))
    return history


def linear(size: int) -> int:
    return FIXED + PER_SAMPLE * size


@pytest.mark.parametrize("thousand", range(10))
def test_every_true_limit_with_a_linear_peak(thousand: int) -> None:
    """Found within 2 %, by at most 6 trials, and never an out-of-memory error but for a limit of 1 or nothing."""
    for truth in range(1000 * thousand + 1, 1000 * thousand + 1001):
        history = probe(linear, FIXED + PER_SAMPLE * truth)
        found, _ = bounds(history)
        assert found in [t.micro_batch for t in history if t.fits]
        assert truth * 0.98 - 1 < found <= truth
        assert sum(not t.fits for t in history) <= (truth == 1)
        assert len(history) <= 6


@given(
    truth=st.integers(0, 10_000),
    step=st.integers(1, 64),
    hidden=st.integers(0, 20_000),
    growth=st.sampled_from([2, 4, 16]),
    ceiling=st.integers(1, 12_000),
)
@settings(max_examples=500, deadline=None)
def test_any_true_limit_with_a_stepped_peak_and_memory_that_no_peak_shows(
    truth: int, step: int, hidden: int, growth: int, ceiling: int
) -> None:
    """However wrong the model, what is found was tried and fitted; it is within 2 % or a step of the truth."""

    def peak(size: int) -> int:
        return FIXED + PER_SAMPLE * (-(-size // step) * step)

    limit = peak(truth) + hidden if truth else FIXED - 1
    history = probe(peak, limit, ceiling=ceiling, growth=growth, hidden=hidden)
    found, _ = bounds(history)
    largest = max((size for size in range(ceiling + 1) if size == 0 or peak(size) + hidden <= limit), default=0)
    assert found == 0 or found in [t.micro_batch for t in history if t.fits]
    assert found <= largest
    assert found >= min(1, largest)
    assert sum(not t.fits for t in history) <= 15
    if hidden == 0:
        assert found >= 0.98 * largest - step - 1


@given(truth=st.integers(1, 10_000))
def test_without_peaks_it_bisects(truth: int) -> None:
    history: list[Trial] = []
    while size := next_trial(history, limit_bytes=1, ceiling=20_000):
        history.append(Trial(micro_batch=size, fits=size <= truth))
        assert len(history) < 30
    assert truth * 0.98 - 1 < bounds(history)[0] <= truth


def test_bounds_believes_the_newest() -> None:
    history = [Trial(micro_batch=size, fits=True) for size in (1, 2, 4, 8)]
    assert bounds(history) == (8, None)
    assert bounds([*history, Trial(micro_batch=4, fits=False)]) == (2, 4)
    assert bounds([*history, Trial(micro_batch=4, fits=False), Trial(micro_batch=6, fits=True)]) == (6, None)
