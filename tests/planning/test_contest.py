"""The rung below is tried where larger micro-batches may gain, and kept where whole windows take less time on it."""

from __future__ import annotations

import pytest

from autoaccum.planning.contest import LONGEST, Best, Contest, Room, is_worth_it, is_worth_rising
from autoaccum.planning.costs import TimeModel


def times(*points: tuple[int, float]) -> TimeModel:
    return TimeModel(points=points)


@pytest.mark.parametrize(
    ("sizes", "known", "is_worth"),
    [
        ((12,), times((6, 7.0), (12, 8.0)), False),
        ((1, 1), None, True),
        ((2, 2), times((2, 1.0)), True),
        # At once it would be 8/7 of (6 + 12) instead of 2 * 6 + 12: 20.6 of 24.
        ((6, 6), times((3, 9.0), (6, 12.0)), True),
        # 8/7 of (1 + 12) instead of 2 * 1 + 12: 14.9 of 14.
        ((6, 6), times((3, 4.0), (6, 7.0)), False),
        # But of six micro-batches: 14.9 of 18.
        ((2,) * 6, times((1, 2.0), (2, 3.0)), True),
        # Of sizes far below, where a device is not busy yet, nothing follows.
        ((8, 8), times((1, 4.0), (4, 4.0), (8, 8.0)), False),
        ((8, 8), times((1, 8.0), (4, 8.0), (8, 8.0)), True),
        # Larger ones take more than in proportion.
        ((2, 2), times((1, 1.0), (2, 3.0)), False),
    ],
)
def test_larger_micro_batches_are_worth_it_where_they_may_make_up_for_what_is_computed_twice(
    sizes: tuple[int, ...], known: TimeModel | None, is_worth: bool
) -> None:
    assert is_worth_it(sizes, known) is is_worth


@pytest.mark.parametrize(
    ("room", "most", "here", "below", "holds"),
    [
        (100, 12, 60, 40, True),  # one, and two
        (79, 12, 60, 40, False),  # one, and one
        (100, 12, 40, 30, False),  # two, and three
        (160, 12, 80, 40, True),  # two, and four
        (50, 12, 60, 40, False),  # none, and one: by a forecast alone nothing is left out
        (90, 12, 100, 40, True),  # none, and two
        (1000, 12, 20, 10, False),  # more than a window has on both
        (100, 1, 60, 40, False),  # two would be of no use
        (0, 12, 60, 40, False),
        (100, 12, 0, 0, False),
    ],
)
def test_a_rung_is_left_out_where_the_next_is_likely_to_hold_twice_as_much(
    room: int, most: int, here: int, below: int, holds: bool
) -> None:
    assert Room(room, most).holds_twice(here, below) is holds


@pytest.mark.parametrize(
    ("weights", "known", "is_worth"),
    [
        ((2,) * 6, None, True),
        ((2,) * 6, times((2, 1.0)), True),
        # Half as many in each: 7/8 of 12 * 1.9 is 19.95, and less than 1.15 times 18.
        ((2,) * 6, times((1, 1.9), (2, 3.0)), True),
        # 7/8 of 12 * 2 is 21, and more than 1.15 times 6 * 3.
        ((2,) * 6, times((1, 2.0), (2, 3.0)), False),
        # Of a device that is busy with one sample.
        ((4, 4, 4), times((2, 2.0), (4, 4.0)), True),
        ((1,) * 4, times((1, 1.0), (2, 1.0)), True),
    ],
)
def test_the_rung_above_is_worth_a_try_unless_half_as_many_samples_at_a_time_take_too_long(
    weights: tuple[int, ...], known: TimeModel | None, is_worth: bool
) -> None:
    assert is_worth_rising(weights, known) is is_worth


def timed(contest: Contest, *seconds: float) -> Contest:
    for one in seconds:
        contest.observe(one)
    return contest


def test_the_first_window_only_makes_ready_and_the_median_of_the_next_counts() -> None:
    contest = timed(Contest(is_allowed=True), 9.0, 1.0, 7.0)
    assert contest.seconds is None
    assert timed(contest, 2.0).seconds == 2.0
    assert not contest.has_lost(1), "there is none to compare it with"


@pytest.mark.parametrize(("seconds", "has_lost"), [(0.98, False), (0.995, True), (1.2, True)])
def test_it_has_to_gain_something(seconds: float, has_lost: bool) -> None:
    contest = Contest(is_allowed=True)
    contest.begin(Best(1.0, 2, 1))
    assert not contest.has_lost(3)
    assert timed(contest, 5.0, *[seconds] * 3).has_lost(3) is has_lost


@pytest.mark.parametrize(("seconds", "has_lost"), [(0.9, False), (1.005, False), (1.02, True)])
def test_the_rung_above_may_be_as_fast_and_has_fewer_samples_at_a_time(seconds: float, has_lost: bool) -> None:
    contest = Contest(is_allowed=True)
    contest.begin(Best(1.0, 4, -1))
    assert not contest.has_lost(2)
    assert timed(contest, 5.0, *[seconds] * 3).has_lost(2) is has_lost


def test_without_more_samples_at_a_time_it_has_lost_untimed() -> None:
    contest = Contest(is_allowed=True)
    contest.begin(Best(1.0, 2, 1))
    assert contest.has_lost(2)


def test_what_closes_it_and_what_opens_it_again() -> None:
    contest = timed(Contest(is_allowed=True), 1.0, 1.0, 1.0, 1.0)
    contest.close()
    assert (contest.is_open, contest.seconds) == (False, None)
    contest.reopen()
    assert contest.is_open
    contest.begin(Best(2.0, 1, 1))
    timed(contest, 1.0, 1.0, 1.0, 1.0)
    contest.reopen()
    assert (contest.best, contest.seconds) == (Best(2.0, 1, 1), 1.0), "what is tried is tried to its end"
    never = Contest(is_allowed=False)
    never.begin(None)
    assert not never.is_open


def test_a_rung_above_that_was_beaten_is_remembered_until_a_rung_is_begun_on() -> None:
    contest, other = Contest(is_allowed=True), Contest(is_allowed=True)
    contest.close(2)
    contest.reopen()
    contest.close()
    other.load_state_dict(contest.state_dict())
    assert (contest.beaten_with, other.beaten_with) == (2, 2)
    other.begin(None)
    assert other.beaten_with == 0
    assert "beaten" not in other.state_dict()


@pytest.mark.parametrize("above", [None, Best(0.5, 1, 2), Best(0.5, 2, -1)])
def test_its_state(above: Best | None) -> None:
    contest, other = Contest(is_allowed=True), Contest(is_allowed=True)
    contest.begin(above)
    other.load_state_dict(contest.state_dict())
    assert (other.is_open, other.best) == (True, above)
    contest.close()
    other.load_state_dict(contest.state_dict())
    assert (other.is_open, other.best) == (False, None)


def test_a_rung_is_tried_for_so_many_windows_also_by_a_run_that_is_stopped_and_goes_on() -> None:
    contest = Contest(is_allowed=True)
    contest.begin(Best(1.0, 2, 1))
    for _ in range(LONGEST):
        assert not contest.is_overdue()
        other = Contest(is_allowed=True)
        other.load_state_dict(contest.state_dict())
        contest = other
    assert contest.is_overdue()
    assert contest.windows == LONGEST
    contest.begin(Best(1.0, 2, 2))
    assert not contest.is_overdue(), "the next one"
