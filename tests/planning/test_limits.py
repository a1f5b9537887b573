"""The target is the limit less the headroom, unless the smallest micro-batch needs some of that."""

from __future__ import annotations

import pytest

from autoaccum.planning.limits import Limits, target_bytes


@pytest.mark.parametrize(
    ("least_bytes", "expected"),
    [
        (0, 950),
        (950, 950),
        (951, 997),  # 5 % of the 49 above it are free, rounded up
        (980, 999),
        (1000, 1000),
        (1001, 950),  # beyond the limit there is nothing to be shared out
    ],
)
def test_the_headroom_is_of_what_is_left_above_the_least(least_bytes: int, expected: int) -> None:
    assert target_bytes(1000, 0.05, least_bytes) == expected


def test_without_headroom_the_target_is_the_limit() -> None:
    assert [target_bytes(1000, 0.0, least) for least in (0, 999, 1000)] == [1000] * 3


def test_a_limit_that_moves_moves_the_target() -> None:
    limits = Limits(1000, 0.1)
    assert (limits.limit_bytes, limits.target_bytes) == (1000, 900)
    limits.heed(2000)
    assert (limits.limit_bytes, limits.target_bytes) == (2000, 1800)
    assert limits.target_of(500) == 450
    assert limits.target_bytes == 1800, "to ask is not to heed"


def test_the_least_is_remembered_under_other_limits() -> None:
    limits = Limits(1000, 0.1)
    limits.learn_least(950)
    assert limits.target_bytes == 995
    limits.heed(960)
    assert limits.target_bytes == 959
    limits.heed(940)
    assert limits.target_bytes == 846


def test_few_samples_may_use_the_headroom_and_nothing_may_pass_the_limit() -> None:
    limits = Limits(1000, 0.1)
    assert [limits.allows(peak, is_smallest=False) for peak in (900, 901)] == [True, False]
    assert [limits.allows(peak, is_smallest=True) for peak in (901, 1000, 1001)] == [True, True, False]


def test_what_no_plan_lowers_moves_the_target() -> None:
    limits = Limits(1000, 0.1)
    limits.learn_floor(800)
    assert limits.target_bytes == 900
    limits.learn_floor(950)
    assert limits.target_bytes == 995
    limits.learn_floor(400)
    assert limits.target_bytes == 995, "it was that much before"
    limits.learn_floor(2000)
    assert limits.target_bytes == 900, "beyond the limit it tells nothing"
