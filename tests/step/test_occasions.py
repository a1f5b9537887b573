"""A run is measured when there is reason to, and less and less often where there is none."""

from __future__ import annotations

import pytest

from autoaccum.step.verification import Occasions

pytestmark = pytest.mark.measured


def passed(**entries: object) -> Occasions:
    made = Occasions()
    made.status = "passed"
    made.measured(1)
    vars(made).update(entries)
    return made


def test_windows_are_looked_at_less_and_less() -> None:
    made = Occasions()
    looks = []
    for number in (1, 99, 100, 101, 109, 110, 1000, 1001):
        made.looked(number, is_measured=True)
        looks.append(made.next_look)
    assert looks == [2, 100, 110, 110, 110, 120, 1100, 1100]


def test_once_a_run_is_measured_windows_that_are_to_be_measured_are_looked_at() -> None:
    made, looks = passed(), []
    for number in range(1, 200):
        if number >= made.next_look:
            looks.append(number)
            if made.reason(number, is_surprising=False) is not None:
                made.measured(number)
            made.looked(number, is_measured=True)
    assert looks == [1, 2, 3, 10, 100]
    made.status = "failed"
    made.looked(200, is_measured=True)
    assert made.next_look > 10**9


def test_losses_are_compared_in_rounds() -> None:
    made, rounds = passed(), []
    for number in range(1, 1002):
        if (reason := made.reason(number, is_surprising=False)) is not None:
            rounds.append((number, reason))
            made.measured(number)
    assert rounds[0] == (2, "again"), "the samples of a first window may be alike"
    assert rounds[1:] == [(number, "losses") for number in (3, 10, 100, 1000)]


def test_until_something_was_measured_it_is_tried_four_times() -> None:
    made = Occasions()
    reasons = []
    for number in range(1, 7):
        assert made.is_foreseen(number) is (made.tries > 0)
        reasons.append(made.reason(number, is_surprising=False))
        made.tries -= reasons[-1] is not None
    assert reasons == ["whole"] * 4 + [None] * 2


def test_what_has_failed_is_measured_no_more() -> None:
    made = passed(status="failed")
    assert made.reason(1000, is_surprising=True) is None
    assert not made.is_foreseen(1000)


def test_of_surprises_the_first_four_are_measured_and_then_every_doubling() -> None:
    made = passed(next_round=10**6)
    found = [made.reason(5, is_surprising=True) for _ in range(40)]
    assert [at for at, reason in enumerate(found, start=1) if reason == "whole"] == [1, 2, 3, 4, 8, 16, 32]


@pytest.mark.parametrize(("number", "is_foreseen"), [(1, False), (2, True), (3, True)])
def test_what_is_foreseen_is_what_comes_round(number: int, is_foreseen: bool) -> None:
    assert passed().is_foreseen(number) is is_foreseen


def test_all_of_it_is_kept() -> None:
    made, again = passed(surprises=3, tries=-2, next_look=7), Occasions()
    again.load_state_dict(made.state_dict())
    assert vars(again) == vars(made) != vars(Occasions())
