"""Windows are cut by the weight that a micro-batch may have."""

from __future__ import annotations

import pytest

from autoaccum.planning.cutter import Cutter

LENGTHS = (4, 2, 2, 1)
"""Before anything was tried a sample weighs the square of its length: 16, 4, 4 and 1."""


def cutter(*, smallest: int = 1, ceiling: int = 64, by_samples: bool = False) -> Cutter:
    return Cutter(smallest=smallest, ceiling=ceiling, by_samples=by_samples)


def test_samples_that_are_alike_are_cut_by_their_number() -> None:
    assert cutter().sizes(10, None, 4) == (4, 3, 3)
    assert cutter().sizes(10, None, 64) == (10,)
    assert cutter(smallest=2).sizes(5, None, 2) == (3, 2)


def test_samples_of_one_length_are_cut_near_equally_too() -> None:
    assert cutter().sizes(5, (3,) * 5, 29) == (3, 2), "three of 9 weigh 27"
    assert cutter().sizes(5, (3,) * 5, 26) == (2, 2, 1)
    assert cutter().sizes(2, (3, 3), 1) == (1, 1), "nothing smaller is possible"


def test_samples_of_different_lengths_are_cut_by_what_they_weigh_with_padding() -> None:
    assert cutter().sizes(4, LENGTHS, 64) == (4,)
    assert cutter().sizes(4, LENGTHS, 63) == (2, 2)
    assert cutter().sizes(4, LENGTHS, 32) == (1, 3), "as many as (2, 2), and as equal in weight as can be"
    assert cutter().sizes(4, LENGTHS, 11) == (1, 2, 1)
    assert cutter(smallest=2).sizes(4, LENGTHS, 11) == (2, 2)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_window_has_as_many_micro_batches_as_are_wanted(lengths: tuple[int, ...] | None) -> None:
    assert cutter().sizes(4, lengths, 64, fewest=2) == (2, 2)
    assert cutter().sizes(4, lengths, 64) == (4,)
    assert cutter(smallest=3).sizes(4, lengths, 64, fewest=2) == (4,), "it has too few samples"


def test_the_largest_is_that_of_the_window_or_the_run() -> None:
    assert cutter().heaviest(9, each=3) == 27
    assert cutter(ceiling=4).heaviest(9, each=3) == 12


def test_weights_of_a_window() -> None:
    made = cutter()
    assert made.weights((1, 3), LENGTHS) == [16, 12]
    assert made.weights((1, 3)) == [1, 3]
    assert (made.work((4, LENGTHS)), made.work((4, None))) == (25, 4)
    assert (made.each(LENGTHS), made.each(None)) == (16, 1)
    assert made.weights_of((4, LENGTHS), 16) == [16, 12]


def test_sizes_of_a_users_own_are_of_samples_however_long() -> None:
    made = cutter(by_samples=True)
    assert made.lengths_that_count(LENGTHS) is None
    assert cutter().lengths_that_count(LENGTHS) == LENGTHS
    assert made.sizes(4, LENGTHS, 3) == (2, 2)
    assert made.weights((1, 3), LENGTHS) == [1, 3]
    assert (made.work((4, LENGTHS)), made.each(LENGTHS)) == (4, 1)


def test_before_the_first_full_window_it_stands_for_one_micro_batch() -> None:
    made = cutter()
    assert made.weights_of_full(7) == [7]
    made.full_window = (10, None)
    assert made.weights_of_full(7) == [5, 5]
