"""What peaks of trials tell of larger sizes, on curves that are no lines."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from autoaccum.planning.costs import Trial, bounds
from autoaccum.planning.extrapolation import reach
from autoaccum.planning.search import next_trial

MIB, GIB = 2**20, 2**30
START = 2 * GIB
LIMITS = (3, 7, 20, 100, 500, 3000, 20_000)


def up(value: float, step: int) -> float:
    return math.ceil(value / step) * step


CURVES: dict[str, Callable[[float, int], Callable[[int], float]]] = {
    "line": lambda each, truth: lambda size: START + each * size,
    "line in steps of 2 MiB": lambda each, truth: lambda size: up(START + each * size, 2 * MIB),
    "line in steps of 20 MiB": lambda each, truth: lambda size: up(START + each * size, 20 * MIB),
    "flat up to 4": lambda each, truth: lambda size: START + each * max(min(4, truth / 2), size),
    "flat up to 16": lambda each, truth: lambda size: START + each * max(min(16, truth / 2), size),
    "workspace of 1 GiB": lambda each, truth: lambda size: START + max(GIB, each * size),
    "twice as steep from a sixth on": lambda each, truth: (
        lambda size: START + max(each * (size + truth / 6) / 2, each * size)
    ),
    "workspace that fills up": lambda each, truth: lambda size: START + each * size + min(each * 16, 2 * each * size),
    "head of 4 GiB": lambda each, truth: lambda size: START + 4 * GIB + each / 2 * size,
    "noise of 3 %": lambda each, truth: lambda size: START + each * size * (1 + 0.03 * math.sin(size * 12.9898)),
}
"""(bytes of a sample, the largest that fits) -> (samples) -> peak."""

# (trials, errors) at most, where they are more than the 5 and the 1 that are aimed at.
MISSES: dict[tuple[str, int], tuple[int, int]] = {
    ("noise of 3 %", 3000): (5, 2),
    ("workspace of 1 GiB", 3000): (6, 1),
    ("flat up to 4", 7): (6, 2),
    ("flat up to 16", 7): (6, 2),
    ("flat up to 16", 20): (7, 1),
}


def search(peak: Callable[[int], float], limit: int) -> tuple[list[Trial], list[float]]:
    """Return the trials of a probe, and by how much its predictions were off."""
    history: list[Trial] = []
    off: list[float] = []
    while size := next_trial(history, limit_bytes=limit, ceiling=2**20, growth=64, start_bytes=START):
        known = reach(history, start_bytes=START)
        predicted = None if known is None else known.predict(size)
        peak_bytes = math.ceil(peak(size))
        fits = peak_bytes <= limit
        if predicted is not None:
            off.append(abs(predicted / peak_bytes - 1))
        history.append(
            Trial(micro_batch=size, fits=fits, peak_bytes=peak_bytes if fits else None, predicted_bytes=predicted)
        )
        assert len(history) < 20, "tried without end"
    return history, off


@pytest.mark.parametrize("truth", LIMITS)
@pytest.mark.parametrize("name", CURVES)
def test_few_trials_and_one_error_at_most_on_curves_that_are_no_lines(name: str, truth: int) -> None:
    peak = CURVES[name](8 * GIB / truth, truth)
    limit = math.ceil(peak(truth))
    history, off = search(peak, limit)
    trials, errors = MISSES.get((name, truth), (5, 1))
    assert len(history) <= trials
    assert sum(not trial.fits for trial in history) <= errors
    assert all(error <= 0.1 for error in off[:1])
    assert bounds(history)[0] >= 0.93 * truth - 1


def fitted(*points: tuple[int, int], allocated: tuple[int, ...] = ()) -> list[Trial]:
    return [
        Trial(micro_batch=size, fits=True, peak_bytes=peak, allocated_bytes=allocated[i] if allocated else None)
        for i, (size, peak) in enumerate(points)
    ]


def test_where_the_curve_starts_bounds_how_steep_it_can_be() -> None:
    """Flat up to 16, and then a line through the start: the last chord says 300 more, the start 184 at most."""
    known = reach(fitted((1, 1160), (16, 1160), (32, 1320)), start_bytes=1000)
    assert known is not None
    assert known.slopes == (10, 0)
    assert (known.likely(2000), known.surely(2000)) == (100, 100)
    known = reach(fitted((1, 1160), (24, 1240)), start_bytes=1000)
    assert known is not None
    assert known.likely(2000) > known.surely(2000) == 100
    assert known.predict(100) is None, "one chord is too little"


def test_three_sizes_on_a_line_with_the_start_foretell_peaks() -> None:
    known = reach(fitted((1, 1010), (16, 1160), (64, 1640)), start_bytes=1000)
    assert known is not None
    assert (known.alike, known.is_narrow, known.predict(100)) == (1, True, 2000)


def test_slopes_are_those_of_tensors_where_these_are_known() -> None:
    known = reach(fitted((1, 1500), (16, 1500), (64, 2500), allocated=(1010, 1160, 1640)))
    assert known is not None
    assert known.slopes == (10, 10)
    assert known.likely(3500) == 164, "beyond the peak, which holds more than tensors"


def test_where_the_curve_starts_is_told_in_tensors_where_these_are_known() -> None:
    known = reach(fitted((1, 1500), allocated=(1010,)), start_bytes=1000)
    assert known is not None
    assert known.surely(3500) == 201, "by 10 a sample, and not by the 500 that an allocator has grown by"


def test_tensors_that_fill_the_limit_say_what_fits_at_best() -> None:
    points = (1, 1500), (16, 1500), (64, 2500)
    known, untold = reach(fitted(*points, allocated=(1010, 1160, 1640))), reach(fitted(*points))
    assert known is not None
    assert untold is not None
    assert known.snugly(3000) == 64 + (0.95 * 3000 - 1640) / 10
    assert untold.snugly(3000) == 0


def test_what_samples_cost_in_an_earlier_run_stands_for_a_chord() -> None:
    known = reach(fitted((40, 1400)), sample_bytes=10)
    assert known is not None
    assert known.likely(2000) == 100
