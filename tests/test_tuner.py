"""Law 6, of plans: a tuner that searches on windows, times plans, and gives way to memory that moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.errors import NothingFitsError
from autoaccum.tuner import Tuner

FIXED, PER_SAMPLE = 1000, 7


def linear(size: int) -> int:
    return FIXED + PER_SAMPLE * size


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
                tuner.committed(done)
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
    tuner.committed([8])
    assert tuner.out_of_memory(4, 64)[0] == 2
