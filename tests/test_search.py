"""Law 6, of the search: against every true limit, and a tuner that searches on windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.costs import Trial
from autoaccum.errors import NothingFitsError
from autoaccum.search import Tuner, bounds, next_trial

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


class Device:
    """A device with a linear peak, and the loop that training is."""

    def __init__(self, truth: int, headroom: float = 0.0) -> None:
        self.limit_bytes = FIXED + PER_SAMPLE * truth
        self.headroom = headroom
        self.ooms = 0

    def tuner(self, effective_batch: int, **options: int) -> Tuner:
        return Tuner(
            ceiling=effective_batch, limit_bytes=self.limit_bytes, headroom=self.headroom, search=True, **options
        )

    def run(self, tuner: Tuner, num_samples: int) -> list[int]:
        """One window: the sizes that committed."""
        sizes = tuner.sizes(num_samples)
        while True:
            done: list[int] = []
            for size, is_trial in sizes:
                if linear(size) > self.limit_bytes:
                    self.ooms += 1
                    sizes = iter([(size, False) for size in tuner.out_of_memory(size, num_samples)])
                    break
                if is_trial:
                    tuner.observe(size, linear(size))
                done.append(size)
            else:
                tuner.committed(max(done))
                return done


@given(
    truth=st.integers(1, 10_000),
    effective_batch=st.integers(1, 10_000),
    last=st.integers(1, 10_000),
)
@settings(max_examples=300, deadline=None)
def test_tuner_wastes_no_sample_and_settles_on_what_was_tried(truth: int, effective_batch: int, last: int) -> None:
    device = Device(truth)
    tuner = device.tuner(effective_batch)
    tried: set[int] = set()
    for _ in range(40):
        done = device.run(tuner, effective_batch)
        tried |= set(done)
        assert sum(done) == effective_batch
        if tuner.trial_for(effective_batch) is None:
            break
    tuner.searching = False
    assert tuner.trial_for(effective_batch) is None, "still searching after 40 windows"
    plan = tuner.plan(effective_batch)
    assert max(plan) in tried
    assert max(plan) <= truth
    best = -(-effective_batch // truth)
    assert len(plan) <= max(best + 1, best * 1.03), "more micro-batches than 2 % of the size explain"
    assert sum(device.run(tuner, min(last, effective_batch))) == min(last, effective_batch)


@given(truth=st.integers(2, 200), num_samples=st.integers(1, 300))
def test_smallest_is_kept(truth: int, num_samples: int) -> None:
    device = Device(max(truth, 3))  # an odd window in twos has a three
    tuner = device.tuner(num_samples, smallest=2)
    for _ in range(10):
        done = device.run(tuner, num_samples)
        assert sum(done) == num_samples
        assert min(done) >= min(2, num_samples)


def test_headroom_is_left_free() -> None:
    device = Device(1000, headroom=0.1)
    tuner = device.tuner(100_000)
    for _ in range(5):
        device.run(tuner, 100_000)
    assert linear(tuner.largest) <= 0.9 * device.limit_bytes < linear(int(tuner.largest * 1.03))
    assert device.ooms == 0


def test_one_sample_too_many() -> None:
    tuner = Device(1).tuner(8)
    with pytest.raises(NothingFitsError, match="a micro-batch of 1") as caught:
        tuner.out_of_memory(1, 8)
    assert (caught.value.micro_batch, caught.value.limit_bytes) == (1, linear(1))
    with pytest.raises(NothingFitsError) as caught:
        tuner.observe(1, 5000)
    assert caught.value.peak_bytes == 5000


def test_next_plan_is_strictly_smaller() -> None:
    tuner = Tuner(ceiling=64, limit_bytes=1, headroom=0, search=False, largest=64)
    plans = [tuner.out_of_memory(size, 64) for size in (64, 32, 16)]
    assert [plan[0] for plan in plans] == [32, 16, 8]
    tuner.committed(8)
    assert tuner.out_of_memory(4, 64)[0] == 2
