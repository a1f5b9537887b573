"""The part of a window that one rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoaccum.data.base import Window
from autoaccum.planning.cuts import near_equal
from autoaccum.ranks.group import Group


def own_share(num_samples: int, group: Group) -> int:
    """Return how many samples of such a window this rank computes."""
    return near_equal(num_samples, group.size)[group.rank]


def of_all_ranks(window: Window) -> Window:
    """Return the window that a share is of; one that is not shared is all of it."""
    return window.whole if isinstance(window, Share) else window


class Share:
    """A stretch of a window, which is a window itself for the rank that computes it; it may be empty."""

    def __init__(self, window: Window, rank: int, size: int) -> None:
        """Take the share of one rank of ``size``; they differ by one sample at most, the first ones being larger."""
        # In one piece, for lengths are sorted and rows are read in stretches.
        shares = near_equal(window.num_samples, size)
        self.whole = window
        """The samples of all ranks."""
        self.num_samples = shares[rank]
        """The samples of this one."""
        self._start = sum(shares[:rank])

    @property
    def lengths(self) -> Sequence[int] | None:
        """Return how long each of them is, longest first."""
        lengths = self.whole.lengths
        return None if lengths is None else lengths[self._start : self._start + self.num_samples]

    def micro_batch(self, start: int, size: int) -> Any:
        """Return the ``size`` samples from position ``start`` of the share, on the device."""
        return self.whole.micro_batch(self._start + start, size)

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions of the share as one batch."""
        return self.whole.samples([self._start + position for position in positions])
