"""Windows are measured ever more seldom, and none of an epoch more often than another."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from autoaccum.planning.noise import OFTEN, SELDOM, WORTH, is_due, worth


def test_windows_are_measured_the_more_seldom_the_more_there_were() -> None:
    due = [number for number in range(20_000) if is_due(number)]
    assert due[:OFTEN] == list(range(OFTEN))
    counts = [sum(start <= number < start + 500 for number in due) for start in (0, 500, 1000, 19_000)]
    assert counts == [63, 11, 8, 8]
    assert max(after - before for before, after in pairwise(due)) < 2 * SELDOM
    assert sum(is_due(number, 4) for number in range(10_000, 20_000)) == 2500


@pytest.mark.parametrize("period", [2, 3, 8, 16, 64, 100])
def test_no_period_of_the_data_keeps_step_with_them(period: int) -> None:
    """Of data that are not shuffled each window of an epoch is measured as often as any other."""
    counts = Counter(number % period for number in range(2000, 2000 + 6400 * period) if is_due(number))
    assert len(counts) == period
    assert max(counts.values()) <= 1.1 * min(counts.values())


def test_an_estimate_stands_for_no_more_than_four_windows() -> None:
    assert [worth(number) for number in (0, 15, 16, 47, 48, 10_000)] == [1, 1, 2, 3, 4, WORTH]
    assert worth(10_000, 3) == 3
