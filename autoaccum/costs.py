"""What a micro-batch of b samples costs in bytes, fitted to trials.

A trial's peak is nearly linear in b: parameters, gradients and optimizer state do not depend on it, activations are
proportional to it. What is not linear are the allocator's steps, constant in size and so smaller in proportion for
larger b: that is why larger trials weigh more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


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
    """seconds(b) = fixed_seconds + seconds_per_sample * b."""

    fixed_seconds: float
    seconds_per_sample: float

    def predict(self, micro_batch: int) -> float:
        """Seconds of a forward and backward at that many samples."""
        return self.fixed_seconds + self.seconds_per_sample * micro_batch


def fit_memory_model(trials: Iterable[Trial]) -> MemoryModel | None:
    """The memory model of the trials whose peak is known, or None with fewer than two different sizes."""
    line = _fit_line([(t.micro_batch, t.peak_bytes) for t in trials if t.peak_bytes is not None])
    return line and MemoryModel(fixed_bytes=line[0], bytes_per_sample=line[1])


def fit_time_model(trials: Iterable[Trial]) -> TimeModel | None:
    """The time model of the trials that were timed, or None with fewer than two different sizes."""
    line = _fit_line([(t.micro_batch, t.seconds) for t in trials if t.seconds is not None])
    return line and TimeModel(fixed_seconds=line[0], seconds_per_sample=line[1])


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
