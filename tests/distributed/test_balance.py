"""How much of a window each rank computes."""

from __future__ import annotations

import pytest

from autoaccum.distributed.balance import Shares, Stint
from autoaccum.planning.cuts import near_equal


def seen(
    shares: Shares, num_samples: int, speeds: list[float], windows: int, is_settled: bool = True
) -> tuple[int, ...]:
    """Return the shares after so many windows of ranks that are so fast."""
    for _ in range(windows):
        sizes = shares.of(num_samples)
        assert sum(sizes) == num_samples
        shares.saw([
            Stint((size,) if size else (), size / speed, 0.0, 0, 0, is_settled)
            for size, speed in zip(sizes, speeds, strict=True)
        ])  # fmt: skip
    return shares.of(num_samples)


class TestShares:
    @pytest.mark.parametrize("num_samples", [1, 2, 7, 23])
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_they_are_near_equal_whatever_was_seen_unless_they_go_by_speed(self, num_samples: int, size: int) -> None:
        shares = Shares(size, "equal")
        assert seen(shares, num_samples, [1.0 + rank for rank in range(size)], 10) == near_equal(num_samples, size)

    @pytest.mark.parametrize(
        ("speeds", "expected"),
        [([1.0, 2.0], (10, 20)), ([3.0, 1.0], (23, 7)), ([2.0, 1.0, 3.0], (10, 5, 15)), ([1.0, 50.0], (0, 30))],
    )
    def test_all_ranks_end_at_once(self, speeds: list[float], expected: tuple[int, ...]) -> None:
        assert seen(Shares(len(speeds), "speed"), 30, speeds, 5) == expected

    def test_ranks_that_are_alike_stay_equal(self) -> None:
        assert seen(Shares(3, "speed"), 23, [1.0, 1.01, 0.99], 20) == near_equal(23, 3)

    def test_a_window_in_which_something_was_tried_says_nothing(self) -> None:
        shares = Shares(2, "speed")
        assert seen(shares, 30, [1.0, 2.0], 20, is_settled=False) == (15, 15)
        assert seen(shares, 30, [1.0, 2.0], 4) == (15, 15), "five of them decide"
        assert seen(shares, 30, [1.0, 2.0], 1) == (10, 20)

    def test_one_odd_window_changes_nothing(self) -> None:
        shares = Shares(2, "speed")
        seen(shares, 30, [1.0, 1.0], 2)
        seen(shares, 30, [0.01, 1.0], 1)
        assert seen(shares, 30, [1.0, 1.0], 10) == (15, 15)

    def test_a_rank_that_becomes_slow_gets_less_and_more_again_when_it_is_fast(self) -> None:
        shares = Shares(2, "speed")
        assert seen(shares, 30, [1.0, 1.0], 10) == (15, 15)
        assert seen(shares, 30, [1.0, 4.0], 10) == (6, 24)
        assert seen(shares, 30, [1.0, 1.0], 10) == (15, 15)

    def test_a_rank_without_samples_is_measured_again_now_and_then(self) -> None:
        shares = Shares(2, "speed")
        assert seen(shares, 30, [1.0, 90.0], 6) == (0, 30)
        assert seen(shares, 30, [1.0, 90.0], 98) == (0, 30)
        assert seen(shares, 30, [1.0, 1.0], 1) == (1, 29)
        assert seen(shares, 30, [1.0, 1.0], 30) == (15, 15)

    def test_windows_of_fewer_samples_than_ranks_leave_some_without(self) -> None:
        assert seen(Shares(4, "speed"), 2, [1.0] * 4, 20) == (1, 1, 0, 0)

    @pytest.mark.parametrize(
        ("num_samples", "smallest", "expected"),
        [(9, 2, (3, 2, 2, 2)), (7, 2, (3, 2, 2, 0)), (5, 3, (5, 0, 0, 0)), (2, 3, (2, 0, 0, 0)), (3, 1, (1, 1, 1, 0))],
    )
    def test_a_share_that_is_too_small_is_none(
        self, num_samples: int, smallest: int, expected: tuple[int, ...]
    ) -> None:
        assert Shares(4, "equal", smallest).of(num_samples) == expected

    def test_one_by_speed_that_is_too_small_is_none(self) -> None:
        shares = Shares(3, "speed", 3)
        assert seen(shares, 30, [10.0, 9.0, 1.0], 5) == (16, 14, 0)
        assert shares.of(2) == (2, 0, 0)
