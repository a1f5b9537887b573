"""The models of memory and time: weighted least squares, and what they say about a limit."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoaccum.planning.costs import (
    MemoryModel,
    TimeModel,
    Trial,
    bounds,
    fit_memory_model,
    fit_time_model,
    memory_model,
    prediction_error,
    weigher,
)

points = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**10)), min_size=2, max_size=8)


def trials(points: list[tuple[int, int]]) -> list[Trial]:
    return [Trial(micro_batch=x, fits=True, peak_bytes=y, seconds=y / 1e6) for x, y in points]


@given(points)
def test_weighted_least_squares_as_numpy_does_it(points: list[tuple[int, int]]) -> None:
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    assume(len(set(x)) > 1)
    slope, fixed = np.polyfit(x, y, 1, w=np.sqrt(x))  # numpy multiplies residuals by w before it squares them
    tolerance = 1e-6 * (y.max() + 1)
    assume(abs(slope) * x.max() > 10 * tolerance)
    if slope < 0:
        slope, fixed = 0.0, np.average(y, weights=x)
    memory = fit_memory_model(trials(points))
    assert memory is not None
    for size in (x.min(), x.max()):
        assert memory.fixed_bytes + memory.bytes_per_sample * size == pytest.approx(fixed + slope * size, abs=tolerance)


def test_larger_trials_weigh_more() -> None:
    """By hand; with equal weights the line would be 1.5 b - 1."""
    model = fit_memory_model(trials([(1, 0), (2, 3), (3, 3)]))
    assert model is not None
    assert model.bytes_per_sample == pytest.approx(1.2)
    assert model.fixed_bytes == pytest.approx(-0.3)


@given(points)
def test_samples_never_cost_less_than_nothing(points: list[tuple[int, int]]) -> None:
    assume(len({x for x, _ in points}) > 1)
    memory = fit_memory_model(trials(points))
    assert memory is not None
    assert memory.bytes_per_sample >= 0


def test_falling_costs_are_constant_at_their_weighted_mean() -> None:
    assert fit_memory_model(trials([(1, 100), (3, 20)])) == MemoryModel(fixed_bytes=40.0, bytes_per_sample=0.0)


def test_two_different_sizes_are_needed() -> None:
    assert fit_memory_model([]) is None
    assert fit_memory_model(trials([(4, 100), (4, 120)])) is None


def test_trials_that_hid_their_costs_are_left_out() -> None:
    known = trials([(1, 10), (2, 20)])
    hidden = [Trial(micro_batch=100, fits=False), Trial(micro_batch=50, fits=True)]
    assert fit_memory_model([*known, *hidden]) == fit_memory_model(known)
    assert fit_memory_model([known[0], *hidden]) is None
    over = Trial(micro_batch=3, fits=False, peak_bytes=90, seconds=90e-6)  # past the limit, but it was seen to its end
    assert fit_memory_model([*known, over]) == fit_memory_model([*known, *trials([(3, 90)])])


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(0, 5000))
def test_largest_within_is_the_last_size_whose_peak_is(fixed: int, quarters: int, limit: int) -> None:
    model = MemoryModel(fixed_bytes=fixed, bytes_per_sample=quarters / 4)  # quarters are exact in binary
    largest = model.largest_within(limit)
    expected = max((size for size in range(20_001) if model.predict(size) <= limit), default=None)
    if expected is None:
        assert largest < 0
    else:
        assert largest == expected


@given(st.integers(0, 10**10), st.integers(1, 10**8), st.integers(1, 10_000), st.integers(2, 64))
def test_rounding_in_the_fit_costs_no_sample(fixed: int, per_sample: int, truth: int, last: int) -> None:
    model = fit_memory_model(trials([(size, fixed + per_sample * size) for size in (1, last)]))
    assert model is not None
    assume(fixed < 10_000 * per_sample)  # else the slope is lost in the digits that a float has
    assert model.largest_within(fixed + per_sample * truth) == truth


def test_largest_within_where_samples_cost_nothing() -> None:
    model = MemoryModel(fixed_bytes=100, bytes_per_sample=0)
    assert [model.largest_within(limit) for limit in (99, 100)] == [0, math.inf]


def test_predictions() -> None:
    assert MemoryModel(fixed_bytes=10.5, bytes_per_sample=0.25).predict(3) == 12  # 11.25, rounded up


def timed(*points: tuple[int, float]) -> TimeModel:
    model = fit_time_model([Trial(micro_batch=size, fits=True, seconds=seconds) for size, seconds in points])
    assert model is not None
    return model


class TestTime:
    def test_straight_lines_between_what_was_timed(self) -> None:
        model = timed((8, 2.0), (1, 1.0), (32, 14.0))
        assert [model.predict(size) for size in (1, 8, 32)] == [1.0, 2.0, 14.0]
        assert model.predict(20) == 8.0
        assert model.predict(64) == 28.0

    def test_below_the_smallest_nothing_is_faster(self) -> None:
        assert timed((4, 2.0), (8, 3.0)).predict(1) == 2.0

    def test_disturbed_timings_are_resisted(self) -> None:
        """The first run of a size loads its kernels; one of three was held up."""
        assert timed((1, 9.0), (2, 1.0), (4, 2.0)).points == ((1, 1.0), (2, 1.0), (4, 2.0))
        assert timed((4, 2.0), (4, 50.0), (4, 2.1)).points == ((4, 2.1),)

    def test_nothing_was_timed(self) -> None:
        assert fit_time_model([Trial(micro_batch=4, fits=True)]) is None

    @given(st.lists(st.tuples(st.integers(1, 500), st.floats(1e-6, 10)), min_size=1, max_size=12))
    def test_no_size_is_faster_than_a_smaller_one(self, points: list[tuple[int, float]]) -> None:
        times = [timed(*points).predict(size) for size in range(1, 600)]
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times))


SQUARES = st.tuples(st.integers(10**6, 10**9), st.floats(100, 10**5), st.floats(1, 10**3))
SHAPES = ((1, 100), (2, 90), (4, 60), (8, 50), (12, 30), (3, 200))
"""(samples, length) of trials that tell lengths from their squares."""


def of_lengths(fixed: float, per_length: float, per_square: float, noise: float = 0.0, seed: int = 0) -> list[Trial]:
    rng = random.Random(seed)
    return [
        Trial(
            micro_batch=size,
            fits=True,
            length=length,
            peak_bytes=round(
                (fixed + size * (per_length * length + per_square * length**2)) * (1 + noise * rng.uniform(-1, 1))
            ),
        )
        for size, length in SHAPES
    ]


class TestLengths:
    @given(SQUARES)
    def test_both_terms_are_recovered(self, truth: tuple[float, float, float]) -> None:
        fixed, per_length, per_square = truth
        model = fit_memory_model(of_lengths(*truth))
        assert model is not None
        for size, length in ((1, 10), (5, 150), (40, 80)):
            peak = fixed + size * (per_length * length + per_square * length**2)
            assert model.predict(size, length) == pytest.approx(peak, rel=1e-4)

    @given(st.integers(10**6, 10**9), st.floats(1, 10**4))
    def test_one_term_alone_is(self, fixed: int, each: float) -> None:
        linear = fit_memory_model(of_lengths(fixed, each * 100, 0))
        square = fit_memory_model(of_lengths(fixed, 0, each))
        assert linear is not None
        assert square is not None
        assert linear.predict(20, 150) == pytest.approx(fixed + 20 * 150 * each * 100, rel=1e-4)
        assert square.predict(20, 150) == pytest.approx(fixed + 20 * 150**2 * each, rel=1e-4)

    @given(SQUARES, st.integers(0, 10**6))
    def test_noise_of_one_percent_stays_small_where_trials_were(
        self, truth: tuple[float, float, float], seed: int
    ) -> None:
        fixed, per_length, per_square = truth
        model = fit_memory_model(of_lengths(*truth, noise=0.01, seed=seed))
        assert model is not None
        for size, length in SHAPES:
            peak = fixed + size * (per_length * length + per_square * length**2)
            assert model.predict(size, length) == pytest.approx(peak, rel=0.035)

    @given(
        st.lists(st.tuples(st.integers(1, 500), st.integers(1, 2000), st.integers(0, 10**10)), max_size=8),
        st.integers(1, 5000),
    )
    def test_no_length_counts_for_nothing_or_less(self, points: list[tuple[int, int, int]], length: int) -> None:
        known = [Trial(micro_batch=size, fits=True, length=long, peak_bytes=peak) for size, long, peak in points]
        model = fit_memory_model(known)
        if model is not None:
            assert model.bytes_per_sample >= 0
            assert model.bytes_per_square >= 0
        weight = weigher(known)
        assert 1 <= weight(length) <= weight(length + 1)

    @given(SQUARES)
    def test_equal_weights_need_equal_memory(self, truth: tuple[float, float, float]) -> None:
        _, per_length, per_square = truth
        weight = weigher(of_lengths(*truth))
        for length in (50, 100, 400):
            ratio = (per_length * length + per_square * length**2) / (per_length * 200 + per_square * 200**2)
            assert weight(length) / weight(200) == pytest.approx(ratio, rel=0.02)

    def test_where_nothing_is_known_a_longer_sample_counts_by_its_square(self) -> None:
        weight = weigher([Trial(micro_batch=2, fits=True, length=100, peak_bytes=7)])
        assert [weight(length) for length in (50, 100, 200)] == [50, 100, 400]

    def test_samples_within_a_limit_by_their_length(self) -> None:
        model = MemoryModel(fixed_bytes=1000, bytes_per_sample=2, bytes_per_square=0.5)
        assert model.of_sample(10) == 70
        assert model.predict(3, 10) == 1210
        assert [model.largest_within(limit, 10) for limit in (1209, 1210)] == [2, 3]


def test_the_newest_prediction_is_the_one_that_is_judged() -> None:
    old = Trial(micro_batch=4, fits=True, peak_bytes=100, predicted_bytes=150)
    new = Trial(micro_batch=8, fits=True, peak_bytes=200, predicted_bytes=190)
    assert prediction_error([old, new]) == pytest.approx(0.05)
    assert prediction_error([old, Trial(micro_batch=8, fits=True, peak_bytes=200)]) == pytest.approx(0.5)
    assert prediction_error([Trial(micro_batch=8, fits=False, predicted_bytes=190)]) is None


def test_bounds_believes_the_newest() -> None:
    history = [Trial(micro_batch=size, fits=True) for size in (1, 2, 4, 8)]
    assert bounds(history) == (8, None)
    assert bounds([*history, Trial(micro_batch=4, fits=False)]) == (2, 4)
    assert bounds([*history, Trial(micro_batch=4, fits=False), Trial(micro_batch=6, fits=True)]) == (6, None)


FIXED, PER_SAMPLE = 1000, 7


def linear(size: int) -> int:
    return FIXED + PER_SAMPLE * size


def fitted(*points: tuple[int, int]) -> list[Trial]:
    return [Trial(micro_batch=size, fits=True, peak_bytes=peak) for size, peak in points]


class TestPrior:
    """The memory model of an earlier run."""

    model = MemoryModel(fixed_bytes=500, bytes_per_sample=7)

    def test_one_trial_moves_it_to_where_it_lies(self) -> None:
        found = memory_model(fitted((16, linear(16))), self.model)
        assert found is not None
        assert [found.predict(size) for size in (1, 16, 100)] == [linear(size) for size in (1, 16, 100)]

    def test_the_newest_trial_does(self) -> None:
        found = memory_model([*fitted((16, linear(16))), *fitted((16, linear(16) + 90))], self.model)
        assert found is not None
        assert found.predict(10) == linear(10) + 90

    def test_two_sizes_speak_for_themselves(self) -> None:
        found = memory_model(fitted((1, 101), (2, 102)), self.model)
        assert found is not None
        assert found.bytes_per_sample == pytest.approx(1)

    def test_without_a_trial_it_stands(self) -> None:
        assert memory_model([], self.model) is self.model
        assert memory_model([], None) is None


def of_tensors(size: int, tensors: int, peak: int) -> Trial:
    return Trial(micro_batch=size, fits=True, peak_bytes=peak, allocated_bytes=tensors)


def test_the_line_is_that_of_tensors_and_goes_through_the_largest_peak() -> None:
    """Segments of 20: 2 samples look as if they took as much as 10, and 18 twice that."""
    trials = [of_tensors(size, 10 + size, 20 * -(-(10 + size) // 20)) for size in (2, 9, 18, 20)]
    model = fit_memory_model(trials)
    assert model is not None
    assert (model.bytes_per_sample, model.fixed_bytes) == (pytest.approx(1), pytest.approx(10 + 10))
    assert [model.predict(size) for size in (2, 9, 18, 20, 25)] == [22, 29, 38, 40, 45]


class TestPeaksBesideTheLine:
    """What an allocator holds beside tensors, which goes in steps."""

    # As they were seen: 1,024 samples in 26 MiB, of which 18 are tensors, and 2,048 in 50, of which 26 are.
    trials = (of_tensors(256, 12, 26), of_tensors(512, 14, 28), of_tensors(1024, 18, 26), of_tensors(2048, 26, 50))

    @property
    def model(self) -> MemoryModel:
        model = fit_memory_model(self.trials)
        assert model is not None
        return model

    def test_of_some_no_more_than_the_peak_is_known(self) -> None:
        """Such trials say nothing of tensors: the line is the same without them."""
        model = fit_memory_model([*self.trials, *trials([(4096, 70)])])
        assert model is not None
        assert model.bytes_per_sample == self.model.bytes_per_sample
        assert model.predict(4096) == 70

    def test_of_others_less_than_that(self) -> None:
        """A peak that is missing, of a state that somebody has written, is none that tensors are a part of."""
        told = [Trial(micro_batch=size, fits=True, allocated_bytes=size) for size in (1, 2)]
        assert fit_memory_model(told) is None
        assert fit_memory_model([*self.trials, *told]) == self.model


def test_what_came_later_is_written_only_where_it_says_something() -> None:
    plain = Trial(micro_batch=1, fits=True, peak_bytes=5)
    assert "allocated_bytes" not in plain.state_dict()
    assert Trial(**plain.state_dict()) == plain
    apart = of_tensors(1, 4, 5)
    assert apart.state_dict()["allocated_bytes"] == 4
