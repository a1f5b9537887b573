"""Data that arrives in pieces, kept until its window commits, cut and joined to the micro-batches asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from autoaccum.data import batches
from autoaccum.data.base import Collate, Item, NextPiece, Window
from autoaccum.data.randomness import mix, preserved, seed_host
from autoaccum.errors import DataError


@dataclass(frozen=True, slots=True)
class Form:
    """What a piece of data is, and so how it is cut, joined and made into a batch."""

    take: Callable[[Any, int, int], Any]
    join: Callable[[Sequence[Any]], Any]
    finish: Callable[[Any], Any]


BATCHES = Form(take=batches.take, join=batches.concat, finish=lambda piece: piece)


def items_form(collate: Callable[[list[Item]], Any]) -> Form:
    """Lists of samples, collated only when a micro-batch is made of them: so any collate_fn sees the final size."""
    return Form(
        take=lambda piece, start, stop: piece[start:stop],
        join=lambda pieces: [item for piece in pieces for item in piece],
        finish=collate,
    )


class Pieces:
    """One pass over pieces that arrive in order, each kept until the window that holds it is given up."""

    def __init__(
        self,
        next_piece: NextPiece,
        *,
        form: Form,
        device: torch.device,
        num_samples: int | None = None,
        reread: Callable[[int, int], Any] | None = None,
        cuttable: bool = True,
        budget_bytes: int | None = None,
        length_of_batch: Callable[[Any], int | None] | None = None,
        start: int = 0,
    ) -> None:
        """Set up.

        Args:
            next_piece: (samples wished for) -> the next piece, of any size, with its size; StopIteration after the
                last. When it fails, it can be asked again.
            form: what a piece is.
            device: where micro-batches go.
            num_samples: samples in the pass, when known.
            reread: (start, stop) -> the batch of those positions, read anew; None where that is impossible.
            cuttable: False when a piece is good only for a micro-batch of exactly its samples; else it is reread.
            budget_bytes: most to keep; past it the oldest are dropped, to be reread when asked for. None: keep all.
            length_of_batch: how long the samples of a piece are that is a batch; None where pieces are alike.
            start: position in the pass of the first sample that comes.
        """
        self._next_piece = next_piece
        self._form = form
        self._device = device
        self._num_samples = num_samples
        self._reread = reread
        self._cuttable = cuttable
        self._budget_bytes = budget_bytes if reread is not None else None
        self._length_of_batch = length_of_batch
        self._kept: list[tuple[int, int, Any, int]] = []  # (first position, last + 1, piece, bytes), without gaps
        self._kept_bytes = 0
        self._covered = self._position = start

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """See ``Reader``. A stream is read to the window's end, for nothing else tells how much there is."""
        start = self._position
        self._drop(bisect_right(self._kept, start, key=itemgetter(1)))
        total = self._num_samples
        if total is None:
            self._cover(start + num_samples, num_samples)
            total = self._covered
        there = min(num_samples, total - start)
        if there < (num_samples if whole else 1):
            return None
        self._position += there
        length = None
        if self._length_of_batch is not None:  # batches that are joined are as long as each other
            length = self._length_of_batch(self._kept[0][2])
        return _PieceWindow(self, start, there, None if length is None else (length,) * there)

    def batch(self, start: int, stop: int) -> Any:
        """The samples of positions ``start`` to ``stop``, on the device."""
        if not self._cover(stop, stop - start):
            raise DataError(f"data: it promised {self._num_samples} samples and ended after {self._covered}.")
        held = self._kept[
            bisect_right(self._kept, start, key=itemgetter(1)) : bisect_left(self._kept, stop, key=itemgetter(0))
        ]
        whole = bool(held) and held[0][0] <= start
        if whole and (self._cuttable or [kept[:2] for kept in held] == [(start, stop)]):
            parts = [self._part(first, last, piece, start, stop) for first, last, piece, _ in held]
            batch = self._form.finish(parts[0] if len(parts) == 1 else self._form.join(parts))
        else:
            assert self._reread is not None  # only what can be reread is dropped or not cuttable
            batch = self._reread(start, stop)
        while self._budget_bytes is not None and self._kept_bytes > self._budget_bytes and self._kept[0][1] <= stop:
            self._drop(1)
        return batches.to_device(batch, self._device, copy=True)

    def _part(self, first: int, last: int, piece: Any, start: int, stop: int) -> Any:
        if start <= first and last <= stop:
            return piece
        return self._form.take(piece, max(start - first, 0), min(stop, last) - first)

    def _cover(self, stop: int, wished: int) -> bool:
        """Read on until everything before ``stop`` has arrived; False when the data ends first."""
        while self._covered < stop:
            try:
                size, piece = self._next_piece(wished)
            except StopIteration:
                return False
            num_bytes = batches.num_bytes(piece) if self._budget_bytes is not None else 0
            self._kept.append((self._covered, self._covered + size, piece, num_bytes))
            self._kept_bytes += num_bytes
            self._covered += size
        return True

    def _drop(self, count: int) -> None:
        """Forget the oldest pieces."""
        self._kept_bytes -= sum(num_bytes for _, _, _, num_bytes in self._kept[:count])
        del self._kept[:count]


@dataclass(slots=True)
class _PieceWindow:
    pieces: Pieces
    start: int
    num_samples: int
    lengths: tuple[int, ...] | None = None

    def micro_batch(self, start: int, size: int) -> Any:
        return self.pieces.batch(self.start + start, self.start + start + size)


class SampleReader:
    """Reads and collates samples, each under a seed of its own, in this process or in a worker."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitems__(self, keys: Sequence[tuple[int, int, Any]]) -> list[Item]:
        """The samples of (epoch, position, index) keys; the name is the one by which a DataLoader's worker calls."""
        items = []
        for epoch, position, index in keys:
            seed_host(mix(self._seed, epoch, position))
            items.append((epoch, position, self.dataset[index]))
        return items

    def __call__(self, items: list[Item]) -> Any:
        """One batch of them."""
        epoch, position, _ = items[0]
        seed_host(mix(self._seed, epoch, position, 1))
        # Samples are collated again when a window is replayed, and a collate_fn may take parts out of them.
        return self._collate([copy(s) if isinstance(s, MutableMapping | list) else s for _, _, s in items])


def quietly(recipe: Callable[[list[Item]], Any]) -> Callable[[list[Item]], Any]:
    """The same in this process, leaving the random states as they were."""

    def collate(items: list[Item]) -> Any:
        with preserved():
            return recipe(items)

    return collate
