"""What a micro-batch of b samples costs in bytes and in seconds, fitted to trials.

A trial's peak is nearly linear in b: parameters, gradients and optimizer state do not depend on it, activations are
proportional to it. What is not linear are the allocator's steps, constant in size and so smaller in proportion for
larger b: that is why larger trials weigh more.

Samples of different lengths, padded to the longest of their micro-batch, cost in proportion to b * length; attention
that is written out costs b * length**2 beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One forward and backward at one micro-batch size, observed."""

    micro_batch: int
    """Samples."""
    fits: bool
    """False after an out-of-memory error, and when the peak went past the limit that is to be kept."""
    peak_bytes: int | None = None
    """Most memory in use at once; None after an out-of-memory error, which hides it."""
    predicted_bytes: int | None = None
    """What the memory model said of it before; None where there was no model yet."""
    seconds: float | None = None
    """Wall time of the forward and backward."""
    length: int = 1
    """Of its longest sample, to which the others were padded; 1 where samples are alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """peak_bytes(b) = fixed_bytes + b * (bytes_per_sample * length + bytes_per_square * length**2)."""

    fixed_bytes: float
    bytes_per_sample: float
    """Of length 1."""
    bytes_per_square: float = 0.0
    """Of the length; 0 where samples are alike."""

    def of_sample(self, length: int = 1) -> float:
        """Bytes that one sample more adds."""
        return self.bytes_per_sample * length + self.bytes_per_square * length**2

    def predict(self, micro_batch: int, length: int = 1) -> int:
        """Peak bytes at that many samples."""
        return math.ceil(self.fixed_bytes + self.of_sample(length) * micro_batch)

    def largest_within(self, limit_bytes: int, length: int = 1) -> float:
        """The most samples whose predicted peak is within the limit; infinite when samples cost nothing."""
        each = self.of_sample(length)
        if each <= 0:
            return math.inf if self.fixed_bytes <= limit_bytes else 0
        # Rounding in the fit must not cost a sample where the limit is hit exactly.
        return math.floor((limit_bytes - self.fixed_bytes) / each + 1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeModel:
    """seconds(b) of one forward and backward: straight lines between the sizes that were timed.

    Time is no line in b. A device takes as long for few samples as for one until it is busy, and then rises in steps,
    where sizes fill its units: a line through all of it would prefer the largest size always, and be wrong.
    """

    points: tuple[tuple[int, float], ...]
    """(samples, seconds), both rising."""

    def predict(self, micro_batch: int) -> float:
        """Seconds at that many samples; beyond the largest that was timed, at its pace."""
        points = self.points
        index = bisect_left(points, (micro_batch, 0.0))
        if index == len(points):
            size, seconds = points[-1]
            return seconds * micro_batch / size
        if index == 0:
            return points[0][1]
        (below, fast), (above, slow) = points[index - 1], points[index]
        return fast + (slow - fast) * (micro_batch - below) / (above - below)


def prediction_error(trials: Iterable[Trial]) -> float | None:
    """How far the newest prediction was from what was measured, as a fraction of that; None when there was none."""
    errors = [abs(t.predicted_bytes / t.peak_bytes - 1) for t in trials if t.predicted_bytes and t.peak_bytes]
    return errors[-1] if errors else None


SPREAD = 1.5
"""Lengths that differ by less tell nothing of their square."""


def fit_memory_model(trials: Sequence[Trial]) -> MemoryModel | None:
    """The memory model of the trials whose peak is known, or None with fewer than two different sizes."""
    known = [(t.micro_batch, t.length, t.peak_bytes) for t in trials if t.peak_bytes is not None]
    linear = [(size * length, peak) for size, length, peak in known]
    if (line := _fit_line(linear)) is None:
        return None
    models = [MemoryModel(fixed_bytes=line[0], bytes_per_sample=line[1])]
    if _lengths_vary(trials):
        squares = [(size * length**2, peak) for size, length, peak in known]
        if (plane := _fit_plane([(size * length, size * length**2, peak) for size, length, peak in known])) is not None:
            models.append(MemoryModel(fixed_bytes=plane[0], bytes_per_sample=plane[1], bytes_per_square=plane[2]))
        if (line := _fit_line(squares)) is not None:
            models.append(MemoryModel(fixed_bytes=line[0], bytes_per_sample=0.0, bytes_per_square=line[1]))

    def error(model: MemoryModel) -> float:
        return sum(
            size * length * (model.fixed_bytes + size * model.of_sample(length) - peak) ** 2
            for size, length, peak in known
        )

    return min(models, key=error)


def weigher(trials: Sequence[Trial]) -> Callable[[int], int]:
    """(length) -> what a sample counts for, so that micro-batches with equal sums need about equal memory.

    Where the trials do not tell how memory grows with length, a sample longer than any that was tried counts by the
    square of its length: what fits by that, fits whichever it is.
    """
    longest = max((t.length for t in trials), default=1)
    model = fit_memory_model(trials) if _lengths_vary(trials) else None
    if model is None:
        return lambda length: length if length <= longest else length * length // longest
    if model.bytes_per_sample > 0:
        square = model.bytes_per_square / model.bytes_per_sample
        return lambda length: round(length + square * length**2)
    return lambda length: max(1, length * length // longest)


def _lengths_vary(trials: Sequence[Trial]) -> bool:
    lengths = [t.length for t in trials if t.peak_bytes is not None]
    return len(lengths) > 2 and max(lengths) >= SPREAD * min(lengths)


def fit_time_model(trials: Iterable[Trial]) -> TimeModel | None:
    """The time model of the trials that were timed, or None when none was.

    What disturbs a timing makes it longer, the first run of a size above all, when kernels are chosen and loaded. So a
    size's time is the median of its trials, and none is slower than a larger one.
    """
    timed: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        if trial.seconds is not None:
            timed[trial.micro_batch].append(trial.seconds)
    points: list[tuple[int, float]] = []
    least = math.inf
    for size in sorted(timed, reverse=True):
        least = min(least, median(timed[size]))
        points.append((size, least))
    return TimeModel(points=tuple(reversed(points))) if points else None


def _fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares of y on x with weights x: (intercept, slope), the slope not negative.

    Textbook weighted least squares: with weighted means mx and my, slope = sum w (x-mx)(y-my) / sum w (x-mx)^2.
    """
    if len({x for x, _ in points}) < 2:
        return None
    total = sum(x for x, _ in points)
    mean_x = sum(x * x for x, _ in points) / total
    mean_y = sum(x * y for x, y in points) / total
    covariance = sum(x * (x - mean_x) * (y - mean_y) for x, y in points)
    variance = sum(x * (x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, covariance / variance)
    return mean_y - slope * mean_x, slope


def _fit_plane(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """Least squares of y on x and z with weights x, rows being (x, z, y): (intercept, slope, slope of z).

    The normal equations of the centred variables, by Cramer's rule; None unless both slopes are positive.
    """
    total = sum(row[0] for row in rows)
    means = [sum(row[0] * row[i] for row in rows) / total for i in range(3)]

    def covariance(i: int, j: int) -> float:
        return sum(row[0] * (row[i] - means[i]) * (row[j] - means[j]) for row in rows)

    xx, zz, xz, xy, zy = (covariance(i, j) for i, j in ((0, 0), (1, 1), (0, 1), (0, 2), (1, 2)))
    determinant = xx * zz - xz * xz
    if determinant <= 1e-9 * xx * zz:  # they rise and fall together
        return None
    slope, slope_z = (xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant
    if slope <= 0 or slope_z <= 0:
        return None
    return means[2] - slope * means[0] - slope_z * means[1], slope, slope_z
