"""When to give way to a limit that moves, and when to believe that memory has come back.

Giving way costs little and waiting may cost an out-of-memory error, so that is done at once; but only when the limit
has eaten up all of the headroom. Growing again is tried on real windows, and a size that fails costs a replay: so that
waits for a calm, which has to be twice as long after each time that it was tried in vain. So however the limit moves,
there are few changes of plan in a hundred windows; and where it never stays up for long, ever fewer.
"""

from __future__ import annotations

from collections import deque

PATIENCE = 8
"""Looks at the memory without a change of plan before growth is tried."""
MOST_PATIENCE = 2**12
LASTING = 64
"""Growth that lasted for so many times the patience was not in vain."""
AGAIN = 100
"""Looks within which memory has to be strained a second time."""


class Pressure:
    """What looks at the memory have shown since the last change of plan."""

    def __init__(self) -> None:
        self.patience = PATIENCE
        self._looks = 0
        self._limits: deque[int] = deque(maxlen=PATIENCE)
        self._grew = False  # at the last change
        self._strained: int | None = None  # the look that last found strain

    def look(self, limit_bytes: int, is_strained: bool) -> bool:
        """Before a window; whether memory is so strained that smaller micro-batches are called for.

        Once may be the allocator's way of getting used to a new plan: it takes twice within a hundred looks.
        """
        self._looks += 1
        self._limits.append(limit_bytes)
        if not is_strained:
            return False
        last, self._strained = self._strained, self._looks
        return last is not None and self._looks - last <= AGAIN

    def lowest_limit(self) -> int | None:
        """Bytes that there were at least at each of the last looks, once all has been calm for long enough."""
        return min(self._limits) if self._looks >= self.patience else None

    def shrank(self) -> None:
        """A plan was given up for a smaller one."""
        if self._grew and self._looks < LASTING * self.patience:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self._grew = False
        self._changed()

    def grew(self) -> None:
        """Larger sizes are tried from now on."""
        self._grew = True
        self._changed()

    def _changed(self) -> None:
        self._looks = 0
        self._limits = deque(maxlen=self.patience)
        self._strained = None
