"""Models of what a micro-batch of b samples costs in bytes and in seconds, fitted to trials.

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
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

PLATEAU = 1.03
"""End the search where micro-batches four times as large have more samples per second by less than this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One forward and backward at one micro-batch size, observed."""

    micro_batch: int
    """Its size in samples."""
    fits: bool
    """False after an out-of-memory error, and when the peak went past the limit that is to be kept."""
    peak_bytes: int | None = None
    """Most memory in use at once; None after an out-of-memory error, which hides it."""
    predicted_bytes: int | None = None
    """The peak that was predicted before; None where too little was known for a prediction."""
    seconds: float | None = None
    """Wall time of the forward and backward; None where it was not timed."""
    length: int = 1
    """The length of its longest sample, to which the others were padded; 1 where samples are alike."""
    allocated_bytes: int | None = None
    """Most that tensors held at once, without the steps in which an allocator grows; None where nobody tells."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: what came later than others only where it says something."""
        state = asdict(self)
        if self.allocated_bytes is None:
            del state["allocated_bytes"]
        return state


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """The line peak_bytes(b) = fixed_bytes + b * (bytes_per_sample * length + bytes_per_square * length**2)."""

    fixed_bytes: float
    """Bytes in use without any sample: parameters, gradients and optimizer state."""
    bytes_per_sample: float
    """Bytes that a sample adds for each unit of its length."""
    bytes_per_square: float = 0.0
    """Bytes that it adds beside them for each unit of its length squared; 0 where samples are alike."""

    def of_sample(self, length: int = 1) -> float:
        """Return the bytes that one sample more adds."""
        return self.bytes_per_sample * length + self.bytes_per_square * length**2

    def on_line(self, micro_batch: int, length: int = 1) -> float:
        """Return the bytes of the line at that many samples."""
        return self.fixed_bytes + self.of_sample(length) * micro_batch

    def predict(self, micro_batch: int, length: int = 1) -> int:
        """Return the peak bytes at that many samples."""
        # Rounded up: a prediction that is a byte too small would let a plan pass the limit.
        return math.ceil(self.on_line(micro_batch, length))

    def largest_within(self, limit_bytes: int, length: int = 1) -> float:
        """Return the most samples whose predicted peak is within the limit; infinite when samples cost nothing."""
        each = self.of_sample(length)
        if each <= 0:
            return math.inf if self.fixed_bytes <= limit_bytes else 0
        # Rounding in the fit must not cost a sample where the limit is hit exactly.
        return math.floor((limit_bytes - self.fixed_bytes) / each + 1e-6)

    def moved_to(self, fixed_bytes: float) -> MemoryModel:
        """Return the same model with another number of bytes in use without any sample, and as many more everywhere."""
        return replace(self, fixed_bytes=fixed_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeModel:
    """The curve seconds(b) of one forward and backward: straight lines between the sizes that were timed.

    Time is no line in b. A device takes as long for few samples as for one until it is busy, and then rises in steps,
    where sizes fill its units: a line through all of it would prefer the largest size always, and be wrong.
    """

    points: tuple[tuple[int, float], ...]
    """(samples, seconds), both rising."""

    def predict(self, micro_batch: int) -> float:
        """Return the seconds at that many samples; beyond the largest that was timed, at its pace."""
        points = self.points
        # No time is below 0, so a size that was timed is found at its own point and not behind it.
        index = bisect_left(points, (micro_batch, 0.0))
        if index == len(points):
            size, seconds = points[-1]
            return seconds * micro_batch / size
        # Fewer samples than any that were timed take no less: a device is not busy with them.
        if index == 0:
            return points[0][1]
        (below, fast), (above, slow) = points[index - 1], points[index]
        return fast + (slow - fast) * (micro_batch - below) / (above - below)


def prediction_error(trials: Iterable[Trial]) -> float | None:
    """Return how far the newest prediction was from its measurement, as a fraction of that; None if there was none."""
    errors = [abs(t.predicted_bytes / t.peak_bytes - 1) for t in trials if t.predicted_bytes and t.peak_bytes]
    return errors[-1] if errors else None


SPREAD = 1.5
"""Fit no square of the length until the longest and the shortest trial differ by this factor: less tells nothing."""


def fit_memory_model(trials: Sequence[Trial]) -> MemoryModel | None:
    """Fit the memory model to the trials whose peak is known; return None with fewer than two different sizes.

    Where tensors are told from the rest, the line is that of tensors, which grow without steps, moved by what the
    allocator added to the largest trial.

    Where lengths vary, three shapes are fitted: in the length, in its square, in both. The one with the least weighted
    sum of squared errors is returned, the first of them where two are equal.
    """
    measured = [(t.micro_batch, t.length, t.peak_bytes) for t in trials if t.peak_bytes is not None]
    tensors = [
        (t.micro_batch, t.length, t.allocated_bytes)
        for t in trials
        if t.peak_bytes is not None and t.allocated_bytes is not None
    ]
    # Of some trials no more than their peak may be known: one size alone makes no line.
    known = tensors if len({size * length for size, length, _ in tensors}) > 1 else measured
    line = _fit_line([(size * length, peak) for size, length, peak in known])
    if line is None:
        return None
    models = [MemoryModel(fixed_bytes=line[0], bytes_per_sample=line[1])]
    if _lengths_vary(trials):
        plane = _fit_plane([(size * length, size * length**2, peak) for size, length, peak in known])
        if plane is not None:
            models.append(MemoryModel(fixed_bytes=plane[0], bytes_per_sample=plane[1], bytes_per_square=plane[2]))
        line = _fit_line([(size * length**2, peak) for size, length, peak in known])
        if line is not None:
            models.append(MemoryModel(fixed_bytes=line[0], bytes_per_sample=0.0, bytes_per_square=line[1]))

    def error(model: MemoryModel) -> float:
        # With one weight for all shapes, for the three sums to be comparable: that of the fit in the length.
        return sum(size * length * (model.on_line(size, length) - peak) ** 2 for size, length, peak in known)

    best = min(models, key=error)
    if known is measured:
        return best
    # What the allocator holds beside tensors is taken to be what it held at the largest trial.
    *_, (size, length, peak) = sorted(measured, key=lambda each: best.on_line(*each[:2]))
    return best.moved_to(best.fixed_bytes + peak - best.on_line(size, length))


def weigher(trials: Sequence[Trial]) -> Callable[[int], int]:
    """Return (length) -> the weight of a sample, such that micro-batches of equal weight need about equal memory.

    Where the trials do not tell how memory grows with length, a sample longer than any that was tried weighs by the
    square of its length: what fits by that, fits whichever it is.
    """
    longest = max((t.length for t in trials), default=1)
    model = fit_memory_model(trials) if _lengths_vary(trials) else None
    # Weights are integers: what micro-batches weigh is added, divided and compared exactly.
    if model is None:
        # Continuous at the longest, where both are equal to it.
        return lambda length: length if length <= longest else length * length // longest
    if model.bytes_per_sample > 0:
        # Memory by length is a * length + c * length**2; weights are in units of a, so that a sample of length 1 whose
        # square costs next to nothing weighs 1.
        square = model.bytes_per_square / model.bytes_per_sample
        return lambda length: round(length + square * length**2)
    # The square alone, in units in which the longest weighs as much as its length; none may weigh nothing.
    return lambda length: max(1, length * length // longest)


def _lengths_vary(trials: Sequence[Trial]) -> bool:
    """Return whether the trials' lengths differ by enough, and are enough trials, to tell of the square of a length."""
    # A plane through two points fits anything: three are the least.
    lengths = [t.length for t in trials if t.peak_bytes is not None]
    return len(lengths) > 2 and max(lengths) >= SPREAD * min(lengths)


def fit_time_model(trials: Iterable[Trial]) -> TimeModel | None:
    """Return the time model of the trials that were timed, or None when none was.

    What disturbs a timing makes it longer, the first run of a size above all, when kernels are chosen and loaded. So a
    size's time is the median of its trials, and none is slower than a larger one.
    """
    timed: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        if trial.seconds is not None:
            timed[trial.micro_batch].append(trial.seconds)
    points: list[tuple[int, float]] = []
    least = math.inf  # the least time of this size and all larger ones
    for size in sorted(timed, reverse=True):
        least = min(least, median(timed[size]))
        points.append((size, least))
    return TimeModel(points=tuple(reversed(points))) if points else None


def _fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit y = intercept + slope * x by least squares with weights x; return (intercept, slope), the slope not negative.

    Textbook weighted least squares: with weighted means mx and my, slope = sum w (x-mx)(y-my) / sum w (x-mx)^2.
    None with fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        return None
    total = sum(x for x, _ in points)
    mean_x = sum(x * x for x, _ in points) / total
    mean_y = sum(x * y for x, y in points) / total
    covariance = sum(x * (x - mean_x) * (y - mean_y) for x, y in points)
    variance = sum(x * (x - mean_x) ** 2 for x, _ in points)
    # Peaks that fall with the size are noise: a sample never costs less than nothing.
    slope = max(0.0, covariance / variance)
    return mean_y - slope * mean_x, slope


def _fit_plane(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """Fit y = intercept + slope * x + slope_z * z by least squares with weights x; return (intercept, slope, slope_z).

    The normal equations of the centred variables, by Cramer's rule; None unless both slopes are positive.

    Args:
        rows: (x, z, y) of each point.
    """
    total = sum(row[0] for row in rows)
    means = [sum(row[0] * row[i] for row in rows) / total for i in range(3)]

    def covariance(i: int, j: int) -> float:
        """Return the weighted sum of products of columns i and j, both centred."""
        return sum(row[0] * (row[i] - means[i]) * (row[j] - means[j]) for row in rows)

    x, z, y = 0, 1, 2
    xx, zz, xz = covariance(x, x), covariance(z, z), covariance(x, z)
    xy, zy = covariance(x, y), covariance(z, y)
    # xx * slope + xz * slope_z = xy, and xz * slope + zz * slope_z = zy. The determinant is 0 where x and z rise and
    # fall together, as they do for trials of one length: then no point tells one slope from the other.
    determinant = xx * zz - xz * xz
    if determinant <= 1e-9 * xx * zz:
        return None
    slope = (xy * zz - zy * xz) / determinant
    slope_z = (zy * xx - xy * xz) / determinant
    if slope <= 0 or slope_z <= 0:
        return None
    return means[2] - slope * means[0] - slope_z * means[1], slope, slope_z


def memory_model(history: Sequence[Trial], prior: MemoryModel | None = None) -> MemoryModel | None:
    """Fit the memory model to the trials; until they suffice, use the one of an earlier run.

    Args:
        history: the trials so far, oldest first.
        prior: the earlier run's model. It is moved to where the newest trial lies: what a sample adds is that of the
            code, what is in use besides may differ from run to run.

    Returns:
        None while the trials do not suffice and there is no model that could be true of them.
    """
    model = fit_memory_model(history)
    if model is not None or prior is None:
        return model
    for trial in reversed(history):
        if trial.peak_bytes is not None:
            moved = prior.moved_to(trial.peak_bytes - prior.bytes_per_sample * trial.micro_batch)
            # Samples that would take more than there was in use have become cheaper: a code that has changed.
            return moved if moved.fixed_bytes >= 0 else None
    return prior


def bounds(history: Sequence[Trial]) -> tuple[int, int | None]:
    """Return (largest size that fits, smallest that does not), by the newest trials: memory may have moved meanwhile.

    The first is 0 while nothing fitted; the second None while nothing failed.
    """
    # Whatever fits, smaller ones fit too, and whatever fails, larger ones do: each trial overrules those before it that
    # say otherwise.
    fits: set[int] = set()  # sizes whose newest word is that they fit
    fails: set[int] = set()
    for trial in history:
        if trial.fits:
            fits.add(trial.micro_batch)
            fails = {size for size in fails if size > trial.micro_batch}
        else:
            fails.add(trial.micro_batch)
            fits = {size for size in fits if size < trial.micro_batch}
    return max(fits, default=0), min(fails, default=None)
