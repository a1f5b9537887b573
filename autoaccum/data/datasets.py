"""Map-style datasets as data, read in this process or by workers that collate micro-batches ahead of time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from autoaccum import batches
from autoaccum.data.base import Collate, Order, PlanAt, Reader
from autoaccum.data.pieces import BATCHES, Item, Pieces, SampleReader, items_form, quietly
from autoaccum.randomness import mix, preserved


class _IgnoreInterrupt:
    """Starts a worker that leaves Ctrl-C to the main process, which ends the run after the window."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            loaded = self._load(epoch, keys, len(indices), plan_at)
            return Pieces(
                lambda wished: next(loaded),
                form=BATCHES,
                cuttable=self._collate is default_collate,
                **shared,
            )

        position = 0

        def next_items(wished: int) -> list[Item]:
            nonlocal position
            if position >= len(indices):
                raise StopIteration
            with preserved():
                items = self._reader.__getitems__(keys(position, position + wished))
            position += len(items)
            return items

        return Pieces(next_items, form=items_form(quietly(self._reader)), **shared)

    def _load(
        self, epoch: int, keys: Callable[[int, int], list[Any]], num_samples: int, plan_at: PlanAt
    ) -> Iterator[Any]:
        """Micro-batches collated by worker processes, ahead of time, cut as the plan stood when they were ordered."""

        def cuts() -> Iterator[list[Any]]:
            position = 0
            while position < num_samples:
                for size in plan_at(position):
                    if wanted := keys(position, position + size):
                        yield wanted
                    position += size

        options = self._loader_options
        loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=cuts(),
            collate_fn=self._reader,
            num_workers=self._num_workers,
            pin_memory=self._device.type != "cpu",
            generator=torch.Generator().manual_seed(mix(self._seed, epoch) >> 1),
            **{**options, "worker_init_fn": _IgnoreInterrupt(options.get("worker_init_fn"))},
        )
        return iter(loader)

    def example(self, num_samples: int) -> Any:
        """The first few samples, repeated and collated."""
        with preserved():
            items = self._reader.__getitems__([(0, i, i) for i in range(min(num_samples, self._size, 32))])
            batch = self._reader([items[i % len(items)] for i in range(num_samples)])
        return batches.to_device(batch, self._device, copy=True)
