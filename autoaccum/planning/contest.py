"""Whether a rung that saves more memory is faster: it computes more for each sample, and runs more samples at a time.

Which of the two wins depends on the model and the device, and is told by whole windows on both rungs, each in the plan
that its own search has settled on. What a micro-batch takes has a part that is the same for any number of samples:
where that part is so small that larger ones could not make up for what is computed twice, nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from autoaccum.planning.costs import TimeModel
from autoaccum.planning.timing import GAIN, ROUNDS

TWICE = 8 / 7
"""What a rung adds at least: half a forward, which is a third of a window; the other half may be added already."""


def is_worth_it(weights: Sequence[int], times: TimeModel | None) -> bool:
    """Return whether windows that are cut like this may take less time in larger micro-batches on the rung below.

    Args:
        weights: of the micro-batches.
        times: what they take, as far as that is known.
    """
    if len(weights) == 1:
        return False
    # One size alone tells nothing of what others take.
    if times is None or len(times.points) < 2:
        return True
    # Of two sizes as close to what is run as they can be, and so far apart that they differ by more than chance does.
    size, seconds = times.points[-1]
    smaller, faster = next((of for of in reversed(times.points) if 2 * of[0] <= size), times.points[0])
    per_sample = (seconds - faster) / (size - smaller)
    fixed, own = max(0.0, seconds - per_sample * size), per_sample * sum(weights)
    # At best the window is run at once.
    return TWICE * (fixed + own) < GAIN * (fixed * len(weights) + own)


class Above(NamedTuple):
    """The fastest rung so far, while those below it are tried."""

    seconds: float
    """For a sample."""
    most: int
    """Samples of its largest micro-batch."""
    rungs: int
    """How many rungs it is above the one that is tried."""


class Contest:
    """The comparison of the rung that a run stands on with one above, from which it has come to try this one."""

    def __init__(self, *, is_allowed: bool) -> None:
        """Set up; where it is not allowed nothing is ever compared."""
        self._is_allowed = is_allowed
        self.is_open = is_allowed
        """Whether there is anything to find out on this rung."""
        self.above: Above | None = None
        """What this rung has to beat; None while it is not one that is tried."""
        # What a first window takes only makes ready for the next: it has allocations to make, and kernels to choose.
        self._seconds: list[float] = []

    @property
    def seconds(self) -> float | None:
        """Return the seconds for a sample on this rung; None until enough windows were timed."""
        # The median, as for plans: what disturbs one of the windows is not in it.
        return median(self._seconds[1:]) if len(self._seconds) > ROUNDS else None

    def has_lost(self, most: int) -> bool:
        """Return whether this rung, tried with so many samples at a time at most, is no faster than the one above."""
        if self.above is None:
            return False
        # It computes more for each sample, and that with no more samples at a time: nobody has to time that.
        if most <= self.above.most:
            return True
        # Where both are as fast, the one that computes less is kept.
        return self.seconds is not None and self.seconds > GAIN * self.above.seconds

    def observe(self, seconds: float) -> None:
        """Take the seconds for a sample of a window in the plan that was settled on."""
        self._seconds.append(seconds)

    def begin(self, above: Above | None) -> None:
        """Begin on a rung anew, which is to be compared with one above, if there is one."""
        self.is_open, self.above, self._seconds = self._is_allowed, above, []

    def reopen(self) -> None:
        """Look at this rung once more, for plans have changed; what is being tried is tried to its end."""
        if self.above is None:
            self.begin(None)

    def close(self) -> None:
        """Stay on this rung until something changes."""
        self.is_open, self.above, self._seconds = False, None, []

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: windows are timed anew."""
        return {"is_open": self.is_open, "above": None if self.above is None else tuple(self.above)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.begin(None if state["above"] is None else Above(*state["above"]))
        self.is_open = self.is_open and state["is_open"]
