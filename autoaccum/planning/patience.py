"""The patience of plans: they give way to a limit that moves at once, and wait before they believe it has come back.

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
"""Looks that patience grows to at most: however often memory has gone, its return is noticed in the end."""
LASTING = 64
"""Do not double the patience where a growth has lasted for this many times the patience: it was not in vain."""
SURELY_MORE = 1.05
"""Try what did not fit again under a limit that is larger by this factor."""
STRAIN_COMES_BACK = 100
"""Looks within which memory has to be strained a second time before plans give way."""


class Pressure:
    """The findings of the looks at the memory since the last change of plan."""

    # A look is one reading of the limit and of the allocator's strain before a window; not every window has one.

    def __init__(self) -> None:
        self.patience = PATIENCE
        # These begin anew with each change of plan, for what came before was seen with micro-batches of another size.
        self._looks = 0
        self._limits: deque[int] = deque(maxlen=PATIENCE)  # in bytes, of the last looks: as many as are waited for
        self._strained: int | None = None  # the number of the look that last found strain
        # Whether the last change made plans larger. Only then has a plan that gives way grown in vain.
        self._grew = False

    def look(self, limit_bytes: int, is_strained: bool) -> bool:
        """Take in a look before a window; return whether memory is so strained that plans have to give way.

        To be strained once may be the allocator's way of getting used to a new plan: it takes twice in a hundred looks.

        Args:
            limit_bytes: what this process may use now.
            is_strained: whether memory was short since the last look, although nothing failed.
        """
        self._looks += 1
        self._limits.append(limit_bytes)
        if not is_strained:
            return False
        last, self._strained = self._strained, self._looks
        return last is not None and self._looks - last <= STRAIN_COMES_BACK

    def lowest_limit(self) -> int | None:
        """Return the least bytes that there were at any of the last looks; None until the calm was long enough."""
        return min(self._limits) if self._looks >= self.patience else None

    def shrank(self) -> None:
        """Note that a plan was given up for a smaller one; wait twice as long for the next growth if it was in vain."""
        if self._grew and self._looks < LASTING * self.patience:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self._grew = False
        self._changed()

    def grew(self) -> None:
        """Note that larger sizes are tried from now on."""
        self._grew = True
        self._changed()

    def _changed(self) -> None:
        """Begin to wait anew."""
        self._looks = 0
        self._limits = deque(maxlen=self.patience)
        self._strained = None
