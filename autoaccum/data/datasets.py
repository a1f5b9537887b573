"""Map-style datasets as data, read in this process or by workers that collate micro-batches ahead of time."""

from __future__ import annotations

import hashlib
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from autoaccum.data import batches
from autoaccum.data.base import Collate, Item, NextPiece, Order, PlanAt, Reader
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import PEEK, Padding, again, in_turn, lengths_of, longest
from autoaccum.data.packing import pack, unpack
from autoaccum.data.pieces import BATCHES, Pieces, SampleReader, items_form, quietly
from autoaccum.data.randomness import mix, preserved
from autoaccum.data.tensors import TensorSource
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.cuts import near_equal

Key = tuple[int, int, Any]
"""(epoch, position in the epoch, index into the dataset)"""


def _survive(number: int, frame: Any) -> None:
    """Once: a second time it is meant for this process alone, by a DataLoader that gives its workers up."""
    signal.signal(number, signal.SIG_DFL)


class _StartWorker:
    """Starts a worker that leaves Ctrl-C, and what clusters send to all processes, to the main process.

    That one ends the run after the window, for which it still needs its workers.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _survive)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        info = get_worker_info()
        if info is not None:  # a user's worker_init_fn expects to find the user's dataset there
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(worker)


class DatasetSource:
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
        self._peeked = collate is default_collate  # which needs samples of one shape
        self.num_samples: int | None = order.num_samples

    def description(self) -> dict[str, Any]:
        """Its class and its length; of tensors what tells them apart without workers too, of a split its indices."""
        if type(self._reader.dataset) is TensorDataset:
            tensors = tuple(self._reader.dataset.tensors)
            return TensorSource(tensors, order=self._order, device=self._device).description()
        found = {"samples": self.num_samples, "dataset": type(self._reader.dataset).__name__}
        if type(self._reader.dataset) is Subset:
            with suppress(ValueError, TypeError, OverflowError):  # keys of a mapping, say
                indices = np.asarray(self._reader.dataset.indices, np.int64)
                found["digest"] = hashlib.sha256(indices.tobytes()).hexdigest()[:16]
        return found

    def read(self, epoch: int, plan_at: PlanAt, passed: Sequence[int] = ()) -> Reader:
        """One pass over the samples; those that were passed are not read."""
        indices = self._order(epoch)
        start = sum(passed)

        def keys(positions: Sequence[int]) -> list[Key]:
            there = [position for position in positions if position < len(indices)]
            if isinstance(indices, torch.Tensor):  # datasets take ints
                chosen = indices[there].tolist()
            else:
                chosen = [indices[position] for position in there]
            return [(epoch, position, index) for position, index in zip(there, chosen, strict=True)]

        def items_at(positions: Sequence[int]) -> list[Item]:
            with preserved():
                return self._reader.__getitems__(keys(positions))

        position = start

        def next_items(wished: int) -> tuple[int, list[Item]]:
            nonlocal position
            if not (items := items_at(range(position, position + wished))):
                raise StopIteration
            position += len(items)
            return len(items), items

        collate = quietly(self._reader)
        shared: dict[str, Any] = {
            "device": self._device,
            "num_samples": len(indices),
            "budget_bytes": self._budget_bytes,
            "start": start,
        }
        if padding := self._grouping():
            chunks_at = partial(_chunks, plan_at, self._num_workers)
            read_on = self._load(epoch, start, keys, chunks_at, items_at, None) if self._num_workers else next_items
            return GroupedSamples(read_on, collate=collate, padding=padding, reread=items_at, **shared)
        shared["reread"] = lambda start, stop: collate(items_at(range(start, stop)))
        if self._num_workers:
            next_batch = self._load(epoch, start, keys, plan_at, lambda at: collate(items_at(at)), self._reader)
            return Pieces(next_batch, form=BATCHES, cuttable=self._collate is default_collate, **shared)
        return Pieces(next_items, form=items_form(collate), **shared)

    def _load(
        self,
        epoch: int,
        start: int,
        keys: Callable[[Sequence[int]], list[Key]],
        plan_at: PlanAt,
        reread: Callable[[Sequence[int]], Any],
        collate: Callable[[list[Item]], Any] | None,
    ) -> NextPiece:
        """What worker processes read ahead of time, cut as the plan stood when it was ordered.

        They collate it to micro-batches; without ``collate`` it comes as items.
        """
        ordered: deque[range] = deque()  # the positions of those under way

        def cuts() -> Iterator[list[Key]]:
            position = start
            while True:
                for size in plan_at(position):
                    if not (wanted := keys(range(position, position + size))):
                        return
                    ordered.append(range(position, position + len(wanted)))
                    position += len(wanted)
                    yield wanted

        iterator = iter(self._loader(cuts(), collate or pack, self._num_workers, epoch))
        lost = False

        def next_piece(wished: int) -> tuple[int, Any]:
            nonlocal lost
            if not lost:
                try:
                    piece = next(iterator)
                    if collate is None:
                        piece = unpack(piece)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    lost = True
                else:
                    return len(ordered.popleft()), piece
            # Memory ran out in a worker, or for what it sent, which will not come again: it is read here.
            piece = reread(ordered[0])
            lost = False
            return len(ordered.popleft()), piece

        return next_piece

    def _loader(
        self, cuts: Iterable[list[Key]], collate: Callable[[list[Item]], Any], num_workers: int, epoch: int
    ) -> DataLoader[Any]:
        options = self._loader_options
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=cuts,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=self._device.type != "cpu",
            generator=torch.Generator().manual_seed(mix(self._seed, epoch) >> 1),
            **{**options, "worker_init_fn": _StartWorker(options.get("worker_init_fn"))},
        )

    def _grouping(self) -> Padding | None:
        """What to group samples by length by; None where that gains nothing, as a few of the dataset tell.

        They are the same few in every epoch, so that what is found does not depend on where a run begins.
        """
        if not self._peeked:
            self._peeked = True
            try:
                gains = again(self._peek)
            except Exception:  # it will come up again in training, if it does not lie in how a few are read here
                gains = False
            self._padding = Padding(quietly(self._reader), follows=True) if gains else None
        return self._padding

    def _peek(self) -> bool:
        count = min(self._size, PEEK)
        spread = [(0, i, i * self._size // count) for i in range(count)]
        if self._num_workers:  # a dataset may open, at its first read, files that cannot be shared with workers
            (gains,) = self._loader([spread], partial(_gains, self._reader), 1, epoch=0)
            return bool(gains)
        with preserved():
            return _gains(self._reader, self._reader.__getitems__(spread))

    def example(self, num_samples: int) -> Any:
        """The first few samples, repeated and collated: with a collate_fn, the longest of them where they differ."""
        may_differ = self._collate is not default_collate
        with preserved():
            count = min(self._size, PEEK if may_differ else min(num_samples, PEEK))
            items = self._reader.__getitems__([(0, i, i) for i in range(count)])
            batch = self._reader(longest(items, num_samples) if may_differ else in_turn(items, num_samples))
        return batches.to_device(batch, self._device, copy=True)


def _gains(collate: Callable[[list[Item]], Any], items: list[Item]) -> bool:
    """Whether there are longer samples among them, and they make larger batches."""
    lengths = lengths_of(items)
    low, high = min(lengths), max(lengths)
    return low < high and Padding(collate).follows(items[lengths.index(low)], items[lengths.index(high)])


def _chunks(plan_at: PlanAt, num_workers: int, position: int) -> Iterable[int]:
    """Samples to read at a time for the window that begins there: a share for each worker, and not too many."""
    window = sum(plan_at(position))
    return near_equal(window, max(1, min(window, max(num_workers, -(-window // PEEK)))))
