"""The search on behalf of windows: which size is worth a trial in them, and where there is room for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoaccum.planning.costs import MemoryModel, Trial
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.limits import Limits
from autoaccum.planning.searching import Searching


def peak(weight: int) -> int:
    return 1000 + 7 * weight


def searching(
    *tried: int,
    limit_bytes: int = 10**6,
    few_sizes: bool = False,
    smallest: int = 1,
    ceiling: int = 256,
    seconds: Callable[[int], float] | None = None,
    length: int = 1,
    fastest_up_to: Callable[[int], int | None] = lambda weight: None,
) -> Searching:
    """Make a search that knows the peaks of trials of such sizes, all of which fitted."""
    cutter = Cutter(smallest=smallest, ceiling=ceiling, by_samples=False)
    for size in tried:
        trial = Trial(
            micro_batch=size,
            fits=True,
            peak_bytes=peak(size * length),
            seconds=None if seconds is None else seconds(size),
            length=length,
        )
        cutter.history.add(trial, reweigh=True)
    return Searching(cutter, Limits(limit_bytes, 0.0), fastest_up_to, few_sizes=few_sizes)


def test_it_begins_with_the_smallest_size() -> None:
    assert searching().trial_for(256) == 1
    assert searching(smallest=2).trial_for(256) == 2


def test_where_sizes_are_dear_it_begins_with_a_large_one_and_grows_faster() -> None:
    assert searching(few_sizes=True).trial_for(256) == 16
    assert searching(few_sizes=True).trial_for(20) == 10, "half a window, for another to come behind it"
    assert searching(16, few_sizes=True).trial_for(256) == 64
    assert searching(16).trial_for(256) == 32


@pytest.mark.parametrize(("truth", "trial"), [(127, None), (128, 128)])
def test_only_a_size_that_makes_a_better_plan_is_worth_a_trial(truth: int, trial: int | None) -> None:
    """256 samples take three micro-batches of 86 at most, and as many of 127."""
    assert searching(1, 2, 86, limit_bytes=peak(truth)).trial_for(256) == trial


def test_the_size_is_the_one_that_the_plan_would_have() -> None:
    assert searching(1, 2).trial_for(5) == 3, "of up to 4: (3, 2)"


def test_a_model_is_trusted_further_where_it_would_do_no_harm_to_be_wrong_by_half() -> None:
    """Four times as far as what fitted, if twice what it foretells there is within the limit."""
    enough = 2 * peak(128)
    assert searching(16, 32, few_sizes=True, limit_bytes=enough).trial_for(256) == 128
    assert searching(16, 32, few_sizes=True, limit_bytes=enough - 1).trial_for(256) == 64
    assert searching(16, 32, limit_bytes=enough).trial_for(256) == 64, "a whole window may take more than its halves"
    made = searching(16, 32, limit_bytes=enough)
    made.has_lengths = True
    assert made.trial_for(256) == 128


def test_it_ends_where_larger_ones_are_no_faster() -> None:
    made = searching(1, 2, 4, 8, 16, seconds=float)
    assert made.is_enough(16)
    assert made.trial_for(2048) is None
    made.doubts_plateau = True
    assert not made.is_enough(16)
    assert made.trial_for(256) == 32
    made.doubts_plateau, made.goal = False, 24
    assert made.trial_for(256) == 24, "to grow again, whatever was no faster"
    assert not searching(1, 2, 4, 8, 16, seconds=lambda size: 1.0).is_enough(16)


def test_a_full_batch_that_surely_fits_is_tried_although_trials_gain_nothing() -> None:
    """One disturbed trial is enough to end a search, and then the full batch would be split for nothing."""
    enough = peak(2 * 256)
    assert searching(1, 2, 4, 8, seconds=float, limit_bytes=enough + 1).trial_for(256) == 256
    assert searching(1, 2, 4, 8, seconds=float, limit_bytes=enough - 1).trial_for(256) is None
    assert searching(1, 2, 4, 8, 256, seconds=float).trial_for(256) is None
    # Trials that all take the same tell nothing of what a sample adds.
    alike = searching(limit_bytes=enough)
    for size in (1, 2, 4, 8):
        alike._cutter.history.add(Trial(micro_batch=size, fits=True, peak_bytes=1000, seconds=size), reweigh=True)
    assert alike.trial_for(256) is None
    alike._limits = Limits(1001 * 256 // 8, 0.0)
    assert alike.trial_for(256) == 256
    assert searching(1, 2, 4, 8, seconds=float, ceiling=128).trial_for(256) is None
    of_earlier_run = searching(1, 2, 4, 8, seconds=float, limit_bytes=enough + 1)
    of_earlier_run.known = 8
    assert of_earlier_run.trial_for(256) is None
    refused = searching(1, 2, 4, 8, seconds=float, limit_bytes=enough + 1)
    refused._cutter.history.add(Trial(micro_batch=256, fits=False), reweigh=False)
    assert refused.trial_for(256) is None


def test_growing_again_ends_at_its_goal() -> None:
    made = searching(1, 2, 4)
    made.goal = 6
    assert made.trial_for(256) == 6
    made.goal = 4
    assert made.trial_for(256) is None


def recalling(limit_bytes: int = 10**6, fastest_up_to: Callable[[int], int | None] = lambda weight: None) -> Searching:
    """Make a search that an earlier run has left 37 samples and their memory to."""
    made = searching(limit_bytes=limit_bytes, fastest_up_to=fastest_up_to)
    made.known = 37
    made._cutter.history.prior = MemoryModel(fixed_bytes=1000, bytes_per_sample=7)
    return made


def test_it_begins_with_what_an_earlier_run_has_settled_on_as_far_as_that_fits() -> None:
    assert recalling().trial_for(256) == 37
    assert recalling(limit_bytes=peak(20)).trial_for(256) == 20
    assert recalling(fastest_up_to=lambda weight: weight - 25).trial_for(256) == 12


def test_an_earlier_runs_memory_says_how_much_more_fits_after_one_trial() -> None:
    made = recalling(limit_bytes=peak(60))
    made._cutter.history.add(Trial(micro_batch=37, fits=True, peak_bytes=peak(37)), reweigh=True)
    assert made.trial_for(256) == 52, "as in a plan of up to 60"


def test_what_an_earlier_run_found_to_be_the_fastest_is_enough() -> None:
    made = recalling(fastest_up_to=lambda weight: weight - 25)
    assert [made.is_enough(weight) for weight in (11, 12, 36)] == [False, True, True]
    assert not made.is_enough(37), "of which that run knew nothing larger"


def test_where_it_is_told_what_is_there_without_a_sample_it_jumps_as_far_as_surely_fits() -> None:
    made = searching(1)
    assert made.trial_for(256) == 2
    made.start_bytes = 1000
    assert made.trial_for(256) == 64
    assert made.trial_for(32) == 32
    made = searching(1, limit_bytes=peak(20))
    made.start_bytes = 1000
    assert made.trial_for(256) == 20
    made._cutter.history.add(Trial(micro_batch=16, fits=False), reweigh=True)
    assert made.trial_for(256) == 2, "something is not as it seems"


@pytest.mark.parametrize(("gradient_bytes", "trial"), [(0, None), (23, None), (24, 12)])
def test_a_whole_window_is_tried_where_it_fits_without_the_gradients_that_it_does_not_run_beside(
    gradient_bytes: int, trial: int | None
) -> None:
    made = searching(1, 2, 4, 6, limit_bytes=peak(12) - 24)
    made.gradient_bytes = gradient_bytes
    assert made.trial_for(12) == trial
    assert made.may_try(12, None, planned=6) == (trial is not None)


def test_a_whole_window_is_not_tried_where_it_has_failed_or_is_more_than_may_be() -> None:
    made = searching(1, 2, 4, 6, limit_bytes=peak(12) - 24, ceiling=11)
    made.gradient_bytes = 1000
    assert made.trial_for(12) is None
    made = searching(1, 2, 4, 6, limit_bytes=peak(12) - 24)
    made.gradient_bytes = 1000
    assert made.trial_for(12) == 12
    made._cutter.history.add(Trial(micro_batch=12, fits=False), reweigh=True)
    assert made.trial_for(12) is None


def test_of_longer_samples_a_trial_has_fewer() -> None:
    made = searching(1, length=4)
    assert made.trial_for(8, (4,) * 8) == 2
    assert made.trial_for(8, (2,) * 8) == 4
    assert made.trial_for(8, (8,) * 8) is None, "one of them weighs 16, and 8 is as far as a trial may go"


def test_a_trial_leaves_nothing_or_enough_for_another_micro_batch() -> None:
    made = searching(smallest=2)
    assert [made.has_room(4, left) for left in (3, 4, 5, 6)] == [False, True, False, True]


def test_a_planned_micro_batch_comes_first_where_there_is_room_for_both() -> None:
    made = searching(smallest=2)
    assert made.first_size(6, None, trial=2, planned=2) == 2
    assert made.first_size(8, None, trial=3, planned=2) == 2
    assert made.first_size(6, None, trial=3, planned=2) == 3, "2, 3 and then 1 would be too few"
    assert made.first_size(6, (9,) * 5 + (8,), trial=3, planned=2) == 2, "shorter samples behind it may have room"
    assert searching(few_sizes=True).first_size(64, None, trial=16, planned=1) == 16


def test_a_window_may_try_what_it_has_room_for() -> None:
    assert searching().may_try(8, None, planned=1)
    assert searching().may_try(1, None, planned=1), "a trial that is the whole window"
    made = searching(smallest=2)
    assert not made.may_try(3, None, planned=3)
    assert made.may_try(4, None, planned=2)
    assert searching(smallest=2, few_sizes=True).may_try(3, None, planned=3)
    assert not searching(256).may_try(256, None, planned=256), "there is nothing larger of any use"


def test_the_samples_behind_the_first_micro_batch_are_the_ones_to_try() -> None:
    made = searching(1, length=4)
    assert made.may_try(4, (4, 4, 4, 4), planned=1)
    assert not made.may_try(4, (4, 4, 4, 3), planned=4), "nothing is left"
    assert not made.may_try(3, (4, 4, 4), planned=2), "one is left, and two are to be tried"
    assert not made.may_try(3, (4, 1, 1), planned=1), "the two that are left weigh less than what fitted"


def test_where_splits_are_not_exact_nothing_is_fast_enough() -> None:
    made = searching(1, 2, 4, 8, 16, seconds=float)
    made.wants_full = True
    assert made.trial_for(2048) == 32
