"""Which of the plans that fit is the fastest, told from whole windows.

Trials come too early to tell: the first run of a size loads its kernels and touches fresh memory. They say which plans
may be the fastest; each of these is given a few windows, which had to be run anyway, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from autoaccum.planning.costs import TimeModel, Trial, fit_time_model
from autoaccum.planning.search import PLATEAU

ROUNDS = 3
"""Windows that a plan is timed for, while it may be the fastest."""
PROMISING = 1.15
"""A plan is not timed when trials say that it takes longer than another by this factor."""
CLOSE = 1.05
"""A plan is not timed again when it took longer than another by this factor."""
GAIN = 0.99
"""A plan of smaller micro-batches has to take less than this share of the time."""
FINE = 1.02
"""A plan between two others is not timed when it cannot be faster by this factor."""
STRAIGHT = 0.03
"""Two plans between others that take as long as was expected, but for this fraction, are enough of them."""
MOST = 10
"""Plans that are timed, or two more; each takes at most 1 + ROUNDS windows."""


class Timing:
    """Says which largest micro-batch, the cap, to cut the next windows with, until it knows which is the fastest."""

    def __init__(
        self,
        largest: int,
        *,
        cut: Callable[[int], Sequence[int]],
        trials: Sequence[Trial],
        choose: Callable[[TimeModel], int] | None = None,
        closely: bool = False,
    ) -> None:
        """Set up.

        Args:
            largest: the cap of the largest micro-batches that fit.
            cut: (cap) -> the micro-batches of a window.
            trials: what is known of their times.
            choose: (time model) -> the best cap by it.
            closely: whether sizes between those that were timed are worth a try.
        """
        self.seconds: dict[int, list[float]] = {}
        """Of windows, by their caps."""
        self._cut = cut
        self._trials = [t for t in trials if t.seconds]
        self._choose = choose
        self._closely = closely
        self._expected: dict[int, float] = {}  # seconds of windows, by caps between two others
        self._candidates = [max(cut(largest))]
        self._candidates += self._promising()
        self._last: int | None = None

    def cap(self) -> int | None:
        """For the next window; None when the fastest is known."""
        if len(self._candidates) == 1:
            return None
        for cap in self._candidates:
            if cap not in self.seconds:
                return cap
        best = self._cost(self.fastest())
        for cap, seconds in self.seconds.items():
            if len(seconds) < ROUNDS and self._cost(cap) <= CLOSE * best:
                return cap
        return None

    def observe(self, cap: int, seconds: float) -> None:
        """A window that was cut with that cap took so long; the first one with a cap only makes ready for the next."""
        last, self._last = self._last, cap
        if cap not in self.seconds and last != cap:
            return
        self.seconds.setdefault(cap, []).append(seconds)
        if len(self._candidates) < MOST and all(candidate in self.seconds for candidate in self._candidates):
            self._candidates += self._promising()

    def fastest(self) -> int:
        """The cap of the fastest windows, larger ones being preferred."""
        if not self.seconds:
            return self._candidates[0]
        best = min(map(self._cost, self.seconds))
        return max(cap for cap in self.seconds if self._cost(cap) * GAIN <= best)

    def rises(self) -> bool:
        """Whether the largest micro-batches are clearly the fastest, so that yet larger ones may be faster still."""
        costs = [self._cost(cap) for cap in sorted(self.seconds, reverse=True)]
        return len(costs) > 1 and PLATEAU * costs[0] < min(costs[1:])

    def model(self) -> TimeModel | None:
        """Seconds by the size of a micro-batch: from windows, and for other sizes from trials at the windows' pace."""
        cold = fit_time_model(self._trials)
        pace = 1.0
        if cold is not None and self.seconds:
            pace = median(self._cost(cap) / self._predicted(cold, cap) for cap in self.seconds)
        points = {t.micro_batch: (t.seconds or 0) * pace for t in self._trials}
        points |= {cap: self._cost(cap) / len(self._cut(cap)) for cap in self.seconds}
        return fit_time_model(Trial(micro_batch=size, fits=True, seconds=time) for size, time in points.items())

    def _promising(self) -> list[int]:
        """Caps that may be faster than those so far."""
        model = self.model()
        if model is None:
            return []
        costs = {
            cap: self._cost(cap) if cap in self.seconds else self._predicted(model, cap) for cap in self._candidates
        }
        best, least = min(costs.values()), min(costs)
        found = []
        if self._choose is not None:
            cap = self._choose(model)
            if self._predicted(model, cap) < GAIN * best:
                found.append(cap)
        half = max(self._cut(max(1, least // 2)))
        lately = self.fastest() <= 2 * least + 1  # twice halved without a gain is enough
        if lately and costs[least] <= CLOSE * best and self._predicted(model, half) <= PROMISING * best:
            found.append(half)
        found = [cap for cap in dict.fromkeys(found) if cap not in costs]
        if not found and self._closely and not self._is_straight():
            found = self._between(model, best)
            self._expected |= {cap: self._predicted(model, cap) for cap in found}
        return found

    def _is_straight(self) -> bool:
        """Whether sizes between two others took as long as the straight line says: there are no steps to be found."""
        on_line = [cap for cap, seconds in self._expected.items() if abs(self._cost(cap) / seconds - 1) < STRAIGHT]
        return len(on_line) > 1

    def _between(self, model: TimeModel, best: float) -> list[int]:
        """A cap between two sizes that were timed, if for all that is known it may be faster: times may rise in steps.

        A device that takes samples by 48 takes as long for 48 as for 32, and for 64 twice as long.
        """
        largest, num_samples = self._candidates[0], sum(self._cut(self._candidates[0]))
        points = [(size, seconds) for size, seconds in model.points if largest / 8 <= size <= largest]
        for (below, seconds), (above, slower) in reversed(list(pairwise(points))):
            if above >= 2 * below and slower / above > CLOSE * seconds / below:
                continue  # by steps alone, twice the samples take no more than twice as long
            fewest, most = len(self._cut(above)), len(self._cut(below))
            cap = -(-num_samples // ((fewest + most) // 2))
            if below < cap < above and FINE * seconds * (fewest + 1) < best:
                return [cap]
        return []

    def _predicted(self, model: TimeModel, cap: int) -> float:
        return sum(map(model.predict, self._cut(cap)))

    def _cost(self, cap: int) -> float:
        return median(self.seconds[cap])
