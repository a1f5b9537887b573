"""The part of a window that a rank computes."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.ranks.shares import Share, of_all_ranks


class Counted:
    """A window of numbers."""

    def __init__(self, num_samples: int, lengths: tuple[int, ...] | None = None) -> None:
        self.num_samples, self.lengths = num_samples, lengths

    def micro_batch(self, start: int, size: int) -> Any:
        return list(range(start, start + size))

    def samples(self, positions: Any) -> Any:
        return list(positions)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 23])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_are_near_equal_and_together_the_window(num_samples: int, size: int) -> None:
    shares = [Share(Counted(num_samples), rank, size) for rank in range(size)]
    sizes = [share.num_samples for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert [row for share in shares for row in share.micro_batch(0, share.num_samples)] == list(range(num_samples))
    assert {of_all_ranks(share).num_samples for share in shares} == {num_samples}


def test_positions_are_those_of_the_share() -> None:
    share = Share(Counted(7, (9, 8, 7, 6, 5, 4, 3)), 1, 2)
    assert share.micro_batch(1, 2) == [5, 6]
    assert share.samples([0, 2]) == [4, 6]
    assert share.lengths == (5, 4, 3)
    assert share.whole.samples([0]) == [0]
