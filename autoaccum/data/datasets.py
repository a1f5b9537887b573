"""Serves map-style datasets as data, read in this process or by workers that collate micro-batches ahead of time."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from autoaccum.data import batches
from autoaccum.data.base import Collate, Item, NextPiece, PlanAt, Reader
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import PEEK, Padding, lengths_of, repeat_in_turn, repeat_longest, try_twice
from autoaccum.data.orders import InOrder, Order, chosen
from autoaccum.data.parts import set_epoch
from autoaccum.data.pieces import BATCHES, Pieces, SampleReader, items_form, with_preserved_randomness
from autoaccum.data.randomness import mix, preserved_randomness
from autoaccum.data.tensors import TensorSource
from autoaccum.data.workers import StartWorker, iterate, pack, unpack
from autoaccum.errors import AutoaccumError
from autoaccum.memory.oom import insist, is_out_of_memory
from autoaccum.planning.cuts import near_equal

Key = tuple[int, int, Any]
"""(epoch, position in the epoch, index into the dataset)"""


class DatasetSource(InOrder):
    """Anything with ``len`` and indices that yields samples."""

    def __init__(
        self,
        dataset: Any,
        *,
        order: Order,
        collate: Collate,
        seed: int,
        device: torch.device,
        num_workers: int = 0,
        loader_options: dict[str, Any] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        """Set up.

        Args:
            dataset: anything with ``len`` and indices.
            order: of its samples.
            collate: makes a batch of a list of samples.
            seed: of what samples draw while they are read and collated.
            device: where micro-batches go.
            num_workers: processes that read ahead; 0: this process reads.
            loader_options: further arguments of the DataLoader that starts the workers.
            budget_bytes: most to keep of what was read; past it samples are read again. None: keep all.
        """
        self._reader = SampleReader(dataset, collate, seed)
        self._size = len(dataset)
        self._order = order
        self._collate = collate
        self._seed = seed
        self._device = device
        self._num_workers = num_workers
        self._loader_options = dict(loader_options or {})
        self._budget_bytes = budget_bytes
        self._padding: Padding | None = None  # None too where samples are not grouped
        self._padding_is_known = collate is default_collate  # which needs samples of one shape: nothing to group
        self.num_samples: int | None = order.num_samples

    def description(self) -> dict[str, Any]:
        """Return its class and its length, of a split its indices, and of tensors what a ``TensorSource`` says."""
        # With or without workers tensors are the same data: a run may be resumed with another number of them.
        dataset = self._reader.dataset
        if type(dataset) is TensorDataset:
            return TensorSource(tuple(dataset.tensors), order=self._order, device=self._device).description()
        found = {"samples": self.num_samples, "dataset": type(dataset).__name__}
        # Two splits of a dataset may be of one length: their indices tell them apart.
        if type(dataset) is Subset:
            with suppress(ValueError, TypeError, OverflowError):  # keys of a mapping, say
                found["digest"] = _digest(dataset.indices)
        return found

    def read(self, epoch: int, plan_at: PlanAt, passed: Iterable[int] = ()) -> Reader:
        """Begin a pass over the samples; those that were passed are not read."""
        start, order = sum(passed), self._order(epoch)
        set_epoch(epoch, self._reader.dataset)
        return self._order.reading(order, epoch, start, lambda: self._read(order, epoch, plan_at, start))

    def _read(self, order: Any, epoch: int, plan_at: PlanAt, start: int) -> Reader:
        """Return a reader over ``order`` from position ``start``; workers read ahead what ``plan_at`` gives."""
        num_samples = len(order)

        def keys(positions: Sequence[int]) -> list[Key]:
            """List what a reader is asked for by those positions; fewer where the pass ends before."""
            available = [position for position in positions if position < num_samples]
            return [(epoch, *key) for key in zip(available, chosen(order, available), strict=True)]

        def items_at(positions: Sequence[int]) -> list[Item]:
            """Read those positions in this process."""
            # Each sample is read under a seed of its own, which is set on the generators that training draws from.
            with preserved_randomness():
                return self._reader.__getitems__(keys(positions))

        position = start

        def next_items(wished: int) -> tuple[int, list[Item]]:
            """Read the next items in this process, as a ``NextPiece``."""
            nonlocal position
            if not (items := items_at(range(position, position + wished))):
                raise StopIteration
            position += len(items)  # only now: when reading fails, the same items can be asked for again
            return len(items), items

        collate: Callable[[list[Item]], Any] = self._reader
        if self._collate is not default_collate:  # which draws nothing
            collate = with_preserved_randomness(collate)
        shared: dict[str, Any] = {
            "device": self._device,
            "num_samples": num_samples,
            "budget_bytes": self._budget_bytes,
            "start": start,
        }
        if padding := self._padding_to_group_by():
            # Which samples make a micro-batch is known only when the window has been read: workers do not collate.
            read_on: NextPiece = next_items
            if self._num_workers:
                chunks_at = partial(_chunks, plan_at, self._num_workers)
                read_on = self._read_by_workers(epoch, start, keys, chunks_at, items_at, None)
            return GroupedSamples(read_on, collate=collate, padding=padding, reread=items_at, **shared)

        def reread(positions: Sequence[int]) -> Any:
            """Read and collate those positions in this process."""
            return collate(items_at(positions))

        shared["reread"] = reread
        if self._num_workers:
            # Workers collate. What default_collate makes can be cut to other sizes; padding depends on the size, so
            # that of a user's collate_fn is made anew where the plan has changed.
            next_batch = self._read_by_workers(epoch, start, keys, plan_at, reread, self._reader)
            is_cuttable = self._collate is default_collate and not self._reader.reads_together
            return Pieces(next_batch, form=BATCHES, cuttable=is_cuttable, lasting=True, **shared)

        def skip_to(there: int) -> None:
            nonlocal position
            position = there

        # Samples that were read together may be padded for each other: other micro-batches of them are read anew.
        is_cuttable = not self._reader.reads_together
        return Pieces(next_items, form=items_form(collate), cuttable=is_cuttable, skip_to=skip_to, **shared)

    def _read_by_workers(
        self,
        epoch: int,
        start: int,
        keys: Callable[[Sequence[int]], list[Key]],
        plan_at: PlanAt,
        reread: Callable[[Sequence[int]], Any],
        collate: Callable[[list[Item]], Any] | None,
    ) -> NextPiece:
        """Let worker processes read ahead, cut as the plan stands when they are told.

        Args:
            epoch: seeds the DataLoader.
            start: position in the pass to begin at.
            keys: (positions) -> what the reader is asked for.
            plan_at: says the sizes to read.
            reread: (positions) -> the same, read in this process.
            collate: by which workers make micro-batches; without it items come.

        Returns:
            What yields one piece after the other, each of the size that it was ordered in.
        """
        ordered: deque[range] = deque()  # the positions of those under way, first come first

        def cuts() -> Iterator[list[Key]]:
            # The DataLoader takes cuts as far ahead as it prefetches, and no further: so the plan is asked for as late
            # as can be.
            position = start
            while True:
                for size in plan_at(position):
                    # An error would end this generator, and with it the pass.
                    ahead = range(position, position + size)
                    if not (wanted := insist(partial(keys, ahead), "the order of the samples was read")):
                        return
                    ordered.append(range(position, position + len(wanted)))
                    position += len(wanted)
                    yield wanted

        iterator = iterate(self._loader(cuts(), collate or pack, self._num_workers, epoch))
        lost = False  # whether the next piece, ordered[0], has been asked for and will not come

        def next_piece(wished: int) -> tuple[int, Any]:
            nonlocal lost
            if not lost:
                try:
                    piece = next(iterator)
                    if collate is None:
                        piece = unpack(piece)
                except Exception as error:
                    # Of an error of ours a worker's text would be all that is left.
                    if not (is_out_of_memory(error) or isinstance(error, AutoaccumError)):
                        raise
                    lost = True
                else:
                    return len(ordered.popleft()), piece
            # Memory ran out in a worker, or for what it sent, which will not come again: it is read here, and no more
            # of it at once than is asked for, which is less once plans are smaller. Should memory run out here too, it
            # stays lost, and is read when it is asked for again.
            wanted, left = ordered[0][:wished], ordered[0][wished:]
            piece = reread(wanted)
            lost = bool(left)
            if left:
                ordered[0] = left
            else:
                ordered.popleft()
            return len(wanted), piece

        return next_piece

    def _loader(
        self, cuts: Iterable[list[Key]], collate: Callable[[list[Item]], Any], num_workers: int, epoch: int
    ) -> DataLoader[Any]:
        """Make a DataLoader whose workers read the keys of each cut, and collate them."""
        options = self._loader_options
        # With a generator of its own, for it draws the seed of its workers from the global one else, once an epoch.
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=cuts,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=self._device.type != "cpu",
            generator=torch.Generator().manual_seed(mix(self._seed, epoch) >> 1),
            **{**options, "worker_init_fn": StartWorker(options.get("worker_init_fn"))},
        )

    def _padding_to_group_by(self) -> Padding | None:
        """Return by what samples are grouped by length; None where that gains nothing, as a few of the dataset tell.

        They are the same few in every epoch, so that what is found does not depend on where a run begins.
        """
        if not self._padding_is_known:
            self._padding_is_known = True
            try:
                gains = try_twice(self._gains_by_grouping)
            except Exception:  # it will come up again in training, if it does not lie in how a few are read here
                gains = False
            self._padding = Padding(with_preserved_randomness(self._reader), grows=True) if gains else None
        return self._padding

    def _gains_by_grouping(self) -> bool:
        """Read a few samples, evenly spread over the dataset; return whether longer ones make larger batches."""
        count = min(self._size, PEEK)
        spread = [(0, i, i * self._size // count) for i in range(count)]
        if self._num_workers:  # a dataset may open, at its first read, files that cannot be shared with workers
            (gains,) = iterate(self._loader([spread], partial(_longer_make_larger, self._reader), 1, epoch=0))
            return bool(gains)
        with preserved_randomness():
            return _longer_make_larger(self._reader, self._reader.__getitems__(spread))

    def example(self, num_samples: int) -> Any:
        """Return the first few samples, repeated and collated: with a collate_fn, the longest where they differ."""
        may_differ = self._collate is not default_collate
        with preserved_randomness():
            count = min(self._size, PEEK if may_differ else min(num_samples, PEEK))
            items = self._reader.__getitems__([(0, i, i) for i in range(count)])
            repeat = repeat_longest if may_differ else repeat_in_turn
            return batches.to_device(self._reader(repeat(items, num_samples)), self._device, copy=True)

    def form(self, num_samples: int) -> Any:
        """Return an example; None where workers read, for a first read may open what they cannot share."""
        return None if self._num_workers else self.example(num_samples)


def _longer_make_larger(collate: Callable[[list[Item]], Any], items: list[Item]) -> bool:
    """Return whether some items are longer than others, and make larger batches."""
    lengths = lengths_of(items)
    low, high = min(lengths), max(lengths)
    return low < high and Padding(collate).grows(items[lengths.index(low)], items[lengths.index(high)])


def _chunks(plan_at: PlanAt, num_workers: int, position: int) -> Iterable[int]:
    """Cut the window that begins at a position into what workers read at a time: a share for each, and not too much."""
    window = sum(plan_at(position))
    num_chunks = max(num_workers, -(-window // PEEK))
    return near_equal(window, max(1, min(window, num_chunks)))


def _digest(indices: Any) -> str:
    """Return a digest of the indices of a split."""
    # By parts, for as an array all of them may take as much memory as the data do.
    digest, part = hashlib.sha256(), 2**20
    for start in range(0, len(indices), part):
        some = indices if len(indices) <= part else indices[start : start + part]
        digest.update(np.asarray(some, np.int64).tobytes())
    return digest.hexdigest()[:16]
