"""How far a search may jump: what the peaks of trials tell of larger micro-batches.

Peaks are no line in the samples. A workspace makes the first sizes alike, an allocator takes memory in steps, and a
loss may cost more from some size on. So no line is fitted here: two chords through the largest trials are compared, and
beside the size that *likely* fits there is one that *surely* does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoaccum.planning.costs import Trial

ALIKE = 0.1
"""Take two slopes for the same that differ by this fraction of one, or by what an allocator's step explains."""
STEP_BYTES = 20 * 2**20
"""The step in which PyTorch's allocator takes memory for tensors of 1 to 10 MiB."""
APART = 0.8
"""Draw a chord between sizes of which one is at most this fraction of the other: nearer ones tell noise and steps."""
SNUG = 0.95
"""Share of a limit that tensors can fill, where an allocator that grows in steps holds more than they need."""
DOUBT = 0.1
"""Predict no peak whose error bar is more than this fraction of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What the trials so far say of larger sizes."""

    size: int
    """The largest that fitted, of those whose peak is known."""
    peak_bytes: int
    """Its peak."""
    allocated_bytes: int | None
    """What tensors held of it; None where nobody tells."""
    slopes: tuple[float, ...]
    """Bytes that a sample adds, by chords between measured sizes: the first from the largest, each next one before."""
    steepest: float
    """Bytes that a sample may add beyond the largest, where costs are the largest of several lines."""
    alike: int
    """How many of the slopes in a row, from the first on, are the same as the next; 2 at most."""

    @property
    def slope(self) -> float | None:
        """Return the bytes that a sample adds by the last chord; None while a single size is known."""
        return self.slopes[0] if self.slopes else None

    @property
    def is_falling(self) -> bool:
        """Return whether samples cost clearly less than before: then the last chord is the steepest of all to come."""
        return len(self.slopes) > 1 and 0 < self.slopes[0] < (1 - ALIKE) * self.slopes[1]

    @property
    def is_narrow(self) -> bool:
        """Return whether what surely fits is nearly what likely does."""
        slope = self.slope or 0.0
        return slope > 0 and max(slope, self.steepest) <= (1 + ALIKE) * min(slope, self.steepest)

    def likely(self, limit_bytes: int) -> float:
        """Return the most samples within the limit if the last chord goes on; infinite where it is flat."""
        return self._beyond(limit_bytes, self.slope or 0.0)

    def surely(self, limit_bytes: int) -> float:
        """Return the most samples within the limit at the steepest slope."""
        return self._beyond(limit_bytes, self.steepest)

    def snugly(self, limit_bytes: int) -> float:
        """Return the most samples if tensors can fill nearly all of the limit; 0 where nobody tells them."""
        if self.allocated_bytes is None or not self.slope:
            return 0.0
        return self.size + (SNUG * limit_bytes - self.allocated_bytes) / self.slope

    def predict(self, size: int) -> int | None:
        """Return the peak bytes at a size by the last chord; None where too little is known for a prediction.

        It takes three sizes on a line with the start, or four on a line, and slopes so near to each other that what
        they differ by comes to a tenth of the prediction at most.
        """
        # A slope that was measured once may be that of the only step in which an allocator has grown.
        if len(self.slopes) < 2 or not (self.alike > 1 or self.is_narrow):
            return None
        slope, before = self.slopes[:2]
        doubts = abs(slope - before), abs(slope - self.steepest)
        doubt = min(doubts) if self.is_narrow else doubts[0]
        predicted = self.peak_bytes + slope * (size - self.size)
        return math.ceil(predicted) if doubt * abs(size - self.size) <= DOUBT * predicted else None

    def _beyond(self, limit_bytes: int, slope: float) -> float:
        # Rounding must not cost a sample where the limit is hit exactly.
        return math.floor(self.size + (limit_bytes - self.peak_bytes) / slope + 1e-6) if slope > 0 else math.inf


def reach(
    history: Sequence[Trial], *, start_bytes: int | None = None, sample_bytes: float | None = None
) -> Reach | None:
    """Return what the trials tell of larger sizes; None while no peak is known of one that fits.

    Chords are drawn from the largest size down, each to the next that is at most 0.8 of it, by the bytes of tensors
    where these are told from what the allocator holds. The steepest slope to come is told by where the curve starts: if
    costs are the largest of several lines, and each begins at what is in use without a sample or above it, none rises
    more steeply than the straight line from there to the largest trial, ``(peak - start) / size``. Where the last chord
    is steeper all the same, the curve bends, and is taken to bend on; without a start a slope that rises may double.

    Args:
        history: the trials, oldest first.
        start_bytes: what was in use before the first trial, and by tensors where these are told; None where nobody
            tells.
        sample_bytes: what a sample added in an earlier run, which stands for a chord before the first.
    """
    measured = {t.micro_batch: t for t in history if t.fits and t.peak_bytes is not None}
    if not measured:
        return None
    by_tensors = all(t.allocated_bytes is not None for t in measured.values())
    points = [(size, (t.allocated_bytes if by_tensors else t.peak_bytes) or 0) for size, t in sorted(measured.items())]
    chain = [points.pop()]
    largest = chain[0][0]
    while points:
        point = points.pop()
        if point[0] <= APART * chain[-1][0] or (not points and len(chain) == 1):
            chain.append(point)
    pairs = list(pairwise(chain))
    slopes = [max(0.0, (above[1] - below[1]) / (above[0] - below[0])) for above, below in pairs]
    # A slope is as uncertain as an allocator's step is large beside the samples over which it was measured.
    widths = [above[0] - below[0] for above, below in pairs]
    if sample_bytes is not None and len(slopes) < 2:
        slopes.append(sample_bytes)
        widths.append(largest)
    alike = 0
    while alike < min(2, len(slopes) - 1) and _are_alike(slopes[alike : alike + 2], slopes[0], widths[alike + 1]):
        alike += 1
    return Reach(
        size=largest,
        peak_bytes=measured[largest].peak_bytes or 0,
        allocated_bytes=chain[0][1] if by_tensors else None,
        slopes=tuple(slopes),
        steepest=_steepest(slopes, chain[0][1], largest, start_bytes, is_alike=alike > 0),
        alike=alike,
    )


def _are_alike(slopes: Sequence[float], last: float, width: int) -> bool:
    """Return whether two slopes in a row are the same, the second of them measured over so many samples."""
    return last > 0 and abs(slopes[0] - slopes[1]) <= max(ALIKE * last, min(STEP_BYTES / width, last / 2))


def _steepest(slopes: Sequence[float], peak_bytes: int, size: int, start_bytes: int | None, *, is_alike: bool) -> float:
    """Return the most bytes that a sample beyond the largest size may add: see ``Reach``."""
    # A line through the start has one slope, so that the bound is exact on the curves that are met most.
    if start_bytes is not None:
        from_start = max(0.0, (peak_bytes - start_bytes) / size)
        if not slopes or slopes[0] <= from_start:
            return from_start
        return slopes[0] * min(slopes[0] / from_start if from_start else 2.0, 2.0)
    if not slopes:
        return 0.0
    # Without a start what is in use at 0 samples may be anything down to nothing.
    is_rising = len(slopes) > 1 and slopes[0] > slopes[1] and not is_alike
    return min(2 * slopes[0], peak_bytes / size) if is_rising else slopes[0]
