"""Schedules are pure functions of where a run stands, and values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.schedules import (
    REPORTS,
    Constant,
    Function,
    Geometric,
    Linear,
    Milestones,
    NoiseScale,
    Progress,
    Schedule,
    schedule_of,
)

batches = st.integers(1, 5000)
counts = st.integers(1, 10**6)
units = st.sampled_from(["steps", "samples", "epochs"])
pairs = st.tuples(batches, batches).map(sorted)
points = st.dictionaries(counts, batches, min_size=1, max_size=5).map(lambda found: dict(sorted(found.items())))
ramps = st.one_of(
    st.builds(Linear, batches, batches, counts, units), st.builds(Geometric, batches, batches, counts, units)
)
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(Constant, batches),
    ramps,
    st.builds(Milestones, batches, points, units),
    st.builds(
        lambda pair, smoothing, patience: NoiseScale(pair[0] + 1, pair[1] + 1, smoothing, patience),
        pairs,
        st.floats(0, 1, exclude_max=True),
        st.integers(1, REPORTS // 2),
    ),
)


def at(by: str, count: int) -> Progress:
    """A run that counts ``count`` of one unit, and is elsewhere in the others."""
    field = {"steps": "step", "samples": "samples", "epochs": "epoch"}[by]
    return replace(Progress(step=3, samples=5, epoch=7), **{field: count})


# What each asks for


@pytest.mark.parametrize("by", ["steps", "samples", "epochs"])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda by: Linear(10, 20, 4, by), {0: 10, 1: 13, 2: 15, 3: 18, 4: 20, 5: 20}),
        (lambda by: Linear(20, 10, 4, by), {0: 20, 1: 18, 2: 15, 3: 13, 4: 10, 99: 10}),
        (lambda by: Geometric(16, 256, 4, by), {0: 16, 1: 32, 2: 64, 3: 128, 4: 256, 5: 256}),
        (lambda by: Geometric(100, 50, 2, by), {0: 100, 1: 71, 2: 50, 3: 50}),
        (lambda by: Milestones(64, {10: 256, 20: 128}, by), {0: 64, 9: 64, 10: 256, 19: 256, 20: 128, 99: 128}),
    ],
)
def test_what_it_asks_for(make: Callable[[str], Schedule], by: str, expected: dict[int, int]) -> None:
    assert {count: make(by).at(at(by, count)) for count in expected} == expected


@given(ramps, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_ramp_goes_from_start_to_end_and_never_back(ramp: Linear | Geometric, first: int, second: int) -> None:
    assert ramp.at(at(ramp.by, 0)) == ramp.start
    assert ramp.at(at(ramp.by, ramp.over)) == ramp.end
    low, high = sorted((first, second))
    found = [ramp.start, ramp.at(at(ramp.by, low)), ramp.at(at(ramp.by, high)), ramp.end]
    assert found == sorted(found, reverse=ramp.start > ramp.end)


@given(schedules.filter(lambda schedule: schedule.foreseeable), st.integers(0, 10**6), st.integers(0, 10**6))
def test_settled_is_the_same_from_there_on_and_none_asks_for_more_than_the_largest(
    schedule: Schedule, first: int, more: int
) -> None:
    here = Progress(step=first, samples=first, epoch=first)
    later = Progress(step=first + more, samples=first + more, epoch=first + more)
    if schedule.settled(here):
        assert schedule.at(here) == schedule.at(later)
        assert schedule.settled(later)
    end = Progress(step=10**9, samples=10**9, epoch=10**9)
    assert schedule.settled(end)
    assert schedule.largest is not None
    assert max(schedule.at(progress) for progress in (here, later, end)) <= schedule.largest


@pytest.mark.parametrize(
    ("schedule", "first"),
    [
        (Constant(8), 0),
        (Linear(64, 128, over=10), 10),
        (Linear(64, 64, over=10), 0),
        (Geometric(64, 128, over=10), 10),
        (Milestones(64, {5: 1, 10: 3}), 10),
        (NoiseScale(8, 8), 0),
    ],
)
def test_the_step_from_which_it_is_settled(schedule: Schedule, first: int) -> None:
    assert next(step for step in range(99) if schedule.settled(Progress(step=step))) == first


def test_the_largest() -> None:
    every = [
        Constant(8),
        Linear(64, 128, 5),
        Linear(128, 64, 5),
        Milestones(64, {5: 9, 9: 3}),
        Milestones(64, {5: 65, 9: 3}),
        NoiseScale(8, 99),
        Function(len),
    ]
    assert [schedule.largest for schedule in every] == [8, 128, 128, 64, 65, 99, None]


def test_a_linear_ramp_is_exact_where_floats_are_not() -> None:
    assert Linear(1, 10**18 + 1, over=10**18).at(Progress(step=10**17 + 1)) == 10**17 + 2


# Functions


def test_a_function_is_given_the_progress() -> None:
    schedule = Function(lambda progress: 10 * progress.step + progress.epoch)
    assert schedule.at(Progress(step=4, epoch=2)) == 42
    assert schedule.foreseeable
    assert not schedule.settled(Progress(step=10**9))


@pytest.mark.parametrize(
    ("returned", "error"),
    [(0, ArgumentError), (-1, ArgumentError), (8.0, ArgumentTypeError), (True, ArgumentTypeError)],
)
def test_what_a_function_may_return(returned: object, error: type[ArgumentError]) -> None:
    with pytest.raises(error) as caught:
        Function(lambda progress: returned).at(Progress())  # type: ignore[arg-type, return-value]
    assert type(caught.value) is error
    assert (caught.value.argument, caught.value.value) == ("effective_batch", returned)
    assert str(caught.value).endswith("The function passed as effective_batch returned it.")


def doubled(progress: Progress) -> int:
    return 2 * progress.step


def test_a_function_is_shown_by_its_name() -> None:
    assert str(Function(doubled)) == "doubled"


# Arguments


@pytest.mark.parametrize(
    ("make", "argument", "words"),
    [
        (lambda: Constant(0), "effective_batch", "effective_batch=0: expected an int of at least 1. Pass the samples"),
        (lambda: Linear(0, 8, 5), "start", "start=0: expected an int of at least 1"),
        (lambda: Linear(8, 0, 5), "end", "end=0: expected an int of at least 1"),
        (lambda: Geometric(8, 8, 0), "over", "over=0: expected an int of at least 1"),
        (lambda: Linear(8, 8, 5, "windows"), "by", "by='windows': expected one of 'steps', 'samples', 'epochs'"),
        (lambda: Milestones(0, {5: 8}), "start", "start=0"),
        (lambda: Milestones(8, {}), "points", "expected a dict.*For one batch throughout pass 8 itself"),
        (lambda: Milestones(8, {0: 8}), "points", "points=0: expected an int of at least 1.*where 8 was to begin"),
        (lambda: Milestones(8, {5: 0}), "points", "points=0: expected an int.*from 5 steps on"),
        (lambda: Milestones(8, {5: 8, 4: 9}), "points", "expected 4 to be more than 5. Give them in order"),
        (lambda: Milestones(8, [(5, 8), (5, 9)]), "points", "expected 5 to be more than 5"),
        (lambda: Milestones(8, {5: 8}, "s"), "by", "by='s'"),
        (lambda: NoiseScale(1, 8), "min", "min=1: expected an int of at least 2. It takes two micro-batches"),
        (lambda: NoiseScale(8, 7), "max", "max=7: expected at least min=8"),
        (lambda: NoiseScale(8, 9, 1.0), "smoothing", "smoothing=1.0: expected a number of at least 0 and below 1"),
        (lambda: NoiseScale(8, 9, patience=0), "patience", "patience=0"),
        (lambda: NoiseScale(8, 9, patience=51), "patience", "patience=51: expected at most 50"),
        (lambda: schedule_of(0), "effective_batch", "effective_batch=0: expected an int of at least 1. Pass"),
    ],
)
def test_values_that_cannot_be_used(make: Callable[[], Schedule], argument: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        make()
    assert caught.value.argument == argument
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Linear(8.0, 9, 5), "start"),
        (lambda: Geometric(8, 9, 5.0), "over"),
        (lambda: Milestones(8, 5), "points"),
        (lambda: Milestones(8, [5, 6]), "points"),
        (lambda: Milestones(8, {5.0: 6}), "points"),
        (lambda: NoiseScale(8, 9, "0.5"), "smoothing"),
        (lambda: NoiseScale(True, 9), "min"),
        (lambda: Function(8), "function"),
        (lambda: schedule_of(8.0), "effective_batch"),
        (lambda: schedule_of(True), "effective_batch"),
        (lambda: schedule_of(None), "effective_batch"),
        (lambda: schedule_of(NoiseScale), "effective_batch"),
    ],
)
def test_types_that_cannot_be_used(make: Callable[[], Schedule], argument: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        make()
    assert caught.value.argument == argument


def test_milestones_are_kept_as_pairs() -> None:
    schedule = Milestones(64, {10: 256, 20: 1024}, by="epochs")
    assert schedule.points == ((10, 256), (20, 1024))
    assert schedule == Milestones(64, schedule.points, by="epochs") == replace(schedule)
    assert schedule != Milestones(64, schedule.points)


@given(schedules)
def test_they_are_values(schedule: Any) -> None:
    for again in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert again == schedule
        assert hash(again) == hash(schedule)
    for field in fields(schedule):
        with pytest.raises(FrozenInstanceError):
            setattr(schedule, field.name, 1)
    assert not hasattr(schedule, "__dict__")


def test_a_ramp_of_another_kind_is_another_schedule() -> None:
    assert Linear(1, 2, 3) != Geometric(1, 2, 3)


def test_points_without_end_are_refused_at_the_first_that_is_none() -> None:
    class Endless:
        def __getitem__(self, index: int) -> tuple[str, str]:
            return "a", "b"

    with pytest.raises(ArgumentTypeError, match="points='a'"):
        Milestones(2, Endless())  # type: ignore[arg-type]
