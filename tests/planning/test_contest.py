"""The rung below is tried where larger micro-batches may gain, and kept where whole windows take less time on it."""

from __future__ import annotations

import pytest

from autoaccum.planning.contest import Above, Contest, is_worth_it
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
    contest.begin(Above(1.0, 2, 1))
    assert not contest.has_lost(3)
    assert timed(contest, 5.0, *[seconds] * 3).has_lost(3) is has_lost


def test_without_more_samples_at_a_time_it_has_lost_untimed() -> None:
    contest = Contest(is_allowed=True)
    contest.begin(Above(1.0, 2, 1))
    assert contest.has_lost(2)


def test_what_closes_it_and_what_opens_it_again() -> None:
    contest = timed(Contest(is_allowed=True), 1.0, 1.0, 1.0, 1.0)
    contest.close()
    assert (contest.is_open, contest.seconds) == (False, None)
    contest.reopen()
    assert contest.is_open
    contest.begin(Above(2.0, 1, 1))
    timed(contest, 1.0, 1.0, 1.0, 1.0)
    contest.reopen()
    assert (contest.above, contest.seconds) == (Above(2.0, 1, 1), 1.0), "what is tried is tried to its end"
    never = Contest(is_allowed=False)
    never.begin(None)
    assert not never.is_open


@pytest.mark.parametrize("above", [None, Above(0.5, 1, 2)])
def test_its_state(above: Above | None) -> None:
    contest, other = Contest(is_allowed=True), Contest(is_allowed=True)
    contest.begin(above)
    other.load_state_dict(contest.state_dict())
    assert (other.is_open, other.above) == (True, above)
    contest.close()
    other.load_state_dict(contest.state_dict())
    assert (other.is_open, other.above) == (False, None)
