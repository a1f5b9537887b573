"""Schedules are pure functions of where a run stands, and read back from their texts."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError, ScheduleError
from autoaccum.events import StepReport
from autoaccum.schedules import (
    REPORTS,
    Constant,
    Doubling,
    Function,
    Geometric,
    Linear,
    Milestones,
    NoiseScale,
    Progress,
    Schedule,
    parse,
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
    st.builds(lambda pair, every, by: Doubling(*pair, every, by), pairs, counts, units),
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
        (lambda by: Doubling(10, 70, 3, by), {0: 10, 2: 10, 3: 20, 6: 40, 8: 40, 9: 70, 10**30: 70}),
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
        (Doubling(10, 70, every=3, by="steps"), 9),
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
        Doubling(8, 70, 1),
        NoiseScale(8, 99),
        Function(len),
    ]
    assert [schedule.largest for schedule in every] == [8, 128, 128, 64, 65, 70, 99, None]


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


# The noise scale


def report(size: int, noise: float | None, epoch: int = 0) -> StepReport:
    return StepReport(
        step=1,
        epoch=epoch,
        num_samples=1,
        effective_batch=size,
        micro_batches=(size,),
        loss=0.0,
        lr=0.0,
        grad_norm=None,
        seconds=0.0,
        peak_bytes=0,
        limit_bytes=0,
        replays=0,
        noise_scale=noise,
    )


def after(batch: int, noises: list[float | None]) -> Progress:
    return Progress(effective_batch=batch, reports=[report(batch, noise) for noise in noises])


@pytest.mark.parametrize(
    ("noises", "expected"),
    [
        ([80.0] * 10, 80),
        ([79.9] + [1000.0] * 9, 64),
        ([1000.0] * 9 + [90.5], 90),
        ([1000.0] * 10, 128),
        ([math.inf] * 10, 128),
        ([math.inf] * 9, 64),
        ([1.0] + [math.inf] * 10, 128),
        ([math.inf] * 9 + [None], 64),
        ([None] + [math.inf] * 9, 64),
        ([None] + [math.inf] * 10, 128),
        ([32.0] * 10, 32),
        ([32.1] + [1.0] * 9, 64),
        ([1.0] * 10, 32),
        ([-5.0] * 10, 32),
        ([-math.inf] * 10, 32),
        ([math.nan] * 10, 64),
        ([], 64),
    ],
)
def test_where_the_noise_scale_moves_a_batch_of_64(noises: list[float | None], expected: int) -> None:
    assert NoiseScale(2, 1024).at(after(64, noises)) == expected


@pytest.mark.parametrize(
    ("batch", "noise", "expected"),
    [
        (64, 900.0, 100),
        (100, 900.0, 100),
        (20, 1.0, 16),
        (16, 1.0, 16),
        (33, 1.0, 17),
        (33, 16.4, 17),
        (500, 600.0, 100),
        (3, 3.0, 16),
    ],
)
def test_it_stays_between_min_and_max(batch: int, noise: float, expected: int) -> None:
    """Where it was beyond, as after a resume with other bounds, it comes back."""
    assert NoiseScale(16, 100, patience=2).at(after(batch, [noise] * 2)) == expected


def test_it_starts_at_min_and_is_not_foreseeable() -> None:
    schedule = NoiseScale(64, 1024)
    assert schedule.at(Progress(step=5, reports=[report(64, 1e9)] * 100)) == 64
    assert not schedule.foreseeable
    assert not schedule.settled(Progress(step=10**9))
    assert schedule.largest == 1024


def test_short_windows_do_not_count() -> None:
    """The last of each epoch: neither for the batch, nor as a change of it."""
    reports = [report(64, math.inf, epoch) for epoch in range(5) for _ in range(2)]
    for epoch in range(4, -1, -1):
        reports.insert(2 * epoch + 2, report(10, 1.0, epoch))
    progress = Progress(epoch=5, effective_batch=64, reports=reports)
    assert NoiseScale(2, 1024).at(progress) == 128
    assert NoiseScale(2, 1024, patience=11).at(progress) == 64


@pytest.mark.parametrize(
    ("other", "epochs"),
    [
        (32, lambda index: 0),
        (128, lambda index: 0),
        (32, lambda index: index // 20),  # it changes back with an epoch
        (128, lambda index: index),  # every window is the last of its epoch
    ],
)
def test_windows_before_the_last_change_do_not_count(other: int, epochs: Callable[[int], int]) -> None:
    """A batch that it comes back to is judged anew."""
    sizes = [64] * 10 + [other] * 10 + [64] * 10
    reports = [report(size, math.inf, epochs(index)) for index, size in enumerate(sizes)]
    for count, expected in ((29, 64), (30, 128)):
        progress = Progress(epoch=epochs(count), effective_batch=64, reports=reports[:count])
        assert NoiseScale(2, 1024).at(progress) == expected


def run(schedule: Schedule, noise: Callable[[int, int], float], windows: int, epoch_samples: int = 10**9) -> list[int]:
    """What it asks for in a run whose window number i at a batch b measures ``noise(i, b)``."""
    asked: list[int] = []
    reports: list[StepReport] = []
    full, epoch, left = None, 0, epoch_samples
    for index in range(windows):
        batch = schedule.at(Progress(step=index, epoch=epoch, effective_batch=full, reports=reports[-REPORTS:]))
        asked.append(batch)
        size = min(batch, left)
        reports.append(report(size, noise(index, batch), epoch))
        if size == min(batch, epoch_samples):
            full = size
        left -= size
        if left == 0:
            epoch, left = epoch + 1, epoch_samples
    return asked


@pytest.mark.parametrize("patience", [1, 7, REPORTS // 2])
def test_high_noise_doubles_it_every_patience_windows(patience: int) -> None:
    asked = run(NoiseScale(64, 1000, patience=patience), lambda index, batch: 1e9, 6 * patience)
    assert asked == [size for size in (64, 128, 256, 512, 1000, 1000) for _ in range(patience)]


def test_low_noise_halves_it_again() -> None:
    asked = run(NoiseScale(64, 256, patience=5), lambda index, batch: 1e9 if index < 15 else 10.0, 35)
    assert asked == [size for size in (64, 128, 256, 256, 128, 64, 64) for _ in range(5)]


def test_short_windows_delay_it_by_themselves_alone() -> None:
    """Epochs of 160 samples: of every three windows of 64 one is short."""
    asked = run(NoiseScale(64, 128, patience=4), lambda index, batch: 1e9, 8, epoch_samples=160)
    assert asked == [64, 64, 64, 64, 64, 128, 128, 128]


def test_every_second_window_may_be_short() -> None:
    """The reports that are kept hold as many full ones as the most patient asks for."""
    asked = run(NoiseScale(64, 128, patience=REPORTS // 2), lambda index, batch: 1e9, 104, epoch_samples=100)
    assert asked.index(128) == REPORTS - 1


def test_more_than_the_data_has_is_a_full_window_all_the_same() -> None:
    asked = run(NoiseScale(64, 1024, patience=2), lambda index, batch: 1e9, 9, epoch_samples=100)
    assert asked == [64, 64, 64, 128, 128, 100, 200, 200, 200], "windows of 64, 36, 64, 36, and then of 100"


@given(st.lists(st.floats(33, 79), min_size=10, max_size=60))
def test_noise_between_the_thresholds_never_moves_it(noises: list[float]) -> None:
    assert set(run(NoiseScale(64, 1024), lambda index, batch: noises[index], len(noises))) == {64}


@given(st.lists(st.floats(0, 10_000), min_size=60, max_size=60))
def test_one_window_in_ten_that_disagrees_keeps_it(noises: list[float]) -> None:
    """A tenth in between, and it jitters as it likes."""
    noises = [64.0 if index % 10 == 9 else noise for index, noise in enumerate(noises)]
    assert set(run(NoiseScale(64, 1024), lambda index, batch: noises[index], 60)) == {64}


@given(st.lists(st.floats(0, 10_000) | st.just(math.inf), min_size=50, max_size=50), st.integers(1, 5))
def test_it_moves_by_a_factor_of_two_at_most_and_rests_in_between(noises: list[float], patience: int) -> None:
    schedule = NoiseScale(8, 512, patience=patience)
    asked = run(schedule, lambda index, batch: noises[index], 50)
    changes = [index for index in range(1, 50) if asked[index] != asked[index - 1]]
    assert all(second - first >= patience for first, second in zip([0, *changes], changes, strict=False))
    assert all(asked[i] <= 2 * asked[i - 1] and asked[i - 1] <= 2 * asked[i] for i in changes)
    assert all(8 <= batch <= 512 for batch in asked)


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
        (lambda: Doubling(0, 8, 1), "start", "start=0"),
        (lambda: Doubling(8, 7, 1), "most", "most=7: expected at least start=8. Doubling only grows"),
        (lambda: Doubling(8, 9, 0), "every", "every=0"),
        (lambda: Doubling(8, 9, 1, "x"), "by", "by='x'"),
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
        (lambda: Doubling(8, "9", 1), "most"),
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


def test_what_fit_takes() -> None:
    linear = Linear(64, 128, over=5)
    found = [schedule_of(given) for given in (8, "8", "linear 64:128 over 5", linear, doubled)]
    assert found == [Constant(8), Constant(8), linear, linear, Function(doubled)]


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


# Texts


@given(schedules)
@example(NoiseScale(2, 3, 5e-324, 10))
@example(NoiseScale(2, 3, 0, 10))
def test_its_text_is_read_back(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule
    assert parse(str(schedule).replace(" ", "")) == schedule
    assert parse(" \t" + str(schedule).replace(":", " : ").replace(" ", "\n ") + " ") == schedule


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("256", Constant(256)),
        (" 1_024 ", Constant(1024)),
        ("64, 1000:256, 5000:1024", Milestones(64, {1000: 256, 5000: 1024})),
        ("64,10_000s:256,50_000s:1024", Milestones(64, {10_000: 256, 50_000: 1024}, by="samples")),
        ("64, 3e:256", Milestones(64, {3: 256}, by="epochs")),
        ("linear 64:1024 over 5000", Linear(64, 1024, over=5000)),
        ("linear 64 : 1024 over 5000 s", Linear(64, 1024, over=5000, by="samples")),
        ("geometric 64:1024 over 10e", Geometric(64, 1024, over=10, by="epochs")),
        ("double 64:1024 every 2e", Doubling(64, 1024, every=2)),
        ("double 64:1024 every 2", Doubling(64, 1024, every=2, by="steps")),
        ("noise 64:1024", NoiseScale(64, 1024)),
        ("noise 64:1024 smoothing 0.9", NoiseScale(64, 1024, smoothing=0.9)),
        ("noise 64:1024 smoothing 0 patience 5", NoiseScale(64, 1024, smoothing=0.0, patience=5)),
    ],
)
def test_texts(text: str, schedule: Schedule) -> None:
    assert parse(text) == schedule


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Constant(256), "256"),
        (Milestones(64, {1000: 256, 5000: 1024}, by="samples"), "64, 1000s:256, 5000s:1024"),
        (Linear(64, 1024, 5000), "linear 64:1024 over 5000"),
        (Geometric(64, 1024, 10, "epochs"), "geometric 64:1024 over 10e"),
        (Doubling(64, 1024, 2), "double 64:1024 every 2e"),
        (NoiseScale(64, 1024), "noise 64:1024"),
        (NoiseScale(64, 1024, 0.9, 5), "noise 64:1024 smoothing 0.9 patience 5"),
    ],
)
def test_its_text(schedule: Schedule, text: str) -> None:
    assert str(schedule) == text


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 1, "expected a number of samples, or linear, geometric, double or noise at"),
        ("  ", 3, "expected a number of samples, or linear"),
        ("many", 1, "expected a number of samples, or linear"),
        ("-8", 1, "expected a number of samples, or linear"),
        (
            "1e6",
            3,
            "',' or the end of the text at character 3. e means epochs: write a number in full, such as 1_000_000",
        ),
        ("12s6", 4, "s means samples: write"),
        ("64e", 3, "expected ',' or the end of the text"),
        ("1.5", 2, "expected ',' or the end of the text"),
        ("1__0", 2, "expected ',' or the end of the text"),
        ("64,", 4, "expected a number of steps (with s: samples, with e: epochs)"),
        ("64, 1e6:256", 7, "expected ':' at character 7. e means epochs: write"),
        ("64, 1000", 9, "expected ':'"),
        ("64, 1000 256", 10, "expected ':'"),
        ("64, 1000:", 10, "expected a number of samples"),
        ("64, 1000:256 5000:1024", 14, "expected ',' or the end of the text"),
        ("64, 1000:256, 1000:1024", 15, "expected a milestone after 1000"),
        ("64, 1000:256, 5000s:1024", 19, "expected steps like the milestone before"),
        ("64, 1000s:256, 5000:1024", 20, "expected samples like the milestone before"),
        ("64, 1000:256, 5000 s:1024", 20, "expected steps like the milestone before"),
        ("64, 10e:256, 5000s:1024", 18, "expected epochs like the milestone before"),
        ("0", 1, "expected an int of at least 1"),
        ("64, 0:256", 5, "expected an int of at least 1"),
        ("64, 100:0", 9, "expected an int of at least 1"),
        ("linear", 7, "expected a number of samples"),
        ("linear 64-128 over 5", 10, "expected ':'"),
        ("linear 64:128", 14, "expected 'over'"),
        ("linear 64:128 every 5", 15, "expected 'over'"),
        ("linear 64:128 over 0", 20, "expected an int of at least 1"),
        ("linear 64:0 over 5", 11, "expected an int of at least 1"),
        ("linear 64:128 over 1e3", 22, "e means epochs"),
        ("linear 64:128 over 5, 7", 21, "expected the end of the text"),
        ("double 64:32 every 2", 11, "expected at least start=64"),
        ("double 64:128 over 2", 15, "expected 'every'"),
        ("noise 1:64", 7, "expected an int of at least 2"),
        ("noise 64:2", 10, "expected at least min=64"),
        ("noise 2:64 smoothing 1.5", 22, "expected a number of at least 0 and below 1"),
        ("noise 2:64 smoothing .5", 22, "expected a number below 1"),
        ("noise 2:64 patience 51", 21, "expected at most 50"),
        ("noise 2:64 patience 5 smoothing 0", 23, "expected the end of the text"),
    ],
)
def test_texts_that_cannot_be_read(text: str, position: int, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    first, shown, caret = str(caught.value).splitlines()
    assert caught.value.position == position
    assert (caught.value.argument, caught.value.value) == ("effective_batch", text)
    assert words in first
    assert f"at character {position}." in first
    assert shown == f"  {text}"
    assert caret == " " * (position + 1) + "^"


def test_the_caret_stands_below_the_character_whatever_the_spaces_are() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("64,\n\t1000;256")
    assert str(caught.value).splitlines()[1:] == ["  64,  1000;256", "           ^"]


@given(st.text(alphabet="0159_,: selinarovdubymthp.-", max_size=30))
def test_any_text_is_a_schedule_or_an_error_within_it(text: str) -> None:
    try:
        schedule = parse(text)
    except ScheduleError as error:
        position = error.position
    else:
        position = 1
        assert parse(str(schedule)) == schedule
    assert 1 <= position <= len(text) + 1
