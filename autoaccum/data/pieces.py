"""Keeps data that arrives in pieces until its window commits; cuts and joins it to the micro-batches asked for."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import StackDataset, Subset, default_collate, get_worker_info

from autoaccum.data import batches
from autoaccum.data.base import Collate, Item, NextPiece, Window
from autoaccum.data.collating import collate_of
from autoaccum.data.lengths import PEEK
from autoaccum.data.lists import columns, holds_samples, is_leaf_of
from autoaccum.data.randomness import (
    RandomState,
    are_same,
    collation,
    get_state,
    mix,
    preserved_randomness,
    seed_host,
    set_state,
)
from autoaccum.errors import AutoaccumError, DataError
from autoaccum.memory.oom import is_out_of_memory, without_frames

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form:
    """What a piece of data is, and so how it is cut, joined and made into a batch."""

    take: Callable[[Any, int, int], Any]
    """(piece, start, stop) -> its samples from ``start`` to ``stop``"""
    join: Callable[[Sequence[Any]], Any]
    """(pieces) -> one piece"""
    finish: Callable[[Any], Any]
    """(piece) -> a batch"""
    is_always_cut: bool = False
    """Whether a whole piece is cut too, for what is cut of it may be of another form."""


BATCHES = Form(take=batches.take, join=batches.concat, finish=lambda piece: piece)
"""Pieces that are batches already."""


def batches_form(split: Any) -> Form:
    """Return the form of pieces that are batches, which a split cuts and joins."""
    # Whole pieces too, for a user's function may make tensors of what is no tensor.
    return Form(
        take=lambda piece, start, stop: split(piece, start, stop - start),
        join=split.join,
        finish=lambda piece: piece,
        is_always_cut=True,
    )


def items_form(collate: Callable[[list[Item]], Any]) -> Form:
    """Return the form of pieces that are lists of samples.

    They are collated only when a micro-batch is made of them, so that any collate_fn sees its final size.
    """
    return Form(
        take=lambda piece, start, stop: piece[start:stop],
        join=lambda pieces: [item for piece in pieces for item in piece],
        finish=collate,
    )


class _Piece(NamedTuple):
    """What came at once, and is kept."""

    start: int
    """Position in the pass of its first sample."""
    stop: int
    """And of its last sample, + 1."""
    content: Any
    """What it holds, in the form of its pass."""
    num_bytes: int
    """How much memory it takes; 0 where that does not matter."""


class Pieces:
    """One pass over pieces that arrive in order, each kept until the window that holds it is given up."""

    def __init__(
        self,
        next_piece: NextPiece,
        *,
        form: Form,
        device: torch.device,
        num_samples: int | None = None,
        reread: Callable[[Sequence[int]], Any] | None = None,
        cuttable: bool = True,
        budget_bytes: int | None = None,
        length_of_batch: Callable[[Any, int], int | None] | None = None,
        start: int = 0,
        lasting: bool = False,
        skip_to: Callable[[int], None] | None = None,
    ) -> None:
        """Set up.

        Args:
            next_piece: (samples wished for) -> the next piece, of any size, with its size; StopIteration after the
                last. When it fails, it can be asked again.
            form: what a piece is.
            device: where micro-batches go.
            num_samples: samples in the pass, when known.
            reread: (positions) -> the batch of them, read anew; None where that is impossible.
            cuttable: False when a piece is good only for a micro-batch of exactly its samples; else it is reread.
            budget_bytes: most to keep; past it the oldest are dropped, to be reread when asked for. None: keep all.
            length_of_batch: (batch, its samples) -> how long these are, of a piece that is a batch; None where pieces
                are alike.
            start: position in the pass of the first sample that comes.
            lasting: whether nobody else writes to the pieces, as nobody does to what workers have sent.
            skip_to: (position) -> lets the next piece begin there; None where all have to be read.
        """
        self._next_piece = next_piece
        self._lasting = lasting
        self._skip_to = skip_to
        self._form = form
        self._device = device
        self._num_samples = num_samples
        self._reread = reread
        self._cuttable = cuttable
        self._budget_bytes = budget_bytes if reread is not None else None
        self._length_of_batch = length_of_batch
        self._kept: list[_Piece] = []  # without gaps, the oldest first
        self._kept_bytes = 0
        self._arrived = start  # position behind the last sample that came
        self._position = start  # of the next window

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """Return the next window: see ``Reader``."""
        start = self._position
        # The window before is given up: what lies before this one is not needed any more.
        self._drop(bisect_right(self._kept, start, key=attrgetter("stop")))
        total = self._num_samples
        if total is None:
            # A stream is read to the window's end, for nothing else tells how much there is. All else is read only when
            # a micro-batch is asked for.
            self._read_until(start + num_samples, num_samples)
            total = self._arrived
        available = min(num_samples, total - start)
        if available < (num_samples if whole else 1):
            return None
        self._position += available
        length = None
        if self._length_of_batch is not None:  # batches that are joined are as long as each other
            first = self._kept[0]
            length = self._length_of_batch(first.content, first.stop - first.start)
        return _PieceWindow(self, start, available, None if length is None else (length,) * available)

    def batch(self, start: int, stop: int) -> Any:
        """Return the samples of positions ``start`` to ``stop``, on the device."""
        self._pass_over(start)
        # What is good for its own micro-batch alone is not read ahead of one that begins elsewhere.
        if not self._cuttable and self._skip_to is not None and start < self._arrived < stop:
            self._pass_over(stop)
        if not self._read_until(stop, stop - start):
            raise DataError(f"data: it promised {self._num_samples} samples and ended after {self._arrived}.")
        first = bisect_right(self._kept, start, key=attrgetter("stop"))
        last = bisect_left(self._kept, stop, key=attrgetter("start"))
        held = self._kept[first:last]
        # Some of them may have been dropped to keep the budget: the oldest, so that the first one tells.
        is_complete = bool(held) and held[0].start <= start
        # A user's collate_fn may pad by the size of its batch, so that what it made is good for that size alone.
        is_one_piece = len(held) == 1 and (held[0].start, held[0].stop) == (start, stop)
        is_kept = is_complete and (self._cuttable or is_one_piece)
        if is_kept:
            parts = [self._part(piece, start, stop) for piece in held]
            batch = self._form.finish(parts[0] if len(parts) == 1 else self._form.join(parts))
        else:
            assert self._reread is not None  # only what can be reread is dropped or not cuttable
            batch = self._reread(range(start, stop))
        # Only what this micro-batch has passed is dropped: what workers collated for those to come is yet to be used.
        while self._budget_bytes is not None and self._kept_bytes > self._budget_bytes and self._kept[0].stop <= stop:
            self._drop(1)
        # A copy, for the pieces are kept for a replay, and the caller may edit what it gets.
        return batches.to_device(batch, self._device, copy=True, lasting=self._lasting and is_kept)

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions of the pass as one batch, on the host."""
        first, last = min(positions), max(positions)
        # Some few of a window that other ranks have read are not worth all that lies between them.
        are_few = last >= self._arrived and len(positions) <= last - first
        # Nor is what would be read once more in any case.
        are_few = self._skip_to is not None and (are_few or not self._cuttable)
        if not are_few:
            self._pass_over(first)
            self._read_until(last + 1, 1)
        # Dropped ones, and those that workers have padded for another batch, are read anew.
        if are_few or not (self._cuttable and self._kept and min(positions) >= self._kept[0].start):
            assert self._reread is not None
            return self._reread(positions)
        parts = []
        for position in positions:
            piece = self._kept[bisect_right(self._kept, position, key=attrgetter("stop"))]
            parts.append(self._part(piece, position, position + 1))
        return self._form.finish(self._form.join(parts))

    def _pass_over(self, position: int) -> None:
        """Leave out what lies before a position and has not been read: it is of other ranks."""
        if self._skip_to is not None and position > self._arrived:
            self._drop(len(self._kept))  # which has no gaps; what is asked for again is reread
            self._skip_to(position)
            self._arrived = position

    def _part(self, piece: _Piece, start: int, stop: int) -> Any:
        """Return what lies between two positions of a piece."""
        if start <= piece.start and piece.stop <= stop and not self._form.is_always_cut:
            return piece.content  # as workers made it, when the plan has not changed since
        return self._form.take(piece.content, max(start - piece.start, 0), min(stop, piece.stop) - piece.start)

    def _read_until(self, stop: int, wished: int) -> bool:
        """Read on until everything before ``stop`` has arrived; return False when the data ends first.

        Args:
            stop: a position in the pass.
            wished: samples to ask for at a time, where pieces are made to order.
        """
        while self._arrived < stop:
            try:
                size, content = self._next_piece(wished)
            except StopIteration:
                return False
            num_bytes = batches.num_bytes(content) if self._budget_bytes is not None else 0
            self._kept.append(_Piece(self._arrived, self._arrived + size, content, num_bytes))
            self._kept_bytes += num_bytes
            self._arrived += size
        return True

    def _drop(self, count: int) -> None:
        """Forget the oldest pieces."""
        self._kept_bytes -= sum(piece.num_bytes for piece in self._kept[:count])
        del self._kept[:count]


