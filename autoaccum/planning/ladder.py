"""The levels of saving memory: a run goes down where not even the smallest micro-batch fits, and up as memory returns.

What a level is, is for others to know: here it is a number, 0 for a run that saves nothing. Going down is done at once,
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
