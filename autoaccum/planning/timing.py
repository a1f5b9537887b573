"""The timing of plans: which of those that fit is the fastest, told from whole windows.

Trials come too early to tell: the first run of a size loads its kernels and touches fresh memory. They say which plans
may be the fastest; each of these is given a few windows, which had to be run anyway, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from autoaccum.planning.costs import PLATEAU, TimeModel, Trial, fit_time_model

ROUNDS = 3
"""Windows that a plan is timed for, while it may be the fastest."""
ROUNDS_OF_FULL = 5
"""Windows that the full batch is timed for before a split is preferred to it."""
PROMISING = 1.15
"""Do not time a plan when trials say that it takes longer than another by this factor."""
CLOSE = 1.05
"""Do not time a plan again when it took longer than another by this factor."""
GAIN = 0.99
"""Prefer a plan of smaller micro-batches only when it takes less than this share of the time."""
GAIN_OF_SPLIT = 0.97
"""Prefer a plan that splits the full batch only when it takes less than this share of the full batch's time."""
FINE = 1.02
"""Do not time a plan between two others when it cannot be faster by this factor."""
STRAIGHT = 0.03
"""Stop timing plans between others once two of them took as long as expected, but for this fraction."""
MOST_PLANS = 10
"""Look for no further plans once so many are timed, or two more; each takes at most 1 + ROUNDS windows."""


