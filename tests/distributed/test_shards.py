"""The part of a window that a rank computes."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.distributed.shards import Part, Share, argument_of, measured_by_first, num_of_all_ranks, whole_of


class Counted:
    """A window of numbers."""

    def __init__(self, num_samples: int, lengths: tuple[int, ...] | None = None) -> None:
        self.num_samples, self.lengths = num_samples, lengths

    def micro_batch(self, start: int, size: int) -> Any:
        return list(range(start, start + size))

    def samples(self, positions: Any) -> Any:
        return list(positions)


@pytest.mark.parametrize("sizes", [(1, 0), (4, 3), (0, 2, 5), (6, 6, 6, 5)])
def test_shares_are_together_the_window(sizes: tuple[int, ...]) -> None:
    shares = [Share(Counted(sum(sizes)), sizes, rank) for rank in range(len(sizes))]
    assert tuple(share.num_samples for share in shares) == sizes
    assert [row for share in shares for row in share.micro_batch(0, share.num_samples)] == list(range(sum(sizes)))
    assert {num_of_all_ranks(share) for share in shares} == {sum(sizes)}


def test_positions_are_those_of_the_share() -> None:
    share = Share(Counted(7, (9, 8, 7, 6, 5, 4, 3)), (4, 3), 1)
    assert share.micro_batch(1, 2) == [5, 6]
    assert share.samples([0, 2]) == [4, 6]
    assert share.lengths == (5, 4, 3)
    assert measured_by_first(share).samples([0]) == [0]


def test_a_part_is_what_its_rank_was_given() -> None:
    parts = [Part(Counted(size, (9,) * size), rank, (2, 0, 5)) for rank, size in enumerate((2, 0, 5))]
    assert [part.num_samples for part in parts] == [2, 0, 5]
    assert {num_of_all_ranks(part) for part in parts} == {7}
    assert parts[2].micro_batch(1, 3) == [1, 2, 3]
    assert parts[2].samples([4]) == [4]
    assert parts[2].lengths == (9,) * 5
    assert {argument_of(part) for part in parts} == {"batch"}
    # The first rank measures on its own samples, and the others know how many these are.
    assert {measured_by_first(part).num_samples for part in parts} == {2}
    assert measured_by_first(parts[0]) is parts[0]
    with pytest.raises(LookupError):
        measured_by_first(parts[1]).micro_batch(0, 1)
    assert whole_of(parts[0]) is None


def test_a_plan_for_the_window_is_cut_where_shares_end() -> None:
    window = Counted(9)
    assert [Share(window, (5, 4, 0), rank).own_part([3, 3, 3]) for rank in range(3)] == [(3, 2), (1, 3), ()]
    assert [Share(window, (5, 4), rank).own_part([5, 2, 2]) for rank in range(2)] == [(5,), (2, 2)]
