"""The rung below is tried where micro-batches are few samples, and kept where whole windows take less time on it."""

from __future__ import annotations

import pytest

from autoaccum.planning.contest import Above, Contest, is_worth_it


@pytest.mark.parametrize(
    ("sizes", "smallest", "is_worth"),
    [((1, 1), 1, True), ((2, 2), 1, True), ((3, 2), 1, False), ((4, 4), 2, True), ((5, 4), 2, False), ((1,), 1, False)],
)
def test_small_micro_batches_are_worth_it_where_windows_are_cut(
    sizes: tuple[int, ...], smallest: int, is_worth: bool
) -> None:
    assert is_worth_it(sizes, smallest) is is_worth


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
