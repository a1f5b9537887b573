"""Decides when a run is measured again, and keeps what that goes by."""

from __future__ import annotations

from typing import Any, Literal

_CLOSELY = 100
"""Windows of which each is looked at where nothing was measured; of later ones every tenth or so is."""
NEVER = 2**62
"""The number of no window."""
_MOST_SURPRISES = 4
"""Measurements because of what a window shows, after which they are made at every doubling of the number of surprises
only: a graph that depends on its data changes all the time."""

Status = Literal["unmeasured", "passed", "failed"]
"""What a run goes by: what can be read and is said, what was measured, or what has failed and was said."""

Reason = Literal["whole", "again", "losses"]
"""How a window is measured: wholly, which is told; once more, quietly where nothing has changed; or by its losses."""


class Occasions:
    """When to look, and when to measure: facts that outlive the process."""

    def __init__(self) -> None:
        """Begin before the first window."""
        self.status: Status = "unmeasured"
        self.surprises = 0
        """Windows that have shown what was not there before."""
        self.is_changed = False
        """Whether the last measurement has passed by another hypothesis than the one before."""
        self.largest = 0
        """Samples of the largest window that was measured."""
        self.is_short_measured = False
        """Whether a smaller one was measured after it."""
        self.next_round = 2
        """The number of the window at which is measured next, whatever it shows."""
        self.next_joined = 10
        """The number of the window at which two of its micro-batches are joined next, whatever it shows."""
        self.next_look = 1
        """The number of the next window whose forwards are looked at."""
        self.tries = _MOST_SURPRISES
        """How often it is still tried to measure what could not be measured."""

    def is_foreseen(self, number: int) -> bool:
        """Return whether a window is going to be measured, if it is cut, whatever it shows."""
        if self.status == "unmeasured":
            return self.tries > 0
        return self.status == "passed" and (self.is_changed or number >= self.next_round)

    @property
    def short_below(self) -> int:
        """Return below how many samples a window is shorter than those that were measured, and the first that is."""
        return 0 if self.is_short_measured else self.largest

    def reason(self, num_samples: int, number: int, *, is_surprising: bool) -> Reason | None:
        """Return how a window is measured; None where it need not be.

        Args:
            num_samples: its samples.
            number: its number.
            is_surprising: whether it shows what no window before it did.
        """
        if self.status == "failed":
            return None
        if self.status == "unmeasured":
            return "whole" if self.tries else None
        if is_surprising:
            self.surprises += 1
            if self.surprises <= _MOST_SURPRISES or self.surprises & (self.surprises - 1) == 0:
                return "whole"
        # The samples of a first window may be alike, and what it sets up is not seen in it.
        if number == self.next_round == 2:
            return "again"
        return "losses" if number >= self.next_round or num_samples < self.short_below else None

    def is_for_joined(self, num_samples: int, number: int) -> bool:
        """Return whether in a window that is measured by its losses two micro-batches are joined too."""
        # It takes as long as half a window, and not as a few samples: seldom enough to be nothing beside a short run.
        return number >= self.next_joined or num_samples < self.short_below

    def measured(self, num_samples: int, number: int) -> None:
        """Take that a window is measured."""
        self.is_short_measured = self.is_short_measured or num_samples < self.largest
        self.largest = max(self.largest, num_samples)
        if number >= self.next_round:
            # 2, 3, 5, 10, 20, 50, 100, ...; and 10, 100, ... the others
            power = 10 ** (len(str(number)) - 1)
            self.next_round = number + 1 if number < 3 else next(n * power for n in (2, 5, 10) if n * power > number)
        if number >= self.next_joined:
            self.next_joined = 10 ** len(str(number))

    def renew(self) -> None:
        """Take that there may be room for what could not be measured: try it once more at least."""
        self.tries = max(self.tries, 1)

    def looked(self, number: int) -> None:
        """Take that a window was looked at: the next one is that is to be measured; of a run that has failed none.

        Of one that is not measured yet each of the first hundred is, and then one in ten, in a hundred, and so on.
        """
        every = 1 if number < _CLOSELY else int(10 ** (len(str(number)) - 2))
        looks = {"unmeasured": (number // every + 1) * every, "failed": NEVER}
        self.next_look = looks.get(self.status, number + 1 if self.is_changed else max(number + 1, self.next_round))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        state = dict(vars(self))
        # Which came later than the rest, and are there once they say something.
        if not self.is_changed:
            del state["is_changed"]
        if self.next_joined == 10:
            del state["next_joined"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        vars(self).update(state)
