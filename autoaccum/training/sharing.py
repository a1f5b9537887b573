"""Shares out the windows of a run that several ranks train, and keeps what each of them does."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.data.base import Window
from autoaccum.events import Shared
from autoaccum.ranks.balance import Balance, Shares, Stint
from autoaccum.ranks.group import Group
from autoaccum.ranks.shares import Share


class Sharing:
    """The shares of one run, as one of its ranks sees them."""

    def __init__(self, group: Group, balance: Balance, smallest: int) -> None:
        """Begin with equal shares; see ``Shares``."""
        self._group = group
        self._shares = Shares(group.size, balance, smallest)
        self._stints: Sequence[Stint] = ()  # of the last of the largest windows
        self._busy, self._waited = [0.0] * group.size, [0.0] * group.size
        self._was: tuple[int, ...] = ()  # the shares of a full window that were told last

    def share(self, window: Window) -> Share:
        """Return what this rank computes of a window."""
        return Share(window, self._shares.of(window.num_samples), self._group.rank)

    def own_samples(self, num_samples: int) -> int:
        """Return how many samples of such a window this rank computes."""
        return self._shares.of(num_samples)[self._group.rank]

    def saw(self, stints: Sequence[Stint]) -> None:
        """Take what each rank did of a window."""
        # The short one at an epoch's end does not show how others are cut.
        if _samples(stints) >= _samples(self._stints):
            self._stints = stints
        for rank, stint in enumerate(stints):
            self._busy[rank] += stint.seconds
            self._waited[rank] += stint.waited_seconds
        self._shares.saw(stints)

    def have_changed(self, num_samples: int) -> bool:
        """Return whether full windows of so many samples are shared out in another way than when it was asked last."""
        was, self._was = self._was, self._shares.of(num_samples)
        return bool(was) and sum(was) == num_samples and was != self._was

    def told(self, step: int) -> Shared | None:
        """Return what each rank has done since this was asked last; None where there was no window."""
        if not self._stints:
            return None
        found = Shared(
            step=step,
            micro_batches=tuple(stint.sizes for stint in self._stints),
            peak_bytes=tuple(stint.peak_bytes for stint in self._stints),
            limit_bytes=tuple(stint.limit_bytes for stint in self._stints),
            busy_seconds=tuple(self._busy),
            waited_seconds=tuple(self._waited),
        )
        size = self._group.size
        self._stints, self._busy, self._waited = (), [0.0] * size, [0.0] * size
        return found


def _samples(stints: Sequence[Stint]) -> int:
    return sum(sum(stint.sizes) for stint in stints)
