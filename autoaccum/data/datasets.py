"""Map-style datasets as data, read in this process or by workers that collate micro-batches ahead of time."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from autoaccum import batches
from autoaccum.data.base import Collate, Order, PlanAt, Reader
from autoaccum.data.pieces import BATCHES, Item, NextPiece, Pieces, SampleReader, items_form, quietly
from autoaccum.oom import is_out_of_memory
from autoaccum.randomness import mix, preserved


class _StartWorker:
    """Starts a worker that leaves Ctrl-C to the main process, which ends the run after the window."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        self.num_samples: int | None = order.num_samples

    def read(self, epoch: int, plan_at: PlanAt) -> Reader:
        """One pass over the samples."""
        indices = self._order(epoch)

        def keys(start: int, stop: int) -> list[tuple[int, int, Any]]:
            chosen = indices[start:stop]
            if isinstance(chosen, torch.Tensor):  # datasets take ints
                chosen = chosen.tolist()
            return [(epoch, position, index) for position, index in enumerate(chosen, start)]

        def reread(start: int, stop: int) -> Any:
            with preserved():
                return self._reader(self._reader.__getitems__(keys(start, stop)))

        shared: dict[str, Any] = {
            "device": self._device,
            "num_samples": len(indices),
            "reread": reread,
            "budget_bytes": self._budget_bytes,
        }
        if self._num_workers:
            next_batch = self._load(epoch, keys, reread, plan_at)
            return Pieces(next_batch, form=BATCHES, cuttable=self._collate is default_collate, **shared)

        position = 0

        def next_items(wished: int) -> tuple[int, list[Item]]:
            nonlocal position
            if not (wanted := keys(position, position + wished)):
                raise StopIteration
            with preserved():
                items = self._reader.__getitems__(wanted)
            position += len(items)
            return len(items), items

        return Pieces(next_items, form=items_form(quietly(self._reader)), **shared)

    def _load(
        self, epoch: int, keys: Callable[[int, int], list[Any]], reread: Callable[[int, int], Any], plan_at: PlanAt
    ) -> NextPiece:
        """Micro-batches collated by worker processes, ahead of time, cut as the plan stood when they were ordered."""
        ordered: deque[tuple[int, int]] = deque()  # (first position, last + 1) of those under way

        def cuts() -> Iterator[list[Any]]:
            position = 0
            while True:
                for size in plan_at(position):
                    if not (wanted := keys(position, position + size)):
                        return
                    ordered.append((position, position + len(wanted)))
                    position += len(wanted)
                    yield wanted

        options = self._loader_options
        loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=cuts(),
            collate_fn=self._reader,
            num_workers=self._num_workers,
            pin_memory=self._device.type != "cpu",
            generator=torch.Generator().manual_seed(mix(self._seed, epoch) >> 1),
            **{**options, "worker_init_fn": _StartWorker(options.get("worker_init_fn"))},
        )
        iterator = iter(loader)
        lost = False

        def next_batch(wished: int) -> tuple[int, Any]:
            nonlocal lost
            if not lost:
                try:
                    batch = next(iterator)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    lost = True
                else:
                    first, last = ordered.popleft()
                    return last - first, batch
            # A worker ran out of the host's memory, and its batch will not come again: it is read here.
            first, last = ordered[0]
            batch = reread(first, last)
            lost = False
            ordered.popleft()
            return last - first, batch

        return next_batch

    def example(self, num_samples: int) -> Any:
        """The first few samples, repeated and collated."""
        with preserved():
            items = self._reader.__getitems__([(0, i, i) for i in range(min(num_samples, self._size, 32))])
            batch = self._reader([items[i % len(items)] for i in range(num_samples)])
        return batches.to_device(batch, self._device, copy=True)
