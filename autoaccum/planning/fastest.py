"""Which of the plans that fit is kept: the one that is known to be the fastest, or else the next one to be timed.

``Timing`` compares plans; this says when a comparison begins and ends, and for how long its outcome holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoaccum.planning.costs import TimeModel
from autoaccum.planning.cuts import Lengths
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.timing import Timing

SIMILAR = 1.2
"""Windows whose samples differ by less than this factor tell as much of what is timed."""
PATIENT = 3
"""Timings that may be broken off by windows of another size; later ones are not begun."""
UNTIMED = 16
"""Windows in a row that are not full, after which plans are timed no more: those to come will not be either."""
FAR_OFF = 1.5
"""Times of an earlier run are not believed when windows take as many times as long, or as short."""
KNOWN = 1.25
"""Times are foretold for weights up to the largest that was timed, times this."""


class Fastest:
    """The plan to use, of those whose micro-batches fit."""

    def __init__(
        self, cutter: Cutter, largest: Callable[[], int], reach: Callable[[], int], *, few_sizes: bool
    ) -> None:
        """Set up.

        Args:
            cutter: cuts the windows.
            largest: () -> the largest weight that fits, as far as is known.
            reach: () -> a little more, where that is expected to fit, else 0: see ``Largest.reach``.
            few_sizes: whether no plan between those that are known is worth the size that it adds.
        """
        self._cutter = cutter
        # Asked each time, for memory comes and goes while plans are compared.
        self._largest, self._reach = largest, reach
        self.few_sizes = few_sizes
        """Whether no plan between those that are known is worth the size that it adds."""
        self.weight: int | None = None
        """The weight of the fastest plan, or of the one that is being timed; None for the largest that fits."""
        self.model: TimeModel | None = None
        """Seconds by weight, once plans were timed in this run or in an earlier one."""
        self.timing: Timing | None = None
        """The comparison of plans that goes on; None while there is none."""
        self._timed_window: tuple[int, Lengths] = (0, None)  # to which the times of other windows are scaled
        self._broken_off = 0  # comparisons that windows of another size have ended
        self._not_full = 0  # windows in a row that are not full, and so cannot be compared
        self.rises = False
        """Whether the last comparison found the largest micro-batches clearly the fastest."""
        self.wants_full = False
        """Whether the largest micro-batches are used, however fast others may be."""
        self.checks = 0
        """Windows to time until an earlier run's times are believed."""

    def planned(self) -> int:
        """Return the weight that plans are made of: that of the fastest, or the largest while that is not known.

        Where the largest is the fastest they may reach a little beyond it: see ``Largest.reach``.
        """
        # The fastest was found among those that fitted then.
        largest = self._largest()
        planned = largest if self.weight is None else min(self.weight, largest)
        return max(planned, self._reach()) if self._is_largest() else planned

    def _is_largest(self) -> bool:
        """Return whether plans are made of the largest micro-batches of all that were compared, or nothing was."""
        if self.weight is None:
            return True
        if self.timing is not None:
            return self.weight == self.timing.largest
        return self.model is not None and self.weight >= self.model.points[-1][0]

    def recall(self, model: TimeModel | None) -> None:
        """Begin with the times of an earlier run, which two windows will have to confirm."""
        self.model = model
        self.checks = 2 if model is not None else 0

    def forget(self) -> None:
        """Drop everything that is known of times: their units have changed, or an earlier run's were wrong."""
        self.model = self.timing = self.weight = None

    def use_largest(self) -> None:
        """Make plans of the largest weight again, whatever was the fastest, as a search for more begins."""
        self.weight = None

    def choose(self, *, is_settled: bool) -> None:
        """Keep the fastest plan where times are known, or begin to compare; do neither before a search has settled."""
        self.timing = self.weight = None
        self._not_full = 0
        if not is_settled or not self._cutter.full_window[0] or self.wants_full:
            return
        largest = self._largest()
        # Far beyond what was timed, times are a guess, and a wrong one would never show: there plans are compared.
        if self.model is not None and largest <= KNOWN * self.model.points[-1][0]:
            self.weight = self.of(self.model, largest)
            return
        window = self._timed_window = self._cutter.full_window
        # Where samples differ in length, windows do too, and only a change by a factor shows among them.
        are_alike = window[1] is None
        self.timing = Timing(
            largest,
            cut=lambda weight: self._cutter.weights_of(window, weight),
            trials=self._cutter.history.in_weights,
            choose=(lambda model: self.of(model, self._largest())) if are_alike else None,
            closely=are_alike and not self.few_sizes,
        )

    def of(self, model: TimeModel, largest: int) -> int:
        """Return the weight of the plan of a full window that takes least time, no micro-batch being heavier."""
        num_samples, lengths = self._cutter.full_window
        if lengths is None:
            # Every near-equal cut is looked at.
            most = min(largest, num_samples)
            return self._cutter.cheapest(num_samples, most, model.predict)
        # The next windows, of other lengths, are cut otherwise: finer than by halves the best weight cannot be told.
        weights = [max(largest >> halvings, 1) for halvings in range(6)]
        return min(weights, key=lambda weight: sum(map(model.predict, self._cutter.weights_of_full(weight))))

    def up_to(self, largest: int) -> int | None:
        """Return the same by the times that are known; None where none are."""
        return None if self.model is None else self.of(self.model, largest)

    def observe(self, seconds: float, num_samples: int, lengths: Lengths) -> None:
        """Take the time of a window; it is of use if the window was one of those that plans are made for."""
        if self.timing is None or self.weight is None:
            return
        if num_samples != self._cutter.full_window[0]:
            self._not_full += 1
            return
        self._not_full = 0
        # Windows of a ramp, or of samples of other lengths, have a little more or less to do: what counts are the
        # seconds for as much work as the comparison's first window had. Padding is no work, but the plan's own doing.
        work = self._cutter.work((num_samples, lengths))
        self.timing.observe(self.weight, seconds * self._cutter.work(self._timed_window) / work)

    def is_belied(self, seconds: float, weights: list[int]) -> bool:
        """Return whether a full window of such micro-batches shows that an earlier run's times are far off.

        The first window that is cut by them only makes ready for the second, which decides.
        """
        if not self.checks:
            return False
        self.checks -= 1
        if self.checks or self.model is None:
            return False
        expected = sum(map(self.model.predict, weights))
        return not expected / FAR_OFF < seconds < expected * FAR_OFF

    def compare(self) -> bool:
        """Choose the plan of the next full window; return False while there is more to compare."""
        if self.timing is None:
            return True
        self.weight = self.timing.next_weight()
        if self.weight is not None and self._not_full < UNTIMED:
            return False
        # All is known, or as much as ever will be.
        self.weight, self.model = self.timing.fastest(), self.timing.model()
        self.rises = self.timing.rises()
        self.timing = None
        return True

    def keeps_comparing(self, num_samples: int) -> bool:
        """Return whether a comparison goes on although full windows have so many samples from now on.

        A window that is a little larger or smaller tells as much: a ramp has no two alike. Where windows never stay as
        they are for long, comparisons are given up, and what is known by then has to do.
        """
        if self.timing is None:
            return False
        timed = self._timed_window[0]
        if timed / SIMILAR < num_samples < timed * SIMILAR:
            return True
        self._broken_off += 1
        # With a model ``choose`` begins no other comparison.
        if self._broken_off > PATIENT:
            self.model = self.timing.model()
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: of a comparison that goes on, only that it does."""
        return {
            "times": None if self.model is None else self.model.points,
            "is_timing": self.timing is not None,
            "_cap": self.weight,  # its name in the first version of the format
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; a comparison that went on has to be begun again."""
        self.model = None if state["times"] is None else TimeModel(points=state["times"])
        self.weight = state["_cap"]
