"""Serves samples of different lengths longest first within each window, so that neighbours need little padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoaccum.data import batches
from autoaccum.data.base import Item, NextPiece, Window
from autoaccum.data.lengths import PEEK, Padding, lengths_of, try_twice
from autoaccum.memory.oom import RanOut, attempt


class GroupedSamples:
    """One pass over samples, a whole window of which is read before the first is served.

    The order is a function of the window's samples alone, so that it is the same whatever the plan, or when replayed.
    """

    def __init__(
        self,
        next_items: NextPiece,
        *,
        collate: Callable[[list[Item]], Any],
        padding: Padding,
        device: torch.device,
        num_samples: int | None = None,
        reread: Callable[[Sequence[int]], list[Item]] | None = None,
        budget_bytes: int | None = None,
        start: int = 0,
    ) -> None:
        """Set up.

        Args:
            next_items: (samples wished for) -> the next items, and how many they are; StopIteration after the last.
            collate: makes a batch of items, leaving the random states as they were.
            padding: what it makes of samples of different lengths.
            device: where micro-batches go.
            num_samples: samples in the pass, when known.
            reread: (positions in the pass) -> their items, read anew; None where that is impossible.
            budget_bytes: most to keep of a window; items past it are read again when asked for. None: keep all.
            start: position in the pass of the first sample that comes.
        """
        self._next_items = next_items
        self._collate = collate
        self._padding = padding
        self._device = device
        self._num_samples = num_samples
        self._reread = reread
        self._budget_bytes = budget_bytes if reread is not None else None
        self._position = start
        self._ahead: list[Item] = []  # what came with the last window's items
        self._kept: list[Item | None] = []

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """Return the next window: see ``Reader``."""
        self._kept.clear()  # the window before may still be in somebody's hand
        if self._num_samples is not None:
            # Where it is known that too few are left, they are not read for nothing.
            available = min(num_samples, self._num_samples - self._position)
            if available < (num_samples if whole else 1):
                return None
        kept, lengths = self._read(num_samples)
        if len(kept) < (num_samples if whole else 1):
            return None
        positions = range(self._position, self._position + len(kept))
        self._position += len(kept)
        by_length = sorted(range(len(kept)), key=lengths.__getitem__, reverse=True)  # of equal ones the earlier first
        window = _GroupedWindow(
            items=[kept[index] for index in by_length],
            positions=[positions[index] for index in by_length],
            collate=self._collate,
            reread=self._reread,
            device=self._device,
        )
        lengths.sort(reverse=True)
        # A window of one length tells nothing of the collate_fn. Its lengths are given all the same: those of the next
        # one need not be as long.
        if lengths[0] == lengths[-1] or self._padding.grows(window.item(len(kept) - 1), window.item(0)):
            window.lengths = self._padding.truncated(lengths, window.item)
        else:  # grouping gains nothing: in the order of the epoch
            window.items, window.positions = kept, list(positions)
        self._kept = window.items
        return window

    def _next(self, wished: int) -> list[Item]:
        """Return the next items: as many as wished, or fewer where memory does not do for so many at once."""
        while isinstance(outcome := attempt(partial(try_twice, partial(self._next_items, wished))), RanOut):
            if wished == 1:
                raise outcome.error
            wished //= 2
        return outcome[1]  # type: ignore[no-any-return]

    def _read(self, num_samples: int) -> tuple[list[Item | None], list[int]]:
        """Read the next items, and return them with their lengths; None stands in place of those past the budget."""
        kept: list[Item | None] = []
        lengths: list[int] = []
        kept_bytes = 0
        while (missing := num_samples - len(kept)) > 0:
            if not self._ahead:
                try:
                    self._ahead = self._next(min(missing, PEEK))
                except StopIteration:  # what came counts as a window, a short one
                    break
            items, self._ahead = self._ahead[:missing], self._ahead[missing:]
            lengths += lengths_of(items)
            if self._budget_bytes is not None:
                kept_bytes += batches.num_bytes(items)
            is_too_much = self._budget_bytes is not None and kept_bytes > self._budget_bytes
            kept += [None] * len(items) if is_too_much else items
        return kept, lengths


@dataclass(slots=True)
class _GroupedWindow:
    """A window that was read whole, served longest first."""

    items: list[Item | None]  # None in place of what is read again
    positions: list[int]  # of the items in the pass
    collate: Callable[[list[Item]], Any]
    reread: Callable[[Sequence[int]], list[Item]] | None
    device: torch.device
    lengths: tuple[int, ...] | None = None

    @property
    def num_samples(self) -> int:
        return len(self.positions)

    def item(self, index: int) -> Item:
        return try_twice(partial(self._items, index, index + 1))[0]

    def micro_batch(self, start: int, size: int) -> Any:
        return batches.to_device(self.collate(self._items(start, start + size)), self.device, copy=True)

    def in_order(self) -> Any:
        """Return all samples as one batch on the device, in the order of the data."""
        items = self._items(0, self.num_samples)
        order = sorted(range(self.num_samples), key=self.positions.__getitem__)
        return batches.to_device(self.collate([items[index] for index in order]), self.device, copy=True)

    def samples(self, positions: Sequence[int]) -> Any:
        return self.collate([self._items(position, position + 1)[0] for position in positions])

    def _items(self, start: int, stop: int) -> list[Item]:
        """Return items of the window; those that were dropped are read again."""
        held = self.items[start:stop]
        dropped = [position for item, position in zip(held, self.positions[start:stop], strict=True) if item is None]
        if not dropped:
            return held  # type: ignore[return-value]
        assert self.reread is not None  # only what can be reread is dropped
        read = iter(self.reread(dropped))
        return [next(read) if item is None else item for item in held]
