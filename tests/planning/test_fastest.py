"""Which plan is kept: when a comparison begins and ends, and for how long its outcome is believed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoaccum.planning.costs import TimeModel, Trial
from autoaccum.planning.cuts import Lengths, cut
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.fastest import FAR_OFF, KNOWN, PATIENT, SIMILAR, UNTIMED, Fastest

TIMES = TimeModel(points=((1, 1.0), (8, 2.0), (32, 14.0)))
"""By which 64 samples are fastest in micro-batches of 8."""


def fastest(
    window: tuple[int, Lengths] = (64, None),
    *,
    largest: int = 64,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    seconds: Callable[[int], float] = float,
    length: int = 1,
) -> Fastest:
    """Make one for such full windows, after trials of these sizes that took these seconds."""
    cutter = Cutter(smallest=1, ceiling=64, by_samples=False)
    cutter.full_window = window
    for size in sizes:
        trial = Trial(micro_batch=size, fits=True, peak_bytes=size, seconds=seconds(size), length=length)
        cutter.history.add(trial, reweigh=True)
    return Fastest(cutter, lambda: largest, lambda: largest, few_sizes=False)


def compare(made: Fastest, seconds: Callable[[int], float]) -> int:
    """Run windows of 64 samples until the fastest is known; how many that took."""
    for count in range(100):
        if made.compare():
            return count
        assert made.weight is not None
        made.observe(sum(map(seconds, cut(64, made.weight))), 64, None)
    raise AssertionError("compared for ever")


# When a comparison begins.


def test_nothing_is_compared_before_a_search_has_settled_on_full_windows() -> None:
    made = fastest()
    made.choose(is_settled=False)
    assert made.timing is None
    made = fastest((0, None))
    made.choose(is_settled=True)
    assert made.timing is None
    assert made.compare(), "there is nothing to compare"
    assert made.weight is None


def test_nothing_is_compared_where_times_are_known() -> None:
    made = fastest(largest=int(KNOWN * 32))
    made.model = TIMES
    made.choose(is_settled=True)
    assert (made.timing, made.weight) == (None, 8)


def test_sizes_far_beyond_those_that_were_timed_are_compared() -> None:
    made = fastest(largest=int(KNOWN * 32) + 1)
    made.model = TIMES
    made.choose(is_settled=True)
    assert made.timing is not None
    assert made.weight is None


def test_plans_are_made_of_the_fastest_as_far_as_that_fits_now() -> None:
    made = fastest(largest=32)
    assert made.planned() == 32
    made.weight = 8
    assert made.planned() == 8
    made.weight = 64
    assert made.planned() == 32


# What it finds.


def test_the_plan_that_windows_show_to_be_the_fastest_is_kept() -> None:
    def seconds(size: int) -> float:
        return 1 + (size / 8) ** 2

    made = fastest(seconds=seconds)
    made.choose(is_settled=True)
    assert compare(made, seconds) > 0
    assert made.weight == 8
    assert made.timing is None
    assert not made.rises
    assert made.model is not None
    assert made.model.predict(8) == 2.0


def test_the_largest_is_kept_where_it_is_clearly_the_fastest_and_that_is_said() -> None:
    """Trials promised nothing of it, and windows show it."""
    made = fastest()
    made.choose(is_settled=True)
    assert compare(made, lambda size: 1.0) > 0
    assert made.weight == 64
    assert made.rises


def test_the_times_of_windows_are_compared_by_their_work() -> None:
    """Those of shorter samples take half as long: that makes no plan a faster one."""
    made = fastest((4, (2, 2, 2, 2)), largest=8, sizes=(1, 2, 4), length=2)
    made.choose(is_settled=True)
    while not made.compare():
        if made.planned() == 8:
            made.observe(4.0, 4, (2, 2, 2, 2))
        else:
            made.observe(2.1, 4, (1, 1, 1, 1))
    assert made.model is not None
    assert dict(made.model.points)[4] == 2.1, "a micro-batch of two such windows' 4.2 seconds"
    assert made.planned() == 8


# When a comparison ends early.


def test_windows_that_are_not_full_end_it_when_none_else_come() -> None:
    made = fastest()
    made.choose(is_settled=True)
    assert not made.compare()
    for size in (63,) * (UNTIMED - 1) + (64,) + (63,) * (UNTIMED - 1):
        made.observe(1.0, size, None)
        assert not made.compare()
    made.observe(1.0, 63, None)
    assert made.compare()


def test_windows_of_about_the_same_size_go_on_with_it() -> None:
    made = fastest()
    assert not made.keeps_comparing(64), "nothing is compared yet"
    made.choose(is_settled=True)
    most, least = 64 * SIMILAR, 64 / SIMILAR
    assert [made.keeps_comparing(size) for size in (int(most), int(least) + 1)] == [True, True]
    assert [made.keeps_comparing(size) for size in (int(most) + 1, int(least))] == [False, False]


def test_windows_that_never_stay_as_they_are_end_all_comparisons() -> None:
    made = fastest()
    made.choose(is_settled=True)
    for _ in range(PATIENT):
        assert not made.keeps_comparing(640)
        assert made.model is None
        made.choose(is_settled=True)
        assert made.timing is not None
    assert not made.keeps_comparing(640)
    assert made.model is not None
    made.choose(is_settled=True)
    assert made.timing is None, "what is known by then has to do"


# An earlier run's times.


def test_an_earlier_runs_times_are_checked_on_two_windows() -> None:
    made = fastest()
    made.recall(None)
    assert made.checks == 0
    made.recall(TIMES)
    assert made.checks == 2
    assert not made.is_belied(1000.0, [8] * 8), "the first one makes ready"
    assert made.checks == 1
    assert made.is_belied(1000.0, [8] * 8)
    assert made.checks == 0
    assert not made.is_belied(1000.0, [8] * 8), "then they are believed"


@pytest.mark.parametrize(
    ("seconds", "is_belied"),
    [
        (16 / FAR_OFF - 0.01, True),
        (16 / FAR_OFF + 0.01, False),
        (16.0, False),
        (16 * FAR_OFF - 0.01, False),
        (16 * FAR_OFF + 0.01, True),
    ],
)
def test_times_that_are_far_off_are_belied(seconds: float, is_belied: bool) -> None:
    made = fastest()
    made.recall(TIMES)
    made.is_belied(16.0, [8] * 8)
    assert made.is_belied(seconds, [8] * 8) is is_belied


def test_what_is_known_of_times_is_forgotten_and_the_largest_used_again() -> None:
    made = fastest(largest=32)
    made.model = TIMES
    made.choose(is_settled=True)
    made.use_largest()
    assert (made.weight, made.model) == (None, TIMES)
    made.choose(is_settled=True)
    made.forget()
    assert (made.weight, made.model, made.up_to(32)) == (None, None, None)


# The best by known times.


def test_the_plan_of_least_time_is_the_best() -> None:
    made = fastest()
    made.model = TIMES
    assert [made.up_to(largest) for largest in (64, 8, 4, 1)] == [8, 8, 4, 1]
    constant = TimeModel(points=((1, 1.0), (64, 1.0)))
    assert [made.of(constant, largest) for largest in (64, 40)] == [64, 32]


def test_of_samples_that_differ_in_length_halves_of_the_largest_are_compared() -> None:
    made = fastest((4, (4, 2, 2, 1)), sizes=())  # they weigh 16, 4, 4 and 1
    assert made.of(TimeModel(points=((1, 1.0), (64, 1.0))), 64) == 64
    assert made.of(TimeModel(points=((1, 1.0), (12, 1.0), (64, 100.0))), 64) == 32, "[16, 12], and not [64]"
