"""Law 6, of plans: a tuner that searches on windows, times plans, and gives way to memory that moves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoaccum.errors import NothingFitsError
from autoaccum.planning.attempts import Piece, Reading
from autoaccum.planning.costs import Trial
from autoaccum.planning.cuts import cut
from autoaccum.planning.fastest import UNTIMED
from autoaccum.planning.limits import PATIENCE
from autoaccum.planning.search import MOST_ERRORS
from autoaccum.planning.timing import Timing
from autoaccum.planning.tuner import Tuner
from tests.planning.simulation import Device, Training

FIXED, PER_SAMPLE = 1000, 7


def linear(size: int) -> int:
    return FIXED + PER_SAMPLE * size


class Linear:
    """A device with a linear peak, and the bare loop that training is."""

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
        attempt = tuner.window(num_samples)
        while True:
            done: list[int] = []
            for piece in attempt:
                if linear(piece.size) > self.limit_bytes:
                    self.ooms += 1
                    attempt = attempt.ran_out(piece.size, 1, None, self.limit_bytes)
                    break
                if piece.is_trial:
                    attempt.fitted(Reading(piece, linear(piece.size)))
                done.append(piece.size)
            else:
                attempt.committed(tuple(done), None)
                return done


@given(
    truth=st.integers(1, 10_000),
    effective_batch=st.integers(1, 10_000),
    last=st.integers(1, 10_000),
)
@settings(max_examples=300, deadline=None)
def test_tuner_wastes_no_sample_and_settles_on_what_was_tried(truth: int, effective_batch: int, last: int) -> None:
    device = Linear(truth)
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
    device = Linear(max(truth, 3))  # an odd window in twos has a three
    tuner = device.tuner(num_samples, smallest=2)
    for _ in range(10):
        done = device.run(tuner, num_samples)
        assert sum(done) == num_samples
        assert min(done) >= min(2, num_samples)


def test_headroom_is_left_free() -> None:
    device = Linear(1000, headroom=0.1)
    tuner = device.tuner(100_000)
    for _ in range(5):
        device.run(tuner, 100_000)
    assert linear(tuner.largest) <= 0.9 * device.limit_bytes < linear(int(tuner.largest * 1.03))
    assert device.ooms == 0


def test_one_sample_too_many() -> None:
    tuner = Linear(1).tuner(8)
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


# Memory that moves.


def moving(truth: int = 40, effective_batch: int = 256, **options: int) -> Training:
    """A device of 1 MB, a tenth of which is the model, that holds so many samples; settled."""
    device = Device(10**6, peak=lambda size, _: 10**5 + 9 * 10**5 * size / truth)
    training = Training(device, effective_batch, **options)
    training.until_settled()
    training.run(20)
    return training


@given(truth=st.integers(20, 2000), effective_batch=st.integers(1, 3000), share=st.floats(0.16, 1.0))
def test_a_limit_that_falls_is_met_before_it_is_passed(truth: int, effective_batch: int, share: float) -> None:
    training = moving(truth, effective_batch)
    training.ooms.clear()
    training.device.limit_bytes = int(share * 10**6)
    plan = training.run()
    assert training.ooms == []
    assert training.device.peak(max(plan), 1) <= training.device.limit_bytes
    predicted = training.tuner.predicted_bytes(max(plan))
    assert predicted is None or predicted <= training.device.limit_bytes


@pytest.mark.parametrize(("truth", "effective_batch"), [(40, 256), (300, 5000), (1000, 900)])
def test_a_limit_that_returns_is_used_again(truth: int, effective_batch: int) -> None:
    training = moving(truth, effective_batch)
    before = training.run()[0]
    training.device.limit_bytes = 400_000
    small = training.run()[0]
    assert small < before
    training.run(50)
    assert training.run()[0] == small
    training.device.limit_bytes = 10**6
    training.trials.clear()
    training.run(PATIENCE)
    assert training.run(2)[0] == before
    assert training.ooms == []
    assert all(b <= 2 * a for a, b in pairwise([small, *training.trials]))
    assert training.trials[-1] == before


def test_a_limit_that_returns_for_a_moment_is_not() -> None:
    training = moving()
    training.device.limit_bytes = 400_000
    small = training.run()[0]
    for _ in range(50):
        training.device.limit_bytes = 10**6
        assert training.run(PATIENCE - 1)[0] == small
        training.device.limit_bytes = 400_000
        assert training.run()[0] == small


def test_a_size_that_was_refused_waits_for_a_limit_that_is_surely_larger() -> None:
    """Something that no look shows takes memory: the same size would fail again, unless there is more."""
    device = Device(400_000, peak=lambda size, _: 10**5 + 9 * 10**5 * size / 40 + (10**6 if size > 20 else 0))
    training = Training(device, 256)
    training.run(20)
    device.limit_bytes = 10**6
    training.run(2000)
    assert len(training.ooms) == 1
    device.limit_bytes = 1_049_000
    training.run(2000)
    assert len(training.ooms) == 1
    device.limit_bytes = 1_051_000
    training.run(2000)
    assert 2 <= len(training.ooms) <= 3


def test_growth_that_ran_out_of_memory_is_tried_again_half_as_soon() -> None:
    training = moving()
    device = training.device
    device.limit_bytes = 400_000
    training.run(2)
    assert training.tuner._largest._pressure.patience == PATIENCE
    peak = device.peak
    device.peak = lambda size, length: peak(size, length) + (10**6 if size > 20 else 0)
    device.limit_bytes = 10**6
    training.run(PATIENCE + 1)
    assert len(training.ooms) == 1
    assert training.tuner._largest._pressure.patience == 2 * PATIENCE
    assert training.run()[0] <= 20


def test_strain_once_changes_nothing_and_twice_one_plan() -> None:
    training = moving()
    before = training.run()
    assert training.run(1, strain="the allocator frees its cache again and again") == before
    training.run(50)
    after = training.run(1, strain="again")
    assert len(training.shrank) == 1
    assert before[0] / 1.5 < after[0] < before[0]
    assert training.run(PATIENCE - 2) == after


def test_a_users_own_micro_batch_is_left_alone_but_for_errors() -> None:
    training = Training(Device(1000 + 7 * 40), 100, searches=False, largest=30)
    assert training.run() == (25,) * 4
    training.device.limit_bytes = 1000 + 7 * 26
    assert training.run(20) == (25,) * 4
    training.device.limit_bytes = 1000 + 7 * 20
    assert max(training.run()) <= 20
    assert len(training.ooms) == 1
    training.device.limit_bytes = 10**6
    assert max(training.run(1000)) <= 20


limits = st.lists(st.tuples(st.integers(1, 30), st.floats(0.3, 3)), min_size=1, max_size=10)


@given(
    limits=limits,
    truth=st.integers(1, 300),
    effective_batch=st.integers(1, 400),
    fixed=st.floats(0, 0.9),
    headroom=st.sampled_from([0.0, 0.05, 0.2]),
    look_every=st.sampled_from([0, 1, 3]),
    smallest=st.integers(1, 2),
    few_sizes=st.booleans(),
    kind=st.sampled_from(["linear", "steps", "square", "random"]),
    others=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    strains=st.booleans(),
)
@settings(max_examples=200)
def test_laws_whatever_peaks_limits_and_windows(
    limits: list[tuple[int, float]],
    truth: int,
    effective_batch: int,
    fixed: float,
    headroom: float,
    look_every: int,
    smallest: int,
    few_sizes: bool,
    kind: str,
    others: list[int],
    strains: bool,
) -> None:
    """``Training`` asserts sums, smallest sizes, and that a replay is of smaller sizes and ends."""

    def peak(size: int, length: int) -> float:
        load = {
            "linear": size,
            "steps": -(-size // 8) * 8,
            "square": size * size / truth,
            "random": size * 7919 % (truth + 3),
        }[kind]
        return 10**6 * (fixed + (1 - fixed) * load / truth)

    training = Training(
        Device(10**6, peak=peak, seconds=lambda size: 1 + 0.05 * size),
        effective_batch,
        headroom=headroom,
        look_every=look_every,
        smallest=smallest,
        few_sizes=few_sizes,
    )
    try:
        for windows, share in limits:
            training.device.limit_bytes = int(10**6 * share)
            for count in range(windows):
                is_odd = (training.windows + count) % 5 == 4
                num_samples = min(effective_batch, others[count % len(others)]) if is_odd else effective_batch
                training.window(num_samples, strain="it thrashes" if strains and count % 17 == 0 else None)
                if training.is_settled:
                    plan = training.tuner.plan(effective_batch)
                    assert max(plan) <= max(size for size, _ in training.tried)
    except NothingFitsError:
        least = min(1.0, *(share for _, share in limits))
        assert kind == "random" or max(peak(size, 1) for size in range(1, 2 * smallest)) > least * 10**6


@given(
    windows=st.lists(st.integers(1, 600), min_size=1, max_size=60),
    truth=st.integers(1, 400),
    smallest=st.integers(1, 3),
    few_sizes=st.booleans(),
)
@settings(max_examples=150)
def test_windows_of_any_size_as_batches_of_a_loop_are(
    windows: list[int], truth: int, smallest: int, few_sizes: bool
) -> None:
    """``Accumulator`` searches again for a batch that is larger than any before, and settles for the largest."""
    device = Device(1000 + 7 * max(truth, 2 * smallest - 1), seconds=lambda size: 1 + 0.05 * size)
    training = Training(device, 1, ceiling=2**30, headroom=0, smallest=smallest, few_sizes=few_sizes)
    for num_samples in windows:
        if num_samples > training.num_samples:
            training.num_samples = num_samples
            training.tuner.searching = True
        training.window(num_samples)
    training.until_settled()
    assert max(training.run()) <= max(truth, 2 * smallest - 1)


def test_a_trial_that_no_window_has_room_for_is_not_waited_for() -> None:
    """Behind a first micro-batch of two, of two at least, a trial of four would leave nothing for the rest of seven."""
    training = Training(Device(1000 + 7 * 4), 7, headroom=0, smallest=2)
    assert training.until_settled() <= 3
    assert max(training.run()) <= 4


def test_a_trial_without_room_behind_another_micro_batch_comes_first() -> None:
    training = Training(Device(1000 + 7 * 3), 6, headroom=0, smallest=2)
    training.until_settled()
    assert training.run() == (3, 3)


# Windows whose size a schedule changes.


@given(
    sizes=st.lists(st.integers(1, 600), min_size=2, max_size=12),
    truth=st.integers(1, 400),
    smallest=st.integers(1, 2),
    few_sizes=st.booleans(),
    timed=st.booleans(),
)
@example(sizes=[3, 21], truth=1, smallest=2, few_sizes=False, timed=False)
@settings(max_examples=150)
def test_every_size_of_window_is_planned_for(
    sizes: list[int], truth: int, smallest: int, few_sizes: bool, timed: bool
) -> None:
    """As large as memory allows and the window can use, whatever windows came before, and no larger."""
    truth = max(truth, 2 * smallest - 1)
    device = Device(1003 + 7 * truth, seconds=(lambda size: 1.0 + size) if timed else None)
    training = Training(device, sizes[0], ceiling=2**30, headroom=0, smallest=smallest, few_sizes=few_sizes)
    for num_samples in sizes:
        if num_samples != training.num_samples:
            training.resize(num_samples)
        training.until_settled()
        plan = training.run()
        assert sum(plan) == num_samples
        assert max(plan) <= truth
        if not timed and not few_sizes and num_samples >= 8 * smallest:  # tiny windows have no room for trials
            nearly = max(1, int(0.95 * truth) - 1)
            best = cut(num_samples, min(nearly, num_samples), smallest)
            assert len(plan) <= len(best)
    # Two, unless the first windows were too small for a trial that is measured: then errors alone tell.
    assert few_sizes or len(training.ooms) <= (2 if training.trials else MOST_ERRORS)


def test_a_ramp_of_windows_that_are_never_alike_is_timed_all_the_same() -> None:
    """Larger micro-batches are slower here: that is found out although each window has one sample more."""
    training = Training(Device(10**6, seconds=lambda size: 1 + (size / 8) ** 2), 128, headroom=0)
    for num_samples in range(128, 228):
        training.resize(num_samples)
        training.run()
    assert 4 <= max(training.run()) <= 20
    assert training.is_settled


def test_windows_that_alternate_are_not_timed_for_ever() -> None:
    device = Device(10**6, seconds=lambda size: 1 + (size / 8) ** 2)
    training = Training(device, 64, headroom=0)
    for index in range(60):
        training.resize(64 if index % 2 else 500)
        training.run()
    assert not training.tuner.is_timing
    assert max(training.run()) <= 20


def test_windows_that_grow_need_no_timing_where_times_are_known() -> None:
    training = Training(Device(10**6, seconds=lambda size: 1 + (size / 8) ** 2), 128, headroom=0)
    training.until_settled()
    best = max(training.run())
    training.resize(1024)
    assert not training.tuner.is_timing
    assert max(training.run()) == pytest.approx(best, abs=2)


def test_a_window_that_is_one_micro_batch_may_be_asked_for_in_two() -> None:
    training = Training(Device(10**6), 101, headroom=0)
    training.until_settled()
    assert training.run() == (101,)
    assert training.tuner.in_two(101) == (51, 50)
    assert training.tuner.in_two(1) == (1,), "one sample cannot be cut"
    cut_already = Training(Device(1003 + 7 * 60), 101, headroom=0)
    cut_already.until_settled()
    assert cut_already.run() == (51, 50)
    assert cut_already.tuner.in_two(101) is None


def test_a_users_own_size_is_not_cut_in_two() -> None:
    assert Training(Device(10**6), 8, searches=False, largest=8).tuner.in_two(8) is None


def test_a_users_own_micro_batch_stays() -> None:
    training = Training(Device(10**6), 100, searches=False, largest=32)
    training.run()
    training.resize(1000)
    assert not training.tuner.searching
    assert max(training.run()) == 32


# Samples that differ in length.


def ragged(per_length: float, per_square: float, truth: int, seed: int) -> Training:
    """200 windows of 64 samples of log-normal lengths, on a device that holds so many of them; one is much longer."""
    rng = random.Random(seed)

    def each(length: float) -> float:
        return per_length * length + per_square * length**2

    device = Device(
        int(10**7 + each(90) * truth),
        peak=lambda size, length: 10**7 + size * each(length),
        seconds=lambda size: 1.0 + 0.01 * size,
    )
    most = max(length for length in range(1, 2000) if device.peak(1, length) <= 0.9 * device.limit_bytes)
    training = Training(device, 64)
    for window in range(200):
        lengths = [max(1, min(int(90 * math.exp(rng.gauss(0, 0.5))), most // 2)) for _ in range(64)]
        if window == 100:
            lengths[0] = most  # longer than any before
        training.window(64, sorted(lengths, reverse=True))
    return training


@pytest.mark.parametrize(("per_length", "per_square"), [(1e4, 0), (0, 100), (1e4, 100), (1e4, 10)])
@pytest.mark.parametrize("truth", [10, 30, 100])
def test_samples_that_differ_in_length_meet_almost_no_error(per_length: float, per_square: float, truth: int) -> None:
    """Whatever part of their memory is quadratic: at most one error in the first window, hardly any after it."""
    runs = [ragged(per_length, per_square, truth, seed) for seed in range(3)]
    first = [run.ooms.count(0) for run in runs]
    later = [len(run.ooms) - count for run, count in zip(runs, first, strict=True)]
    assert max(first) <= 1
    assert sum(later) <= 1
    assert all(100 not in run.ooms for run in runs), "a longer sample than any before"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("untold", [0, 4])
@pytest.mark.parametrize(("shortest", "longest"), [(28, 29), (20, 30), (20, 80)])
def test_batches_that_were_padded_are_run_whole_where_they_fit(
    shortest: int, longest: int, untold: int, seed: int
) -> None:
    """As a ``collate_fn`` pads them, each to a length of its own: many are a little longer than all that were tried.

    The lengths of the first ones may not be told, for these were alike.
    """
    rng = random.Random(seed)
    length = 0
    device = Device(
        10**12,
        peak=lambda size, length: 10**7 + 10**4 * size * length,
        seconds=lambda size: 1 + 0.05 * size * length / longest,
    )
    training = Training(device, 32)
    cuts = []
    for window in range(100):
        length = rng.randint(shortest, longest)
        cuts.append(training.window(32, [length] * 32 if window >= untold else None))
    # Where some are four times as long as others, times of plans that were timed on these tell less.
    assert cuts[60:].count((32,)) >= (38 if longest < 2 * shortest else 25)


@pytest.mark.parametrize("lengths", [(20, 30), (64, 128), (64, 640)])
def test_padded_windows_meet_almost_no_error_where_memory_is_tight(lengths: tuple[int, int]) -> None:
    """What is reached beyond what was tried is left alone there: one error in ten runs of 200 windows, or two."""
    errors = []
    for seed in range(20):
        rng = random.Random(seed)
        share = rng.choice([0.15, 0.3, 0.6])  # of the longest window
        training = Training(Device(int(1000 + 7 * 32 * lengths[1] * share)), 32)
        for _ in range(200):
            training.window(32, [rng.randint(*lengths)] * 32)
        errors.append(len(training.ooms))
    assert sum(errors) <= 4
    assert max(errors) <= 2


def test_padded_windows_give_way_to_strain() -> None:
    rng = random.Random(0)
    training = Training(Device(40_000), 512)
    cuts = [training.window(512, [rng.randint(38, 40)] * 512) for _ in range(60)]
    for index in range(90):
        cuts.append(training.window(512, [rng.randint(38, 40)] * 512, strain=None if index % 10 else "s"))
    assert max(map(len, cuts[50:60])) <= 6
    assert min(map(len, cuts[-10:])) >= 7


@given(
    windows=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=25),
    shares=st.lists(st.floats(0.3, 3), min_size=1, max_size=6),
    truth=st.integers(1, 100),
    smallest=st.integers(1, 3),
    few_sizes=st.booleans(),
    seed=st.integers(0, 10**6),
    linear_part=st.floats(0, 1),
)
@example(windows=[(3, True)], shares=[1.0], truth=1, smallest=2, few_sizes=False, seed=0, linear_part=0.0)
@settings(max_examples=150)
def test_laws_of_ragged_windows_mixed_with_plain_ones(
    windows: list[tuple[int, bool]],
    shares: list[float],
    truth: int,
    smallest: int,
    few_sizes: bool,
    seed: int,
    linear_part: float,
) -> None:
    rng = random.Random(seed)
    device = Device(
        10**6,
        peak=lambda size, length: (
            2e5 + 8e5 / truth / 100 * size * (linear_part * length + (1 - linear_part) * length**2 / 100)
        ),
        seconds=lambda size: 1 + 0.05 * size,
    )
    training = Training(device, 50, smallest=smallest, few_sizes=few_sizes)
    for index, (num_samples, is_ragged) in enumerate(windows):
        device.limit_bytes = int(10**6 * shares[index % len(shares)])
        lengths = [max(1, int(55 * math.exp(rng.gauss(0, 0.7)))) for _ in range(num_samples)]
        training.num_samples = num_samples
        try:
            training.window(num_samples, sorted(lengths, reverse=True) if is_ragged else None)
        except NothingFitsError:
            return


@given(
    windows=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    truth=st.integers(1, 100),
    floor=st.integers(2, 30),
    needs=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
@settings(max_examples=100)
def test_nothing_undercuts_the_smallest_that_the_user_asked_for(
    windows: list[int], truth: int, floor: int, needs: list[int]
) -> None:
    """Neither another mode of the model, nor memory that runs out, nor another process that goes on."""
    device = Device(1000 + 7 * max(truth, 2 * max(floor, *needs) - 1), seconds=lambda size: 1 + 0.05 * size)
    training = Training(device, 1, ceiling=2**30, headroom=0, floor=floor)
    for index, num_samples in enumerate(windows):
        training.tuner.set_smallest(need := needs[index % len(needs)])
        training.num_samples = max(training.num_samples, num_samples)
        training.tuner.searching = training.tuner.searching or num_samples == training.num_samples
        assert min(training.window(num_samples)) >= min(floor, num_samples)
        assert training.tuner.smallest == max(floor, need)
        assert training.tuner.min_micro_batch == (floor if floor > need else None)
    saved = training.tuner.state_dict()
    assert saved["smallest"] == need
    for other in (1, floor + 1):
        resumed = Training(device, 1, ceiling=2**30, headroom=0, floor=other).tuner
        resumed.load_state_dict(saved, is_same_device=True)
        assert resumed.smallest == max(other, need)
        assert min(resumed.plan(300)) >= resumed.smallest


def test_no_trial_of_longer_samples_has_fewer_than_the_smallest() -> None:
    tuner = Tuner(ceiling=8, limit_bytes=10**6, headroom=0, search=True, smallest=2)
    tuner.observe(2, 1000, length=10)
    assert tuner.trial_for(8, [10] * 8) == 4
    assert tuner.trial_for(8, [17] * 8) is None  # one of them counts for 28, and 40 is as far as a trial may go


def test_a_long_sample_on_its_own_is_no_measure_for_others() -> None:
    """It could not be cut smaller, and so says nothing of what to choose."""
    tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0, search=True)
    tuner.observe(2, 1000, length=10)
    tuner.committed((1, 2), [100, 5, 5])
    assert tuner.largest == 20
    tuner.committed((3, 2), [10, 10, 10, 5, 5])
    assert tuner.largest == 30


def test_the_rest_of_a_window_is_cut_by_what_fits_now() -> None:
    """What a sample counts for changes while a window is searched: it is no weight in other units that cuts the rest."""
    assert ragged(1e4, 100, 10, 1).ooms.count(0) == 0


# What an earlier run has learnt.


def recalling(
    past: Sequence[Trial], share: float, seconds: Callable[[int], float] | None = None, limit_bytes: int | None = None
) -> Training:
    device = Device(int(10**5 + 9 * 10**5 * share), peak=lambda size, _: 10**5 + 9 * 10**5 * size / 40, seconds=seconds)
    training = Training(device, 256)
    training.tuner.recall(past, 0, limit_bytes=limit_bytes)
    return training


@pytest.mark.parametrize("seconds", [None, lambda size: 1 + 0.1 * size, lambda size: 1 + 0.1 * max(size, 16)])
class TestRecall:
    @pytest.fixture
    def learnt(self, seconds: Callable[[int], float] | None) -> list[Trial]:
        first = recalling((), 1.0, seconds)
        first.until_settled()
        first.run(5)
        assert first.run()[0] == 37
        return [trial for trial in first.tuner.learnt() if trial.peak_bytes is not None]

    def test_begins_at_the_settled_size_and_verifies_it(self, learnt: list[Trial], seconds: None) -> None:
        second = recalling(learnt, 1.0, seconds)
        assert second.until_settled() == 1
        assert second.trials == [37]
        assert second.run()[0] == 37

    @pytest.mark.parametrize(("share", "expected"), [(0.5, 18), (0.25, 9)])
    def test_fits_into_less(self, learnt: list[Trial], seconds: None, share: float, expected: int) -> None:
        second = recalling(learnt, share, seconds)
        assert second.until_settled() == 1
        assert second.trials == [expected]
        assert second.ooms == []

    def test_grows_into_more(self, learnt: list[Trial], seconds: None) -> None:
        second = recalling(learnt, 4.0, seconds)
        second.run()
        assert second.trials == [37, 64, 128]
        second.until_settled()
        assert second.run() == (128, 128)
        assert second.ooms == []


@pytest.mark.parametrize("was_bounded", ["by a failure", "by its limit", ""])
def test_times_of_a_run_that_memory_has_ended_say_nothing_of_what_fits_now(was_bounded: str) -> None:
    """Sizes that fitted then gained nothing by growing, and those that fit now do."""
    seconds = {1: 1.0, 2: 2.05, 3: 3.1}
    past = [Trial(micro_batch=n, fits=True, peak_bytes=10**5 + 22_500 * n, seconds=seconds[n]) for n in (1, 2, 3)]
    if was_bounded == "by a failure":
        past.append(Trial(micro_batch=4, fits=False))
    limit_bytes = 10**5 + (4 if was_bounded == "by its limit" else 30) * 22_500
    training = recalling(past, 1.0, lambda size: seconds.get(size, 0.5 * size), limit_bytes)
    training.until_settled()
    training.run(20)
    assert (max(training.run()) > 3) is bool(was_bounded)


@pytest.mark.parametrize(("factor", "believed"), [(1.0, True), (1.3, True), (3.0, False), (0.2, False)])
def test_times_of_an_earlier_run_are_checked_on_windows(factor: float, believed: bool) -> None:
    """A device three times as fast or as slow as then may like other sizes."""
    past = [Trial(micro_batch=n, fits=True, peak_bytes=10**5 + 22_500 * n, seconds=1.0 * n) for n in (1, 8, 37)]
    training = recalling(past, 1.0, lambda size: factor * size)
    training.run(2)
    assert not training.tuner.searching
    training.run(1)
    assert training.tuner.searching is not believed
    training.until_settled()
    assert sum(training.run()) == 256


@given(
    past=st.lists(
        st.builds(
            Trial,
            micro_batch=st.integers(1, 5000),
            fits=st.booleans(),
            peak_bytes=st.integers(0, 10**7) | st.none(),
            seconds=st.floats(1e-3, 10) | st.none(),
            length=st.just(1) | st.integers(1, 100),
        ),
        max_size=6,
    ),
    held=st.integers(0, 10**6),
    share=st.floats(0.1, 4),
)
@settings(max_examples=100)
def test_a_past_that_was_another_models_breaks_no_law(past: list[Trial], held: int, share: float) -> None:
    training = recalling((), share, lambda size: 1 + 0.1 * size)
    training.tuner.recall(past, held)
    training.until_settled(60)
    plan = training.run()
    assert max(plan) in {size for size, _ in training.tried}
    assert len(training.ooms) <= 8


# Where every size is dear.


@pytest.mark.parametrize("truth", [20, 40, 100, 333, 1000, 10_000])
@pytest.mark.parametrize("effective_batch", [64, 256, 1024])
def test_a_search_of_few_sizes_begins_at_16(truth: int, effective_batch: int) -> None:
    device = Device(1000 + 7 * truth, seconds=lambda size: 5 + 0.1 * size)
    training = Training(device, effective_batch, few_sizes=True, headroom=0)
    training.until_settled()
    training.run(3)
    assert training.tried[0][0] == 16
    assert len({size for size, _ in training.tried}) <= 7
    assert len(training.ooms) <= (1 if truth > 30 else 4)  # from 16 to 64, and back by halves


class Plain:
    """A device of linear peaks, and the loop without its looks and clock."""

    def __init__(self, truth: int) -> None:
        self.limit_bytes = linear(truth)

    def tuner(self, effective_batch: int) -> Tuner:
        return Tuner(ceiling=effective_batch, limit_bytes=self.limit_bytes, headroom=0.0, search=True)

    def run(self, tuner: Tuner, num_samples: int) -> None:
        done = []
        attempt = tuner.window(num_samples)
        for piece in attempt:
            assert linear(piece.size) <= self.limit_bytes
            if piece.is_trial:
                attempt.fitted(Reading(piece, linear(piece.size)))
            done.append(piece.size)
        attempt.committed(tuple(done), None)


def lasting(tuner: Tuner, device: Plain, windows: int, num_samples: int, strain: str | None = None) -> list[str]:
    """Windows with a look before each; the reasons given."""
    reasons = []
    for _ in range(windows):
        reasons.append(tuner.look(device.limit_bytes, strain))
        device.run(tuner, num_samples)
        tuner.timed(1.0, num_samples)
        tuner.settle(num_samples)
    return [reason for reason in reasons if reason is not None]


@given(least=st.integers(1, 1000), limit=st.integers(1, 1000), headroom=st.sampled_from([0.0, 0.05, 0.5]))
def test_the_target_is_never_beyond_the_limit(least: int, limit: int, headroom: float) -> None:
    tuner = Tuner(ceiling=8, limit_bytes=1000, headroom=headroom, search=True)
    tuner.observe(1, least)
    tuner.look(limit, None)
    assert int(limit * (1 - headroom)) <= tuner.limits.target_bytes <= limit


def test_it_grows_again_after_a_limit_below_the_smallest() -> None:
    """What was judged by that limit is judged by today's."""
    device = Plain(100)
    tuner = device.tuner(64)
    assert lasting(tuner, device, 20, 64) == []
    assert tuner.plan(64) == (64,)
    full, low = device.limit_bytes, FIXED
    assert tuner.look(low, None) == "the limit fell to 1000 B"
    assert tuner.plan(64) == (1,) * 64
    device.limit_bytes = full
    lasting(tuner, device, 30, 64)
    assert tuner.plan(64) == (64,)


