"""How much of a window each rank computes: alike, or as follows from how fast the ranks are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from autoaccum.planning.cuts import near_equal

Balance = Literal["equal", "speed"]
"""How windows are shared out: alike, or by how fast ranks were measured to be."""
_WINDOWS = 5
"""Windows whose median tells how fast a rank is."""
_GAIN = 0.03
"""Fraction of a window's time that other shares have to save, for each change has plans found anew."""
_IDLE = 100
"""Windows after which a rank that was too slow for any sample is given one, so that it is measured again."""


class Stint(NamedTuple):
    """What one rank did of a window."""

    sizes: tuple[int, ...]
    """Its micro-batches."""
    seconds: float
    """In which it has computed, and waited for none of the others."""
    waited_seconds: float
    """In which it was in collectives, most of it waiting for others."""
    peak_bytes: int
    limit_bytes: int
    is_settled: bool
    """Whether it says how fast the rank is: nothing was tried in it, and nothing run again."""


class Shares:
    """How the windows of a run are shared out; all ranks hear the same, so that all have the same shares."""

    def __init__(self, size: int, balance: Balance, smallest: int = 1) -> None:
        """Begin with equal shares.

        Args:
            size: how many ranks there are.
            balance: by what they are shared out.
            smallest: the fewest samples that a rank can compute a loss of, unless the window has fewer.
        """
        self._fewest = smallest
        self._by_speed = balance == "speed"
        self._size = size
        self._speeds: list[float] | None = None  # samples a second of each rank; None: all alike
        self._seen: list[deque[float]] = [deque(maxlen=_WINDOWS) for _ in range(size)]
        self._idle = [0] * size  # windows in a row of which a rank had no sample

    def of(self, num_samples: int) -> tuple[int, ...]:
        """Return how many samples of such a window each rank computes."""
        if self._speeds is None:
            count = max(1, min(self._size, num_samples // self._fewest))
            return (*near_equal(num_samples, count), *(0,) * (self._size - count))
        found = _by_speed(num_samples, self._speeds, self._fewest)
        for rank, idle in enumerate(self._idle):
            if idle >= _IDLE and not found[rank] and max(found) >= 2 * self._fewest:
                found[found.index(max(found))] -= self._fewest
                found[rank] = self._fewest
        return tuple(found)

    def saw(self, stints: Sequence[Stint]) -> None:
        """Take what each rank did of a window; shares are others from now on if that saves time."""
        if not self._by_speed:
            return
        sizes = [sum(stint.sizes) for stint in stints]
        self._idle = [0 if size else idle + 1 for size, idle in zip(sizes, self._idle, strict=True)]
        if not all(stint.is_settled for stint in stints):
            return
        for seen, stint, size in zip(self._seen, stints, sizes, strict=True):
            if size and stint.seconds > 0:
                seen.append(size / stint.seconds)
        # Of one that has no samples what it was when it had some stands.
        if any(len(seen) < _WINDOWS for seen, size in zip(self._seen, sizes, strict=True) if size):
            return
        known = [median(seen) if seen else 0.0 for seen in self._seen]
        speeds = [speed or min(filter(None, known)) for speed in known]
        then = _by_speed(sum(sizes), speeds, self._fewest)
        if _seconds(then, speeds) < (1 - _GAIN) * _seconds(sizes, speeds):
            self._speeds = speeds
            # How fast a rank is depends on how much it has at once, so that it is seen anew.
            for seen, size in zip(self._seen, then, strict=True):
                if size:
                    seen.clear()


def _seconds(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the slowest rank takes."""
    # They run at the same time, and the last to end is waited for.
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


def _by_speed(num_samples: int, speeds: Sequence[float], smallest: int) -> list[int]:
    """Return shares of so many samples that all ranks end at once, as nearly as whole samples do."""
    sizes = _in_proportion(num_samples, speeds)
    # One that has too few for a loss has none.
    while any(0 < size < smallest for size in sizes) and sum(map(bool, sizes)) > 1:
        least = min((size, speeds[rank], rank) for rank, size in enumerate(sizes) if size)[-1]
        speeds = [0.0 if rank == least else speed for rank, speed in enumerate(speeds)]
        sizes = _in_proportion(num_samples, speeds)
    return sizes


def _in_proportion(num_samples: int, speeds: Sequence[float]) -> list[int]:
    # Whole samples alone: what is lost by that is handed out after it.
    total = sum(speeds)
    sizes = [int(num_samples * speed / total) for speed in speeds]
    # What is left goes where it ends first; of ranks that are alike, to the first ones.
    while sum(sizes) < num_samples:
        ends = [(size + 1) / speed if speed else math.inf for size, speed in zip(sizes, speeds, strict=True)]
        sizes[ends.index(min(ends))] += 1
    return sizes
