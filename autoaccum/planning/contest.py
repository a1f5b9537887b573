"""Whether a rung that saves more memory is faster: it computes more for each sample, and runs more samples at a time.

Which of the two wins depends on the model and the device, and is told by whole windows on both rungs, each in the plan
that its own search has settled on. What a micro-batch takes has a part that is the same for any number of samples:
where that part is so small that larger ones could not make up for what is computed twice, nothing is tried.

Where a run has to go down, it goes at once to the rung that is likely to be the faster one; then it is the rung above
that may be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from autoaccum.planning.costs import TimeModel
from autoaccum.planning.timing import GAIN, PROMISING, ROUNDS

LONGEST = 24
"""Windows for which a rung is tried at most: a search and its timing take about half as many."""
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


class Room(NamedTuple):
    """What a window may use for its samples."""

    bytes: int
    """Beside what stays, such as the gradient."""
    most: int
    """Of the smallest micro-batches, so many at once are of use."""

    def holds_twice(self, here_bytes: int, below_bytes: int) -> bool:
        """Return whether the rung below is likely to hold twice as many samples at a time as this one.

        Then it takes 8/7 of the time at worst, where a device is busy with one sample; where it is not, little more
        than half, or less.

        Args:
            here_bytes: what the smallest micro-batch holds on this rung.
            below_bytes: on the rung below.
        """
        here, below = (min(self.bytes // max(1, held), self.most) for held in (here_bytes, below_bytes))
        # What does not seem to fit may still do: such a forecast alone is no reason to leave a rung out.
        return below >= 2 * max(1, here)


def is_worth_rising(weights: Sequence[int], times: TimeModel | None) -> bool:
    """Return whether windows that are cut like this may take less time on the rung above, which holds half as much.

    Args:
        weights: of the micro-batches.
        times: what they take here, as far as that is known.
    """
    if times is None or len(times.points) < 2:
        return True
    half = max(1, max(weights) // 2)
    above = -(-sum(weights) // half) * times.predict(half) / TWICE
    # Times of trials are rough, and to try it costs a few windows.
    return above < PROMISING * sum(map(times.predict, weights))


class Best(NamedTuple):
    """The fastest rung so far, while others are tried."""

    seconds: float
    """For a sample."""
    most: int
    """Samples of its largest micro-batch."""
    rungs: int
    """How many rungs it is above the one that is tried; -1 where it is the one below."""


class Contest:
    """The comparison of the rung that a run stands on with another one, from which it has come to try this one."""

    def __init__(self, *, is_allowed: bool) -> None:
        """Set up; where it is not allowed nothing is ever compared."""
        self.is_allowed = is_allowed
        self.is_open = is_allowed
        """Whether there is anything to find out on this rung."""
        self.best: Best | None = None
        """What this rung has to beat; None while it is not one that is tried."""
        self.beaten_with = 0
        """Samples of the largest micro-batch with which this rung has beaten the one above; 0 where it has not."""
        self.windows = 0
        """Windows that were run on this rung while it was open, LONGEST at most."""
        # What a first window takes only makes ready for the next: it has allocations to make, and kernels to choose.
        self._seconds: list[float] = []

    @property
    def seconds(self) -> float | None:
        """Return the seconds for a sample on this rung; None until enough windows were timed."""
        # The median, as for plans: what disturbs one of the windows is not in it.
        return median(self._seconds[1:]) if len(self._seconds) > ROUNDS else None

    def has_lost(self, most: int) -> bool:
        """Return whether this rung, tried with so many samples at a time at most, is no faster than the other one."""
        if self.best is None:
            return False
        # It computes more for each sample, and that with no more samples at a time: nobody has to time that.
        if self.best.rungs > 0 and most <= self.best.most:
            return True
        # Where both are as fast, the one that computes less is kept.
        share = GAIN if self.best.rungs > 0 else 1 / GAIN
        return self.seconds is not None and self.seconds > share * self.best.seconds

    @property
    def is_awaited(self) -> bool:
        """Return whether windows are soon to be run otherwise, or not, which is being found out."""
        # Where plans change again and again it never is: nobody is to wait for that.
        return self.is_open and (self.best is not None or self.windows < LONGEST)

    def is_overdue(self) -> bool:
        """Return, before each window while there is something to find out, whether that has gone on for too long."""
        if self.windows >= LONGEST:
            return True
        self.windows += 1
        return False

    def observe(self, seconds: float) -> None:
        """Take the seconds for a sample of a window in the plan that was settled on."""
        self._seconds.append(seconds)

    def begin(self, best: Best | None) -> None:
        """Begin on a rung, which is to be compared with the best so far, if it is another one."""
        self.is_open, self.best, self.beaten_with, self._seconds = self.is_allowed, best, 0, []
        self.windows = 0

    def reopen(self) -> None:
        """Look at this rung once more, for plans have changed; what is being tried is tried to its end."""
        if self.best is None:
            self.is_open, self._seconds = self.is_allowed, []

    def close(self, beaten_with: int = 0) -> None:
        """Stay on this rung until plans change; of a rung above that is beaten, until there are other sizes."""
        self.is_open, self.best, self._seconds = False, None, []
        self.beaten_with = beaten_with or self.beaten_with

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: windows are timed anew."""
        # The best is one above, or was always, and has its name from that.
        found: dict[str, Any] = {"is_open": self.is_open, "above": None if self.best is None else tuple(self.best)}
        found |= {"beaten": self.beaten_with} if self.beaten_with else {}
        return found | ({"windows": self.windows} if self.windows else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.begin(None if state["above"] is None else Best(*state["above"]))
        self.is_open, self.beaten_with = self.is_open and state["is_open"], state.get("beaten", 0)
        self.windows = state.get("windows", 0)
