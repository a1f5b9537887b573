"""Law 6, of the search: against every true limit, and a tuner that searches on windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoaccum.planning.costs import MemoryModel, Trial, bounds
from autoaccum.planning.search import by_errors, errors_left, has_plateaued, next_trial, told_apart

FIXED, PER_SAMPLE = 1000, 7


def probe(
    peak: Callable[[int], int],
    limit_bytes: int,
    *,
    ceiling: int = 20_000,
    growth: int = 64,
    hidden: int = 0,
    start: int | None = None,
) -> list[Trial]:
    """Trials on a device that refuses what passes ``limit_bytes``; ``hidden`` bytes show in no peak."""
    history: list[Trial] = []
    while size := next_trial(history, limit_bytes=limit_bytes, ceiling=ceiling, growth=growth, start_bytes=start):
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
    """Found within 2 %, by at most 5 trials, and never an out-of-memory error but for a limit of 1 or nothing."""
    for truth in range(1000 * thousand + 1, 1000 * thousand + 1001):
        history = probe(linear, FIXED + PER_SAMPLE * truth, start=FIXED)
        found, _ = bounds(history)
        assert found in [t.micro_batch for t in history if t.fits]
        assert truth * 0.98 - 1 < found <= truth
        assert sum(not t.fits for t in history) <= (truth == 1)
        assert len(history) <= 5


@example(truth=677, step=52, hidden=0, growth=4, ceiling=748)
@given(
    truth=st.integers(0, 10_000),
    step=st.integers(1, 64),
    hidden=st.integers(0, 20_000),
    growth=st.sampled_from([2, 4, 64]),
    ceiling=st.integers(1, 12_000),
)
@settings(max_examples=500, deadline=None)
def test_any_true_limit_with_a_stepped_peak_and_memory_that_no_peak_shows(
    truth: int, step: int, hidden: int, growth: int, ceiling: int
) -> None:
    """However wrong the model, what is found was tried and fitted; it is within a step and 2 % of the truth.

    With large jumps it is 2 % more for each trial beyond four: a search in a hurry asks for more of them.
    """

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
        tolerance = 0.02 * (max(1, len(history) - 3) if growth > 2 else 1)
        assert found >= (1 - tolerance) * largest - step - 1


@given(truth=st.integers(1, 10_000))
def test_without_peaks_it_doubles_and_bisects(truth: int) -> None:
    """Within what sizes 0.93 apart can tell: see ``reach``."""
    history: list[Trial] = []
    while size := next_trial(history, limit_bytes=1, ceiling=20_000):
        history.append(Trial(micro_batch=size, fits=size <= truth))
        assert len(history) < 30
    assert truth * 0.93 <= bounds(history)[0] <= truth


def fitted(*points: tuple[int, int]) -> list[Trial]:
    return [Trial(micro_batch=size, fits=True, peak_bytes=peak) for size, peak in points]


class TestFirst:
    """Where every size is dear, the search begins with a large one."""

    def test_is_where_the_search_begins(self) -> None:
        assert next_trial([], limit_bytes=10**6, ceiling=64, first=16) == 16
        assert next_trial([], limit_bytes=10**6, ceiling=9, first=16) == 9
        assert next_trial([], limit_bytes=10**6, ceiling=64, smallest=20, first=16) == 20

    def test_too_large_a_beginning_is_halved(self) -> None:
        failed = [Trial(micro_batch=16, fits=False)]
        assert next_trial(failed, limit_bytes=10**6, ceiling=64, first=16) == 8
        assert next_trial(failed, limit_bytes=10**6, ceiling=64, smallest=9, first=16) == 9

    def test_growth_of_a_single_size_is_bounded(self) -> None:
        history = fitted((16, linear(16)))
        assert next_trial(history, limit_bytes=10**6, ceiling=10**4) == 32
        assert next_trial(history, limit_bytes=10**6, ceiling=10**4, first=16, growth=4) == 64

    def test_growth_bounds_what_the_model_says(self) -> None:
        history = fitted((1, linear(1)), (2, linear(2)))
        assert next_trial(history, limit_bytes=linear(5000), ceiling=10**4, growth=8) == 16
        assert next_trial(history, limit_bytes=linear(5000), ceiling=10**4, growth=64) == 32  # of two sizes
        history += fitted((32, linear(32)))
        assert next_trial(history, limit_bytes=linear(5000), ceiling=10**4, growth=64) == 2048
        history = fitted((1, linear(1)), (2, linear(2)))
        assert next_trial(history, limit_bytes=linear(30), ceiling=10**4, growth=64) == 30

    def test_nothing_beyond_the_ceiling_after_a_failure_far_above_it(self) -> None:
        history = [*fitted((16, linear(16)), (32, linear(32))), Trial(micro_batch=200, fits=False)]
        assert next_trial(history, limit_bytes=linear(150), ceiling=64, growth=64) == 64


class TestPrior:
    """The memory model of an earlier run."""

    model = MemoryModel(fixed_bytes=500, bytes_per_sample=7)

    def test_the_second_trial_jumps(self) -> None:
        history = fitted((40, linear(40)))
        found = next_trial(history, limit_bytes=linear(77), ceiling=1000, first=40, prior=self.model)
        assert found == 77


class TestSteps:
    """An allocator holds 20 MiB more or less, and tensors tell that twice the samples may fit all the same."""

    history = tuple(
        Trial(micro_batch=size, fits=True, peak_bytes=peak, allocated_bytes=1000 + 10 * size)
        for size, peak in ((8, 2000), (16, 2000), (32, 2900))
    )

    def test_one_jump_is_worth_an_error(self) -> None:
        """Of 3000 bytes 100 are left beyond the peak: 10 samples; tensors fill 95 % with (2850 - 1320) / 10 more."""
        assert next_trial(self.history, limit_bytes=3000, ceiling=1000) == 32 + 153
        assert next_trial(self.history, limit_bytes=3000, ceiling=100) == 100
        no_tensors = [Trial(micro_batch=t.micro_batch, fits=True, peak_bytes=t.peak_bytes) for t in self.history]
        assert next_trial(no_tensors, limit_bytes=2901, ceiling=1000) is None

    def test_after_an_error_there_is_no_other(self) -> None:
        failed = Trial(micro_batch=185, fits=False)
        assert next_trial([*self.history, failed], limit_bytes=3000, ceiling=1000) == 42, "what the peaks say"
        below = next_trial([*self.history, Trial(micro_batch=40, fits=False)], limit_bytes=3000, ceiling=1000)
        assert below is not None
        assert 32 < below < 40, "no step explains an error"

    def test_a_peak_past_the_limit_far_below_may_have_been_the_step(self) -> None:
        beyond = Trial(micro_batch=40, fits=False, peak_bytes=3100)
        assert next_trial([*self.history, beyond], limit_bytes=3000, ceiling=1000) == 185
        beyond = Trial(micro_batch=160, fits=False, peak_bytes=3100)
        assert next_trial([*self.history, beyond], limit_bytes=3000, ceiling=1000) == 42

    def test_far_from_the_limit_peaks_decide(self) -> None:
        assert next_trial(self.history, limit_bytes=4000, ceiling=1000) == 64


def timed(seconds: Callable[[int], float], last: int) -> list[Trial]:
    sizes = [2**power for power in range(last)]
    return [Trial(micro_batch=size, fits=True, seconds=seconds(size)) for size in sizes]


class TestPlateau:
    def test_of_a_device_that_is_busy(self) -> None:
        assert not has_plateaued(timed(lambda size: size, 3))  # too few to tell
        assert has_plateaued(timed(lambda size: size, 5))
        assert not has_plateaued(timed(lambda size: 1.0, 8))
        assert has_plateaued(timed(lambda size: max(size, 16), 8))
        assert not has_plateaued(timed(lambda size: max(size, 16), 6))  # 32 is the first without a gain

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_does_not_end_the_search_while_doublings_gain_10_percent(self, seed: int) -> None:
        rng = random.Random(seed)
        history = timed(lambda size: size**0.8625 * rng.uniform(1, 1.1), 10)  # 2**(1 - 0.8625) = 1.1
        assert not any(has_plateaued(history[:count]) for count in range(1, 11))

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_keeps_it_going_a_few_doublings_at_most(self, seed: int) -> None:
        rng = random.Random(seed)
        history = timed(lambda size: size * rng.uniform(1, 1.1), 14)
        assert next(count for count in range(1, 15) if has_plateaued(history[:count])) <= 10

    def test_failures_and_untimed_trials_say_nothing(self) -> None:
        history = timed(lambda size: size, 3)
        assert not has_plateaued([*history, Trial(micro_batch=64, fits=False, seconds=64.0)])
        assert not has_plateaued([*history, Trial(micro_batch=64, fits=True)])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1, 2, 4, 8], True),  # a sample takes what it takes
        ([1, 1, 1, 1], False),
        ([1, 9, 4, 8], True),  # one was disturbed
        ([0.3, 88, 88, 88], False),  # threads that take a share of a busy machine's time slice to wake
    ],
)
def test_a_plateau_is_where_larger_ones_gain_no_more(seconds: list[float], expected: bool) -> None:
    trials = [
        Trial(micro_batch=size, fits=True, seconds=time) for size, time in zip((1, 2, 4, 8), seconds, strict=True)
    ]
    assert has_plateaued(trials) is expected


def test_after_two_that_took_a_little_too_much_a_third_is_clearly_smaller() -> None:
    """Peaks of a process are noisy: what lies between two of them may be nothing but that."""
    limit, history = 1_000_000, fitted((1, 100_010), (64, 100_640), (4096, 140_960), (50_000, 600_000))
    for failed, peak in ((90_000, 1_000_400), (89_990, 1_000_900)):
        history.append(Trial(micro_batch=failed, fits=False, peak_bytes=peak))
    size = next_trial(history, limit_bytes=limit, ceiling=2**20, growth=64, start_bytes=100_000)
    assert size is not None
    assert size <= 89_990 - 0.02 * 50_000
    one = next_trial(history[:-1], limit_bytes=limit, ceiling=2**20, growth=64, start_bytes=100_000)
    assert one is not None
    assert one > 89_000, "where one did, a line between tells the last sample"


def test_the_size_to_begin_with_is_of_some_use_whatever_has_failed() -> None:
    """A failure that an earlier run with larger windows has met says nothing of where to begin in smaller ones."""
    failed = [Trial(micro_batch=64, fits=False)]
    assert next_trial(failed, limit_bytes=1, ceiling=8, first=32) == 8
    assert next_trial(failed, limit_bytes=1, ceiling=8, first=100) == 8
    assert next_trial(failed, limit_bytes=1, ceiling=100, first=100) == 32


# Where errors alone tell, every limit is found in as few trials as can be.


@pytest.mark.parametrize(("ceiling", "truths", "trials"), [(128, range(1, 129), 8), (16_384, range(1, 16_385), 12)])
def test_by_errors_alone_every_limit_is_found(ceiling: int, truths: range, trials: int) -> None:
    for truth in truths:
        history: list[Trial] = []
        while size := next_trial(history, limit_bytes=1, ceiling=ceiling, growth=64):
            history.append(Trial(micro_batch=size, fits=size <= truth))
            assert len(history) <= trials, truth
        assert sum(not trial.fits for trial in history) <= 3
        assert bounds(history)[0] >= 0.93 * truth


def test_what_can_be_told_apart_is_what_the_recursion_says() -> None:
    for trials in range(1, 10):
        for errors in range(1, 4):
            failed = told_apart(trials - 1, errors - 1)
            assert told_apart(trials, errors) == failed + told_apart(trials - 1, errors) + 1


def test_the_first_of_the_fewest_trials_leaves_as_many_below_it_as_an_error_leaves_to_tell() -> None:
    assert by_errors(8, 16, 1) == 9, "one error left: upwards"
    assert by_errors(8, 16, 2) == 11
    assert by_errors(8, 9, 3) is None
    assert by_errors(100, 104, 3) is None, "nearer than 0.93"
    assert by_errors(100, 104, 3, is_open=True) == 103, "the last of use"


def test_errors_that_were_met_are_counted_beyond_what_fits() -> None:
    history = [Trial(micro_batch=size, fits=False) for size in (64, 32)]
    assert errors_left(history) == 1
    assert errors_left([*history, Trial(micro_batch=48, fits=True)]) == 2
    assert errors_left([*history, Trial(micro_batch=16, fits=False)]) == 2, "all were met: bisection"
