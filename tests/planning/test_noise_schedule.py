"""The schedule that follows the noise scale: when it moves, how far, and by which windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.events import StepReport
from autoaccum.schedules import (
    REPORTS,
    NoiseScale,
    Progress,
    Schedule,
)


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
        gradient_squared=None if noise is None else 1.0,
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


def test_an_estimate_counts_for_the_windows_that_it_stands_for() -> None:
    """Late in a run three of them are ten windows' worth, and what is repeated in between counts for nothing."""
    schedule = NoiseScale(64, 1024)
    assert [NoiseScale(64, 1024, patience=patience).most_apart for patience in (1, 10, 50)] == [50, 16, 3]

    def late(step: int, *, is_measured: bool) -> StepReport:
        found = report(64, 1e9)
        return replace(found, step=step, gradient_squared=found.gradient_squared if is_measured else None)

    reports = [late(step, is_measured=step % 16 == 0) for step in range(5000, 5048)]
    for count, expected in ((len(reports), 128), (40, 64)):
        progress = Progress(step=5000 + count, effective_batch=64, reports=reports[:count])
        assert schedule.at(progress) == expected