@dataclass(slots=True)
class _PieceWindow:
    """A stretch of the pass."""

    pieces: Pieces
    start: int  # its position in the pass
    num_samples: int
    lengths: tuple[int, ...] | None = None

    def micro_batch(self, start: int, size: int) -> Any:
        return self.pieces.batch(self.start + start, self.start + start + size)

    def samples(self, positions: Sequence[int]) -> Any:
        return self.pieces.samples([self.start + position for position in positions])


def reads_together(dataset: Any) -> bool:
    """Return whether a dataset has a ``__getitems__`` of its own, behind the subsets of PyTorch, which pass it on."""
    own = getattr(type(dataset), "__getitems__", None)
    if own in (Subset.__getitems__, StackDataset.__getitems__):
        within = dataset.dataset if isinstance(dataset, Subset) else dataset.datasets
        parts = within.values() if isinstance(within, dict) else within if isinstance(within, tuple) else [within]
        return any(map(reads_together, parts))
    return callable(getattr(dataset, "__getitems__", None))


class SampleReader:
    """Reads and collates samples, each under a seed of its own, in this process or in a worker."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self.reads_together = reads_together(dataset)
        """Whether what a sample is may depend on those that are read with it."""
        self._is_default = collate is default_collate
        self._collate = collate_of(collate, dataset)
        self._seed = seed
        self._draws: bool | None = None  # whether a sample has drawn random numbers; None before the first
        self._begun: tuple[int, RandomState] | None = None  # the seed of an epoch, and the states that it leads to
        self._last: list[Any] = []  # of the samples that made a batch, where there is no dataset to ask for others

    def __getitems__(self, keys: Sequence[tuple[int, int, Any]]) -> list[Item]:
        """Read the samples of (epoch, position, index) keys.

        The name is the one by which a worker of a DataLoader calls it.
        """
        # A seed for each sample, so that its augmentation depends neither on those read before it nor on who reads it.
        # A dataset that reads several together draws for all of them, under the seed of the first.
        items: list[Item] = []
        try:
            if self.reads_together:
                return self._together(keys)
            if self._draws is None and keys:  # by one sample first, which is soon read again
                self._draws = not self._have_drawn_nothing(keys[:1], items)
            if not self._draws and self._have_drawn_nothing(keys[len(items) :], items):
                return items
            for key in keys[len(items) :]:
                items.append(self._read(key))
            return items
        except Exception as error:
            if not _is_of_host(error):
                if not self.reads_together:
                    with suppress(Exception):  # a class of the user's may let nothing be noted
                        error.add_note(f"It was raised for sample {keys[len(items)][2]!r}.")
                raise
            key, ran_out = keys[len(items)], without_frames(error)
        # Those before it may have left too little memory for it, and then fewer of them will do. What cannot be read
        # by itself either is no matter of how many are read.
        items.clear()
        item = self._alone(partial(self._read, key), f"sample {key[2]!r}")
        if len(keys) == 1:
            return [item]
        raise ran_out

    def _together(self, keys: Sequence[tuple[int, int, Any]]) -> list[Item]:
        """Read the samples of some keys at once, as the dataset wants them to be read."""
        if not keys:
            return []
        seed_host(mix(self._seed, *keys[0][:2]))
        samples = list(self.dataset.__getitems__([index for _, _, index in keys]))
        if len(samples) != len(keys):
            kind = type(self.dataset).__name__
            raise DataError(
                f"data: {kind}.__getitems__ returned {len(samples)} samples for {len(keys)} indices. Let it return one "
                f"for each."
            )
        return [(epoch, position, sample) for (epoch, position, _), sample in zip(keys, samples, strict=True)]

    def _read(self, key: tuple[int, int, Any]) -> Item:
        if self.reads_together:
            return self._together([key])[0]
        epoch, position, index = key
        seed_host(mix(self._seed, epoch, position))
        before = None if self._draws else get_state()
        sample = self.dataset[index]
        if before is not None:
            self._draws = not are_same(before, get_state())
        return epoch, position, sample

    def _have_drawn_nothing(self, keys: Sequence[tuple[int, int, Any]], items: list[Item]) -> bool:
        """Read more samples without seeds, which take longer than many a sample; return False if one of them draws."""
        # Some look at a state and leave it as it is, by torch.initial_seed() or torch.random.fork_rng(): these see the
        # same in all of an epoch, wherever its samples are read and whatever the micro-batches.
        for epoch, *_ in keys[:1]:
            self._begin_epoch(mix(self._seed, epoch) >> 1)
        before, read = get_state(), len(items)
        try:
            for epoch, position, index in keys:
                items.append((epoch, position, self.dataset[index]))
        except Exception:
            if are_same(before, get_state()):
                raise
        else:
            if are_same(before, get_state()):
                return True
        del items[read:]
        return False

    def _begin_epoch(self, seed: int) -> None:
        """Seed the random generators for an epoch: all three in a worker, torch's alone in this process."""
        if get_worker_info() is None:
            # Python's and NumPy's take a hundred times as long, because training's own have to be restored.
            torch.default_generator.manual_seed(seed)
            return
        if self._begun is None or self._begun[0] != seed:
            seed_host(seed)
            self._begun = seed, get_state()
        set_state(self._begun[1])

    def __call__(self, items: list[Item]) -> Any:
        """Collate items to one batch, under the seed of the first one."""
        try:
            return self._collated(items)
        except Exception as error:
            if len(items) > 1 or not _is_of_host(error):  # of fewer samples it may well make a batch
                raise
        epoch, position, _ = items[0]
        return self._alone(partial(self._collated, items), f"the sample at position {position} of epoch {epoch}")

    @staticmethod
    def _alone(function: Callable[[], T], which: str) -> T:
        """Call what handles one sample, for which the host's memory did not do before; return what it returns.

        Raises:
            DataError: it did not do again: no plan makes that smaller.
        """
        gc.collect()
        try:
            return function()
        except Exception as error:
            # Of a worker the error is all that comes, and this process looks at the sample itself then.
            if not _is_of_host(error) or get_worker_info() is not None:
                raise
            raise DataError(
                f"data: {which} takes more memory than this process can get on the host ({error!r}), by itself. Make "
                f"the sample smaller, or leave it out."
            ) from error

    def _collated(self, items: list[Item]) -> Any:
        # Which draws nothing, and takes no parts out of samples.
        if self._is_default:
            return self._collate([sample for _, _, sample in items])
        epoch, position, _ = items[0]
        # Which sets it apart from the seed under which that item was read.
        seed_host(mix(self._seed, epoch, position, collation.get()))
        samples = [sample for _, _, sample in items]
        try:
            batch = self._by_user(samples)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, AutoaccumError):
                raise
            if (batch := batch_of_none(self._by_user, samples, self._others())) is None:
                raise
        else:
            if batch is None:
                return batch_of_none(self._by_user, samples, self._others())
            self._last = samples if self.dataset is None else []
        return batch

    def _by_user(self, samples: list[Any]) -> Any:
        # Samples are collated again when a window is replayed, and a collate_fn may take parts out of them.
        return self._collate([copy(one) if isinstance(one, MutableMapping | list) else one for one in samples])

    def _others(self) -> Iterator[Any]:
        """Read a few samples, evenly spread over the dataset; without one return those that were collated last."""
        if self.dataset is None:
            yield from self._last
            return
        count = len(self.dataset)
        for index in range(0, count, -(-count // PEEK)):
            yield self.dataset[index]


def batch_of_none(collate: Callable[[list[Any]], Any], samples: list[Any], others: Iterable[Any]) -> Any:
    """Return a batch of no samples where a collate_fn leaves out all of some samples; None where it does not.

    Args:
        collate: makes no batch of these samples, as where it calls default_collate with those that are not None.
        samples: those of a micro-batch.
        others: further samples of the data, of which one that it makes a batch of tells what a batch is.
    """
    with suppress(Exception):  # what it fails for besides it will fail for again, and what was raised first is told
        for other in others:
            with suppress(Exception):
                if (batch := collate([other])) is None:
                    continue
                # What is left out adds nothing to a batch.
                if batches.sizes_of(collate([*samples, other])) != batches.sizes_of(batch):
                    return None
                are_samples = holds_samples(batch, known=1)
                is_leaf = is_leaf_of(columns(batch, is_said=True)) if are_samples else batches.is_leaf
                return batches.take(batch, 0, 0, is_leaf)
    return None


def _is_of_host(error: Exception) -> bool:
    """Return whether the host's memory ran out; that of a device, where samples are made there, others give back."""
    return is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError)


def with_preserved_randomness(collate: Callable[[list[Item]], Any]) -> Callable[[list[Item]], Any]:
    """Make a function that collates like ``collate``, and leaves the random states as they were.

    In a worker these belong to nobody else; in this process training draws from them.
    """

    def collate_items(items: list[Item]) -> Any:
        with preserved_randomness():
            return collate(items)

    return collate_items
