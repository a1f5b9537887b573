"""The part of a window that one rank computes: a share of one that all of them read, or what each was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoaccum.data.base import Window


def num_of_all_ranks(window: Window) -> int:
    """Return how many samples the ranks have of a window together."""
    return window.num_of_all if isinstance(window, Share | Part) else window.num_samples


def whole_of(window: Window) -> Window | None:
    """Return the samples of all ranks; None where each can read its own alone."""
    return None if isinstance(window, Part) else measured_by_first(window)


def measured_by_first(window: Window) -> Window:
    """Return what the first rank reads of a window to measure it; other ranks may know its number of samples only."""
    return window.of_first if isinstance(window, Share | Part) else window


def argument_of(window: Window) -> str:
    """Return what the user calls the samples of all ranks."""
    return "batch" if isinstance(window, Part) else "effective_batch"


class Share:
    """A stretch of a window, which is a window itself for the rank that computes it; it may be empty."""

    def __init__(self, window: Window, sizes: Sequence[int], rank: int) -> None:
        """Take the share of one rank; ``sizes`` are those of all ranks, and sum to the window's samples."""
        # In one piece, for lengths are sorted and rows are read in stretches.
        self.of_first = self._whole = window
        """All of the window, which every rank can read."""
        self.num_of_all = window.num_samples
        """The samples of all ranks."""
        self.num_samples = sizes[rank]
        """The samples of this one."""
        self._sizes, self._rank = sizes, rank
        self._start = sum(sizes[:rank])

    def own_part(self, plan: Sequence[int]) -> tuple[int, ...]:
        """Return what this rank computes of micro-batches that make the whole window.

        Those of a run with as many ranks are each of one of them; those of another run are cut where a share ends: of
        (3, 3, 3) shares of 5 and of 4 have (3, 2) and (1, 3).
        """
        found, start = [], 0
        for size in plan:
            first, last = max(start, self._start), min(start + size, self._start + self.num_samples)
            if first < last:
                found.append(last - first)
            start += size
        return tuple(found)

    @property
    def lengths(self) -> Sequence[int] | None:
        """Return how long each of them is, longest first."""
        lengths = self._whole.lengths
        return None if lengths is None else lengths[self._start : self._start + self.num_samples]

    def micro_batch(self, start: int, size: int) -> Any:
        """Return the ``size`` samples from position ``start`` of the share, on the device."""
        return self._whole.micro_batch(self._start + start, size)

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions of the share as one batch."""
        return self._whole.samples([self._start + position for position in positions])


class Part:
    """What one rank was given of a window, whose other parts it cannot read; it may be empty."""

    def __init__(self, window: Window, rank: int, sizes: Sequence[int]) -> None:
        """Take what this rank was given; ``sizes`` are the samples of each."""
        self._window = window
        self.num_samples = window.num_samples
        """The samples of this one."""
        self.num_of_all = sum(sizes)
        """The samples of all ranks."""
        self.of_first: Window = self if rank == 0 else Elsewhere(sizes[0])
        """The part of the first rank, of the size of which all know when it was measured."""

    @property
    def lengths(self) -> Sequence[int] | None:
        """Return how long each of its samples is, longest first."""
        return self._window.lengths

    def micro_batch(self, start: int, size: int) -> Any:
        """Return the ``size`` samples from position ``start`` of the part, on the device."""
        return self._window.micro_batch(start, size)

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions of the part as one batch."""
        return self._window.samples(positions)


class Elsewhere:
    """A window that another rank holds, of which there is only a number here."""

    lengths = None

    def __init__(self, num_samples: int) -> None:
        """Take how many samples it has."""
        self.num_samples = num_samples

    def micro_batch(self, start: int, size: int) -> Any:
        """Read nothing.

        Raises:
            LookupError: always.
        """
        raise LookupError("its samples are on another rank")

    def samples(self, positions: Sequence[int]) -> Any:
        """Read nothing.

        Raises:
            LookupError: always.
        """
        raise LookupError("its samples are on another rank")
