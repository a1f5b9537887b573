"""Sizes that several ranks agree on without a word: as large as training's, and half as large after each failure.

Where ranks run the same micro-batches together, what one of them finds out about its own memory must decide nothing
on its own. All of them hear which sizes failed, and each draws the same conclusion.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoaccum.planning.attempts import Piece
from autoaccum.planning.costs import bounds
from autoaccum.planning.trials import Trials


class Halving(Trials):
    """What failed on any rank, by which the next size is known. Nothing is tried: training's sizes fit."""

    def window(self, num_samples: int, ceiling: int) -> Iterator[Piece]:
        """Yield the pieces of a window, none above ``ceiling``."""
        for piece in super().window(num_samples, ceiling):
            yield Piece(piece.start, piece.size, is_trial=False)

    def size(self, ceiling: int) -> int:
        """Return the samples of the next piece."""
        # What is half as large as the smallest that failed; a run that goes on has kept which did.
        fails = bounds(self.history)[1]
        return ceiling if fails is None else max(self.smallest, min(ceiling, fails // 2))
