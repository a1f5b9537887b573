"""Whether a rung that saves more memory is faster: it computes more for each sample, and runs more samples at a time.

Which of the two wins depends on the model and the device, and is told by whole windows on both rungs, each in the plan
that its own search has settled on. Where micro-batches are larger than a few samples, a device is busy with one of them
already, and what is computed twice would only come on top of that: there nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from autoaccum.planning.timing import GAIN, ROUNDS

FEW = 2
"""Try the rung below where micro-batches have at most so many times the fewest samples that they may have."""


def is_worth_it(sizes: Sequence[int], smallest: int) -> bool:
    """Return whether windows that are cut like this may take less time in larger micro-batches on the rung below."""
    return len(sizes) > 1 and max(sizes) <= FEW * smallest


class Contest:
    """The comparison of the rung that a run stands on with the one above, from which it has come to try this one."""

    def __init__(self, *, is_allowed: bool) -> None:
        """Set up; where it is not allowed nothing is ever compared."""
        self._is_allowed = is_allowed
        self.is_open = is_allowed
        """Whether there is anything to find out on this rung."""
        self.above: float | None = None
        """Seconds for a sample on the rung above, while this one is tried; None while it is not."""
        # What a first window takes only makes ready for the next: it has allocations to make, and kernels to choose.
        self._seconds: list[float] = []

    @property
    def seconds(self) -> float | None:
        """Return the seconds for a sample on this rung; None until enough windows were timed."""
        # The median, as for plans: what disturbs one of the windows is not in it.
        return median(self._seconds[1:]) if len(self._seconds) > ROUNDS else None

    @property
    def has_lost(self) -> bool:
        """Return whether this rung was tried and is no faster than the one above."""
        # Where both are as fast, the one that computes less is kept.
        return self.above is not None and self.seconds is not None and self.seconds > GAIN * self.above

    def observe(self, seconds: float) -> None:
        """Take the seconds for a sample of a window in the plan that was settled on."""
        self._seconds.append(seconds)

    def begin(self, above: float | None) -> None:
        """Begin on a rung anew, where the one above took so many seconds for a sample, if it is to be compared."""
        self.is_open, self.above, self._seconds = self._is_allowed, above, []

    def reopen(self) -> None:
        """Look at this rung once more, for plans have changed; what is being tried is tried to its end."""
        if self.above is None:
            self.begin(None)

    def close(self) -> None:
        """Stay on this rung until something changes."""
        self.is_open, self.above, self._seconds = False, None, []

    def state_dict(self) -> dict[str, float | bool | None]:
        """Return plain values, for a checkpoint: windows are timed anew."""
        return {"is_open": self.is_open, "above": self.above}

    def load_state_dict(self, state: dict[str, float | bool | None]) -> None:
        """Put back what ``state_dict`` returned."""
        above = state["above"]
        self.begin(None if above is None else float(above))
        self.is_open = self.is_open and bool(state["is_open"])