class Timing:
    """The search for the fastest plan, window by window.

    A plan is known by its *weight*: that of the heaviest micro-batch that a window is cut into, which fixes all others.
    """

    def __init__(
        self,
        largest: int,
        *,
        cut: Callable[[int], Sequence[int]],
        trials: Sequence[Trial],
        choose: Callable[[TimeModel], int] | None = None,
        closely: bool = False,
    ) -> None:
        """Begin with the plan of the largest micro-batches, and with those that trials promise to be faster.

        Args:
            largest: the weight of the largest micro-batches that fit.
            cut: (weight) -> the micro-batches of a window.
            trials: what is known of their times.
            choose: (time model) -> the best weight by it.
            closely: whether sizes between those that were timed are worth a try.
        """
        self.seconds: dict[int, list[float]] = {}
        """The seconds of windows, by their weights."""
        self._cut = cut
        self._trials = [t for t in trials if t.seconds]
        self._choose = choose
        self._closely = closely
        # Seconds that a straight line foretells for the weights between two others, to see whether it is one.
        self._expected: dict[int, float] = {}
        # Weights in the order in which they are timed: the largest first.
        self.largest = max(cut(largest))
        """The weight of the plan that has the fewest micro-batches, to which all others are compared."""
        self._candidates = [self.largest]
        self._candidates += self._promising()
        self._last: int | None = None  # the weight of the window before

    def next_weight(self) -> int | None:
        """Return the weight to cut the next window with; None when the fastest is known."""
        # With nothing to compare it to, the time of the only plan is of no interest.
        if len(self._candidates) == 1:
            return None
        for weight in self._candidates:
            if weight not in self.seconds:
                return weight
        # Each has been timed once. Those that were clearly slower have had their chance; the others may have been
        # disturbed, and are timed again until the median of a few windows decides.
        best = self._cost(self.fastest())
        for weight, seconds in self.seconds.items():
            is_close = self._cost(weight) <= CLOSE * best
            # Other work on the machine may have slowed a full batch, which is to be split only on proof.
            is_losing = self._is_whole(weight) and self._cost(weight) > best
            if len(seconds) < (ROUNDS_OF_FULL if is_losing else ROUNDS if is_close else 1):
                return weight
        return None

    def observe(self, weight: int, seconds: float) -> None:
        """Note the seconds of a window that was cut with that weight; the first one only makes ready for the next.

        It chooses kernels for sizes that it meets for the first time, and its allocations fragment what there was.
        """
        last, self._last = self._last, weight
        if weight not in self.seconds and last != weight:
            return
        self.seconds.setdefault(weight, []).append(seconds)
        # All that seemed promising are timed: what is known now may promise more.
        if len(self._candidates) < MOST_PLANS and all(candidate in self.seconds for candidate in self._candidates):
            self._candidates += self._promising()

    def fastest(self) -> int:
        """Return the weight of the fastest windows, a larger one where smaller ones gain next to nothing."""
        if not self.seconds:
            return self._candidates[0]
        best = min(map(self._cost, self.seconds))

        # Times that differ by less tell nothing, and then the fewest micro-batches are kept.
        def gain(weight: int) -> float:
            return GAIN_OF_SPLIT if self._is_whole(weight) else GAIN

        return max(weight for weight in self.seconds if self._cost(weight) * gain(weight) <= best)

    def rises(self) -> bool:
        """Return whether the largest micro-batches are clearly the fastest, so that larger ones may be faster still."""
        costs = [self._cost(weight) for weight in sorted(self.seconds, reverse=True)]
        return len(costs) > 1 and PLATEAU * costs[0] < min(costs[1:])

    def model(self) -> TimeModel | None:
        """Fit seconds by the size of a micro-batch: to windows, and for other sizes to trials at the windows' pace."""
        by_trials = fit_time_model(self._trials)
        # Trials are cold runs and take longer than windows do. By how much, the windows timed so far tell.
        pace = 1.0
        if by_trials is not None and self.seconds:
            pace = median(self._cost(weight) / self._predicted(by_trials, weight) for weight in self.seconds)
        points = {t.micro_batch: (t.seconds or 0) * pace for t in self._trials}
        points |= {weight: self._cost(weight) / len(self._cut(weight)) for weight in self.seconds}
        return fit_time_model(Trial(micro_batch=size, fits=True, seconds=time) for size, time in points.items())

    def _promising(self) -> list[int]:
        """Return weights that may be faster than those so far."""
        model = self.model()
        if model is None:
            return []
        costs = {}
        for weight in self._candidates:
            costs[weight] = self._cost(weight) if weight in self.seconds else self._predicted(model, weight)
        best, least = min(costs.values()), self._last_half()
        found = []
        if self._choose is not None:
            weight = self._choose(model)
            if self._predicted(model, weight) < GAIN * best:
                found.append(weight)
        # Smaller micro-batches need not take longer, where a device is busy with few samples already. Twice halved
        # without a gain is enough: the fastest is then more than twice the smallest half.
        half = max(self._cut(max(1, least // 2)))
        gained_lately = self.fastest() <= 2 * least + 1
        if gained_lately and costs[least] <= CLOSE * best and self._predicted(model, half) <= PROMISING * best:
            found.append(half)
        found = [weight for weight in dict.fromkeys(found) if weight not in costs]
        # Only when nothing else promises anything: steps between two sizes are the rarest of gains.
        if not found and self._closely and not self._is_straight():
            found = self._between(model, best)
            self._expected |= {weight: self._predicted(model, weight) for weight in found}
        return found

    def _last_half(self) -> int:
        """Return the smallest candidate that halving the largest step by step comes to."""
        weight = self.largest
        while (half := max(self._cut(max(1, weight // 2)))) in self._candidates and half < weight:
            weight = half
        return weight

    def _is_straight(self) -> bool:
        """Return whether sizes between two others took as long as the straight line says: there are no steps."""
        on_line = [
            weight for weight, seconds in self._expected.items() if abs(self._cost(weight) / seconds - 1) < STRAIGHT
        ]
        return len(on_line) > 1

    def _between(self, model: TimeModel, best: float) -> list[int]:
        """Return a weight between two sizes that were timed if, for all that is known, it may be faster; else nothing.

        Times may rise in steps: a device that takes samples by 48 takes as long for 48 as for 32, and for 64 twice as
        long.
        """
        largest, num_samples = self._candidates[0], sum(self._cut(self._candidates[0]))
        points = [(size, seconds) for size, seconds in model.points if largest / 8 <= size <= largest]
        # The largest pair first: of plans that are as fast, the one with larger micro-batches is kept.
        for (below, seconds), (above, slower) in reversed(list(pairwise(points))):
            # By steps alone, twice the samples take no more than twice as long: here something else makes them slow.
            if above >= 2 * below and slower / above > CLOSE * seconds / below:
                continue
            fewest, most = len(self._cut(above)), len(self._cut(below))
            weight = max(self._cut(-(-num_samples // ((fewest + most) // 2))))  # where groups are whole, one of these
            # At best it is as fast as the smaller one, in at least one micro-batch more than the larger one takes.
            if below < weight < above and FINE * seconds * (fewest + 1) < best:
                return [weight]
        return []

    def _predicted(self, model: TimeModel, weight: int) -> float:
        """Return the seconds of a window that is cut with that weight, by the model."""
        return sum(map(model.predict, self._cut(weight)))

    def _cost(self, weight: int) -> float:
        """Return the seconds of windows cut with that weight: what disturbs one of them is not in the median."""
        return median(self.seconds[weight])

    def _is_whole(self, weight: int) -> bool:
        """Return whether windows of that weight are run at once."""
        return len(self._cut(weight)) == 1
