"""What a micro-batch of b samples costs in bytes and in seconds, fitted to trials.

A trial's peak is nearly linear in b: parameters, gradients and optimizer state do not depend on it, activations are
proportional to it. What is not linear are the allocator's steps, constant in size and so smaller in proportion for
larger b: that is why larger trials weigh more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
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
    seconds: float | None = None
    """Wall time of the forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """peak_bytes(b) = fixed_bytes + bytes_per_sample * b."""

    fixed_bytes: float
    bytes_per_sample: float

    def predict(self, micro_batch: int) -> int:
        """Peak bytes at that many samples."""
        return math.ceil(self.fixed_bytes + self.bytes_per_sample * micro_batch)

    def largest_within(self, limit_bytes: int) -> float:
        """The most samples whose predicted peak is within the limit; infinite when samples cost nothing."""
        if self.bytes_per_sample <= 0:
            return math.inf if self.fixed_bytes <= limit_bytes else 0
        # Rounding in the fit must not cost a sample where the limit is hit exactly.
        return math.floor((limit_bytes - self.fixed_bytes) / self.bytes_per_sample + 1e-6)


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


def fit_memory_model(trials: Iterable[Trial]) -> MemoryModel | None:
    """The memory model of the trials whose peak is known, or None with fewer than two different sizes."""
    line = _fit_line([(t.micro_batch, t.peak_bytes) for t in trials if t.peak_bytes is not None])
    return line and MemoryModel(fixed_bytes=line[0], bytes_per_sample=line[1])


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


def _fit_line(points: list[tuple[int, float]]) -> tuple[float, float] | None:
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
