"""Counts that may be kept from 0 are told from counts that cannot be."""

from __future__ import annotations

import math

import pytest
import torch

from autoaccum.loss.terms import Term
from autoaccum.window.kept import Least, doubtful, least_of, may_stand_for

COUNTED, ONE = Term("mean", is_counted=True), Term("mean", is_counted=True, is_one=True)
SOME, NOTHING = torch.tensor(2.5), torch.tensor(0.0)


def doubts(
    counts: list[float],
    terms: list[Term | None],
    values: list[torch.Tensor | None],
    *,
    is_known: bool = False,
    also_ones: bool = False,
) -> list[int]:
    least = least_of(counts, terms, Least())
    return doubtful(counts, terms, values, least, is_known=is_known, also_ones=also_ones)


def test_what_adds_nothing_is_in_doubt_where_no_count_is_lower() -> None:
    assert doubts([1.0, 5.0, 1.0], [ONE, COUNTED, ONE], [NOTHING, NOTHING, SOME]) == [0]
    assert doubts([6.0, 2.0], [COUNTED, COUNTED], [SOME, NOTHING]) == [1], "whatever it was multiplied with"
    assert doubts([-1.0, -5.0], [ONE, COUNTED], [NOTHING, SOME]) == [0]


def test_weights_may_add_up_to_less_than_one() -> None:
    assert doubts([1.0, 1.7, 1.0], [ONE, COUNTED, ONE], [SOME, SOME, SOME]) == [0, 2]
    assert doubts([1.0, 2.0, 1.0], [ONE, COUNTED, ONE], [SOME, SOME, SOME]) == [], "of entries that each count one"
    assert doubts([1.3, 1.7], [COUNTED, COUNTED], [SOME, SOME]) == [], "neither was divided by 1"
    kept = doubts([1.0, 2.0, 1.0], [ONE, COUNTED, ONE], [SOME, SOME, NOTHING], is_known=True, also_ones=True)
    assert kept == [0, 2], "where those that are not 0 were seen to be kept"


def test_the_lowest_may_be_any_number_where_it_is_known_to_be_kept() -> None:
    """As by ``clamp(min=1) * 4``, and by ``clamp(min=2)``, of which a count of 3 shows that it counts ones."""
    some = [SOME, SOME, SOME]
    assert doubts([4.0, 8.0, 4.0], [COUNTED] * 3, list(some), is_known=True, also_ones=True) == [0, 2]
    assert doubts([2.0, 4.0, 2.0], [COUNTED] * 3, list(some), is_known=True) == []
    assert doubts([2.0, 3.0, 2.0], [COUNTED] * 3, list(some), is_known=True) == [0, 2]
    assert doubts([2.0, 3.0, 2.0], [COUNTED] * 3, list(some)) == []


def test_a_constant_of_the_program_is_no_count() -> None:
    assert doubts([4.0, 7.0], [ONE, ONE], [SOME, SOME]) == [], "as in 1.0 * mean"
    assert doubts([1.0, 1.0], [ONE, ONE], [SOME, SOME], is_known=True) == [0, 1], "unless some are known to be kept"


def test_what_was_not_seen_is_in_doubt_where_it_was_divided_by_one() -> None:
    assert doubts([1.0, 3.0], [ONE, COUNTED], [None, None]) == [0]
    assert doubts([2.0, 3.0], [COUNTED, COUNTED], [None, None]) == []


def test_what_pytorch_or_the_user_counts_and_what_counts_nothing_is_not_in_doubt() -> None:
    own = Term("mean", is_items=True, is_one=True)
    assert doubts([1.0, 0.0, 1.0, 3.0], [own, ONE, None, COUNTED], [NOTHING, NOTHING, NOTHING, SOME]) == []
    # Of a list as long as the batch the graph shows no count, and samples stand for it.
    assert doubts([1.0, 3.0], [ONE, Term("unknown")], [NOTHING, SOME]) == []


def test_the_lowest_count_is_that_of_all_windows() -> None:
    least = least_of([2.0, 4.0], [COUNTED, COUNTED], Least())
    assert least == Least(2.0, is_uneven=False, is_always_one=False)
    assert least_of([0.0, 3.0], [None, COUNTED], least) == Least(2.0, is_uneven=True, is_always_one=False)
    found = doubtful([3.0], [COUNTED], [NOTHING], least, is_known=True, also_ones=False)
    assert found == [], "another one was lower, and is not kept"
    assert least_of([0.0], [COUNTED], Least()).lowest == math.inf


@pytest.mark.parametrize(
    ("true", "count", "expected"),
    [(0.0, 1.0, True), (0.4, 1.0, True), (1.0, 1.0, True), (1.1, 1.0, False), (-0.1, 1.0, False), (-0.4, -1.0, True)],
)
def test_a_count_is_kept_from_below_alone(true: float, count: float, expected: bool) -> None:
    assert may_stand_for(true, count) is expected
