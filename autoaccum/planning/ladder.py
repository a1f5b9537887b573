"""The rungs of saving memory: a run goes down where not even the smallest micro-batch fits, and up as memory returns.

What a rung is, is for others to know: here it is a number, 0 for a run that saves nothing. Going down is done at once,
for there is no other way on. Going up is tried on a real window and may cost a replay, so it waits for a calm that is
twice as long after each time that it was tried in vain: the same patience that sizes have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from autoaccum.planning.patience import SURELY_MORE, Pressure

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
    """Which rung a run stands on."""

    def __init__(self) -> None:
        # Bytes under which each of the rungs above is tried again: the highest comes first. As many as there are rungs
        # above, so that their number is the rung.
        self._wanted: list[int] = []
        self._failed: list[bool] = []  # whether they ran out of memory; else they were left, or left out, to be faster
        self._rises_by = 1
        self._pressure = Pressure()

    @property
    def rung(self) -> int:
        """Return the rung: 0 is the highest, on which nothing is saved."""
        return len(self._wanted)

    @property
    def was_left(self) -> bool:
        """Return whether the rung above was left for this one, and has not failed."""
        return bool(self._failed) and not self._failed[-1]

    def fall(self, limit_bytes: int, needed_bytes: int) -> None:
        """Go down, after the smallest micro-batch has run out of memory.

        Args:
            limit_bytes: what it might have used.
            needed_bytes: what it needs at least, as far as that is known.
        """
        # A little more than it failed with would end as it did, and more than it needs is known to be no failure.
        self._wanted.append(max(int(SURELY_MORE * limit_bytes), needed_bytes))
        self._failed.append(True)
        self._pressure.shrank()

    def leave(self, limit_bytes: int) -> None:
        """Go down from a rung that may do, to one that may be faster."""
        # Which of them is depends on how many samples fit: asked again where there is twice the memory.
        self._wanted.append(2 * limit_bytes)
        self._failed.append(False)
        self._pressure.shrank()

    def look(self, limit_bytes: int) -> bool:
        """Take a look at the memory before a window; return whether to go up."""
        self._pressure.look(limit_bytes, is_strained=False)
        lowest = self._pressure.lowest_limit()
        if not self._wanted or lowest is None:
            return False
        # What was left to be faster was so beside rungs that failed. Where the first of these may do, it is gone to.
        left = next((count for count, failed in enumerate(reversed(self._failed)) if failed), 0)
        ways = [by for by in (1, left + 1) if lowest >= self._wanted[-by]]
        self._rises_by = max(ways, default=0)
        return bool(ways)

    def rise(self) -> None:
        """Go up."""
        # Should it fail again, it is for another reason, or needs more: what was wanted is learnt anew.
        for _ in range(self._rises_by):
            self.give_back()
        self._pressure.grew()

    def give_back(self) -> None:
        """Go up again from a rung that was only tried: nothing was learnt of how memory moves."""
        self._wanted.pop()
        self._failed.pop()

    def give_up(self) -> None:
        """Go up to where nothing is saved, for what is below cannot be used."""
        self._wanted.clear()
        self._failed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        found: dict[str, Any] = {"wanted": list(self._wanted)}
        # Which came later, and says nothing where all have failed.
        return found if all(self._failed) else found | {"failed": list(self._failed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        # The patience begins anew: how memory moved under another process says little of this one.
        self._wanted = list(state["wanted"])
        self._failed = list(state.get("failed", [True] * len(self._wanted)))
