"""The memory limit as plans heed it: its target, when to give way, when to grow, and the level of saving memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

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


CLEARLY_OVER = 1.05
"""Times the limit from which on it is passed where nobody else keeps it: a heap is a little over now and then."""


class Limits:
    """What micro-batches may take."""

    def __init__(self, limit_bytes: int, headroom: float) -> None:
        """Begin with a limit, of which plans leave the fraction ``headroom`` free.

        Args:
            limit_bytes: what may be used.
            headroom: the fraction of it that plans leave free.
        """
        self.headroom = headroom
        self.least_bytes = 0
        """The peak of the smallest micro-batch; 0 until it is known."""
        self.floor_bytes = 0
        """The most of what no plan makes smaller, such as an optimizer's step; 0 while nothing is known of it."""
        self.heed(limit_bytes)

    def heed(self, limit_bytes: int) -> None:
        """Take over the limit as it is now."""
        # The target goes with it, and is kept: it is asked for in every window.
        self.limit_bytes = limit_bytes
        """Bytes that this process may use."""
        self.target_bytes = self.target_of(limit_bytes)
        """The peak that plans keep to."""

    def target_of(self, limit_bytes: int) -> int:
        """Return the peak that plans would keep to under such a limit."""
        return target_bytes(limit_bytes, self.headroom, max(self.least_bytes, self.floor_bytes))

    def learn_least(self, peak_bytes: int) -> None:
        """Take over the peak of the smallest micro-batch, which moves the target where little is free above it."""
        # Were the target below what the smallest needs, every trial that is larger would be refused.
        self.least_bytes = peak_bytes
        self.heed(self.limit_bytes)

    def learn_floor(self, peak_bytes: int) -> None:
        """Take over the peak of what no plan makes smaller: micro-batches that take no more cost nothing."""
        if peak_bytes > self.floor_bytes:
            self.floor_bytes = peak_bytes
            self.heed(self.limit_bytes)

    def allows(self, peak_bytes: int, *, is_smallest: bool) -> bool:
        """Return whether a peak is acceptable: the smallest micro-batch may use the headroom, for there is no other."""
        return peak_bytes <= (self.limit_bytes if is_smallest else self.target_bytes)


def target_bytes(limit_bytes: int, headroom: float, least_bytes: int) -> int:
    """Return the peak that plans keep to.

    Args:
        limit_bytes: what this process may use.
        headroom: the fraction of it that is kept free.
        least_bytes: the peak of what there is under any plan, the smallest micro-batch say; 0 while it is not known.

    >>> target_bytes(1000, 0.05, 400), target_bytes(1000, 0.05, 980)
    (950, 999)
    """
    target = int(limit_bytes * (1 - headroom))
    if not target < least_bytes <= limit_bytes:
        return target
    # The least there can be is past it already, and within the limit: free stays the same fraction of what is left
    # above that.
    return int(least_bytes + (limit_bytes - least_bytes) * (1 - headroom))


SavingKind = Literal["checkpoint", "offload"]
"""Blocks that are computed twice; saved tensors and the optimizer's state on the host."""
SavingMode = Literal["auto", "off", "checkpoint", "offload"] | Sequence[SavingKind]
"""Whether memory is saved where nothing fits otherwise, never, or always: in one of these ways, or in several."""


def kinds_asked_for(mode: SavingMode) -> frozenset[str]:
    """Return in which ways memory is to be saved whatever fits; none where that is left to the run, or switched off."""
    if isinstance(mode, str):
        return frozenset() if mode in ("auto", "off") else frozenset((mode,))
    return frozenset(mode)


class Ladder:
    """Which level a run stands on."""

    def __init__(self) -> None:
        # Bytes under which each of the levels above is tried again, the highest first: their number is the level.
        self._wanted: list[int] = []
        self._pressure = Pressure()

    @property
    def level(self) -> int:
        """Return the level: 0 is the highest, on which nothing is saved."""
        return len(self._wanted)

    def fall(self, limit_bytes: int, needed_bytes: int) -> None:
        """Go down, after the smallest micro-batch has run out of memory.

        Args:
            limit_bytes: what it might have used.
            needed_bytes: what it needs at least, as far as that is known.
        """
        # A little more than it failed with would end as it did, and more than it needs is known to be no failure.
        self._wanted.append(max(int(SURELY_MORE * limit_bytes), needed_bytes))
        self._pressure.shrank()

    def look(self, limit_bytes: int) -> bool:
        """Take a look at the memory before a window; return whether to go up."""
        self._pressure.look(limit_bytes, is_strained=False)
        lowest = self._pressure.lowest_limit()
        return bool(self._wanted) and lowest is not None and lowest >= self._wanted[-1]

    def rise(self) -> None:
        """Go up."""
        # Should it fail again, it is for another reason, or needs more: what was wanted is learnt anew.
        self._wanted.pop()
        self._pressure.grew()

    def give_up(self) -> None:
        """Go up to where nothing is saved, for what is below cannot be used."""
        self._wanted.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"wanted": list(self._wanted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        # The patience begins anew: how memory moved under another process says little of this one.
        self._wanted = list(state["wanted"])