def test_the_limit_is_not_said_to_fall_when_it_has_not() -> None:
    tuner = Plain(100).tuner(64)
    for size in (1, 2):
        tuner.observe(size, linear(size))
    tuner._largest.weight, tuner.searching, tuner._cutter.full_window = 200, False, (200, None)
    assert tuner.look(tuner.limits.limit_bytes, None) == "it would need 2.34 KiB of 1.66 KiB"


def test_plans_are_not_timed_for_ever_where_no_window_is_full() -> None:
    device = Plain(20)
    tuner = device.tuner(64)
    while tuner.searching:
        device.run(tuner, 64)
        tuner.settle(64)
    fastest = tuner._fastest
    fastest.timing = Timing(20, cut=lambda weight: (weight,) * (64 // weight), trials=[], choose=None)
    fastest.timing._candidates, fastest.weight = [20, 10], 20
    for _ in range(UNTIMED):
        assert tuner.is_timing
        tuner.timed(1.0, 63)
        tuner.settle(64)
    assert not tuner.is_timing


def test_a_past_in_which_samples_cost_more_than_there_is_in_use_is_not_believed() -> None:
    device = Plain(100)
    tuner = device.tuner(64)
    tuner.recall([Trial(micro_batch=size, fits=True, peak_bytes=10**6 * size) for size in (1, 2)], FIXED)
    lasting(tuner, device, 10, 64)
    assert tuner.plan(64) == (64,)


@pytest.mark.parametrize("num_samples", [2, 9, 23])
@pytest.mark.parametrize("longest", [2, 30, 1000])
def test_a_search_among_samples_of_different_lengths_ends(num_samples: int, longest: int) -> None:
    """Also where no window has room for the next trial behind its longest samples."""
    tuner = Tuner(ceiling=num_samples, limit_bytes=10**9, headroom=0.0, search=True)
    lengths = sorted((1 + (longest - 1) * i**3 // (num_samples - 1) ** 3 for i in range(num_samples)), reverse=True)
    for _ in range(20):
        done = []
        attempt = tuner.window(num_samples, lengths)
        for piece in attempt:
            if piece.is_trial:
                attempt.fitted(Reading(piece, linear(piece.size * piece.length), 1.0 * piece.size))
            done.append(piece.size)
        assert sum(done) == num_samples
        attempt.committed(tuple(done), None)
        tuner.settle(num_samples, lengths)
    assert not tuner.searching
    assert tuner.reason() != "larger micro-batches do not fit"


def test_what_killed_the_last_process_counts_among_samples_of_different_lengths_too() -> None:
    tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0, search=True)
    tuner.killed(8, 7)
    assert next(iter(tuner.window(64, (7,) * 64))) == Piece(0, 1, 7, False)
    assert tuner.history == [Trial(micro_batch=8, fits=False, length=7)]


# Where nobody but us keeps the limit.


def kept(largest: int = 8) -> Tuner:
    return Tuner(ceiling=64, limit_bytes=1000, headroom=0.1, search=False, largest=largest)


def test_windows_that_pass_the_limit_twice_running_are_cut_smaller() -> None:
    tuner = kept()
    assert tuner.measured((8, 8), None, 950) is None, "once may be the heap's doing"
    assert tuner.measured((8, 8), None, 800) is None
    assert tuner.measured((8, 8), None, 950) is None
    assert tuner.measured((8, 8), None, 950) == (4, 4, 4, 4)
    assert tuner.largest == 4
    assert tuner.measured((4, 4, 4, 4), None, 950) is None, "it takes two again"


def test_the_smallest_is_not_cut_smaller() -> None:
    tuner = kept(largest=1)
    assert [tuner.measured((1, 1), None, 950) for _ in range(3)] == [None] * 3


def test_room_is_needed_only_when_the_next_peak_would_pass_the_target() -> None:
    tuner = kept()
    piece = Piece(0, 8)
    assert not tuner.needs_room(300, piece, 600), "300 that only the allocator holds, and 600 to come: within 900"
    assert tuner.needs_room(301, piece, 600)
    for size in (1, 2):
        tuner.observe(size, 100 * size)  # a model foretells 800
    assert not tuner.needs_room(99, piece, 600)
    assert tuner.needs_room(101, piece, 600)


def test_the_smallest_trial_past_the_limit_is_an_error() -> None:
    attempt = Tuner(ceiling=64, limit_bytes=1000, headroom=0.1, search=True).window(8)
    with pytest.raises(NothingFitsError):
        attempt.fitted(Reading(Piece(0, 1, is_trial=True), 1001))


def warming(num_samples: int) -> Tuner:
    tuner = Tuner(ceiling=num_samples, limit_bytes=10**6, headroom=0.0, search=True, warms_up=True)
    tuner.search.has_lengths = False
    return tuner


def one_window(tuner: Tuner, num_samples: int, start_bytes: int | None = None) -> list[tuple[int, bool]]:
    attempt, pieces = tuner.window(num_samples), []
    for piece in attempt:
        pieces.append((piece.size, piece.is_trial))
        if piece.is_trial:
            reading = Reading(piece, 100 + piece.size, 1.0)
            reading.start_bytes = start_bytes
            attempt.fitted(reading)
    attempt.committed(tuple(size for size, _ in pieces), None)
    tuner.settle(num_samples)
    return pieces


def test_a_size_is_measured_in_its_second_run() -> None:
    tuner = warming(32)
    first = one_window(tuner, 32)
    assert first[:6] == [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)]
    # There is no room for a second one of 11 in it.
    assert sum(size for size, _ in first) == 32
    tried: set[int] = set()
    for size, is_trial in [piece for _ in range(6) for piece in one_window(tuner, 32)]:
        if is_trial:
            assert size not in tried
            tried.add(size)
    assert 32 in tried
    assert tuner.largest == 32


def test_on_a_device_that_tells_what_tensors_hold_few_micro_batches_are_tried() -> None:
    """The rest of a window is no larger than what surely fits, and a size may be run for the first time as the first."""

    def pieces_of(tuner: Tuner) -> list[list[tuple[int, bool]]]:
        windows = []
        while tuner.searching:
            windows.append(one_window(tuner, 128, start_bytes=100))
        return windows

    roomy = warming(128)
    assert pieces_of(roomy) == [[(1, False), (1, True), (63, False), (63, True)], [(128, False)], [(128, True)]]
    narrow = Tuner(ceiling=128, limit_bytes=170, headroom=0.0, search=True, warms_up=True)
    assert pieces_of(narrow) == [[(1, False), (1, True), (63, False), (63, True)], [(64, False), (64, True)]]
    narrow = Tuner(ceiling=128, limit_bytes=110, headroom=0.0, search=True, warms_up=True)
    assert pieces_of(narrow)[0][:4] == [(1, False), (1, True), (10, False), (10, True)]


def test_what_was_run_once_is_measured_by_the_process_that_goes_on() -> None:
    tuner = warming(12)
    assert one_window(tuner, 12)[-1] == (3, False) or tuner.search.warm
    again = warming(12)
    again.load_state_dict(tuner.state_dict(), is_same_device=True)
    assert one_window(again, 12) == one_window(tuner, 12)
    assert tuner.state_dict()["_warm"] == tuner.search.warm
    assert "_warm" not in Tuner(ceiling=1, limit_bytes=1, headroom=0.0, search=True).state_dict()


def test_a_trial_in_which_memory_ran_out_does_not_fit() -> None:
    tuner = warming(32)
    tuner.observe(1, 10, 1.0)
    tuner.observe(4, 40, 1.0)
    tuner.observe(8, 80, 1.0, fell_short=True)
    assert (tuner.largest, [trial.fits for trial in tuner.history]) == (4, [True, True, False])
    alone = warming(32)
    alone.observe(1, 10, 1.0, fell_short=True)
    assert alone.history[0].fits, "there is nothing smaller"


@pytest.mark.parametrize(("num_samples", "smallest"), [(9, 2), (101, 1), (101, 2)])
def test_where_few_sizes_are_tried_one_without_room_to_be_run_twice_is_measured(
    num_samples: int, smallest: int
) -> None:
    tuner = Tuner(
        ceiling=num_samples,
        limit_bytes=10**6,
        headroom=0.0,
        search=True,
        smallest=smallest,
        few_sizes=True,
        warms_up=True,
    )
    windows = [one_window(tuner, num_samples) for _ in range(8)]
    tried = [size for window in windows for size, is_trial in window if is_trial]
    assert not tuner.searching
    assert num_samples in tried
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("ceiling", "why"), [(8, "max_micro_batch is reached"), (32, "larger micro-batches do not fit")]
)
def test_why_micro_batches_are_no_larger(ceiling: int, why: str) -> None:
    device = Linear(100 if ceiling == 8 else 9)
    tuner = Tuner(ceiling=ceiling, limit_bytes=device.limit_bytes, headroom=0.0, search=True)
    for _ in range(12):
        device.run(tuner, 32)
        tuner.settle(32)
    assert max(tuner.plan(32)) == 8
    assert tuner.reason() == why
