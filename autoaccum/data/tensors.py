"""Serves tensors as data: rows are gathered by index, so that a window costs its indices alone until it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches, objects
from autoaccum.data.arrays import as_tensor
from autoaccum.data.base import PlanAt, Reader, Window
from autoaccum.data.digests import Rolling, digest_of
from autoaccum.data.dims import AtDim
from autoaccum.data.orders import Draws, InOrder, Order
from autoaccum.memory.oom import RanOut, attempt, insist

_HOST = torch.device("cpu")
Indices = Mapping[torch.device, torch.Tensor]
"""Indices of rows on the host, and the same on the devices that rows lie on."""
Orders = Mapping[torch.device, torch.Tensor | Draws]
"""An order of all rows, likewise."""


class TensorSource(InOrder):
    """A pytree of tensors with one row per sample."""

    def __init__(self, tensors: Any, *, order: Order, device: torch.device, split: Any = None) -> None:
        """Set up; ``split`` tells where samples lie, in dim 0 of all tensors where it is None."""
        is_leaf = split.is_leaf_of(tensors) if hasattr(split, "is_leaf_of") else batches.is_leaf
        leaves, self._spec = batches.flatten(tensors, is_leaf)
        # Where samples lie is found once: rows are gathered of the whole data, and never of a part.
        dims = split.of_leaves(tensors).values() if isinstance(split, AtDim) else [0] * len(leaves)
        self._of_split = split.description() if isinstance(split, AtDim) else {}
        # None for what belongs to all samples.
        self._dims = [dim if batches.has_rows(leaf) else None for leaf, dim in zip(leaves, dims, strict=True)]
        # Arrays become tensors that share their memory; lists stay as they are.
        self._leaves = [as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        # unflatten() costs as much as gathering a small batch; the usual tuple of tensors does without.
        self._is_plain = (
            type(tensors) is tuple
            and len(leaves) == len(tensors)
            and all(
                isinstance(leaf, torch.Tensor) and leaf.ndim and not batches.has_attributes(leaf)
                for leaf in self._leaves
            )
            and not any(self._dims)
        )
        self._num_rows = batches.num_samples(tensors, is_leaf=is_leaf) if split is None else split.count(tensors)
        self._order = order
        self._device = device
        # Rows that lie on a device are picked there: to copy indices to it would make each micro-batch wait.
        self._places = {leaf.device for leaf in self._leaves if isinstance(leaf, torch.Tensor)} | {_HOST}
        self._is_there = device.type == "cpu" and self._places == {_HOST}  # so that nothing has to be moved
        self.num_samples: int | None = order.num_samples

    def gather(self, indices: Indices) -> Any:
        """Copy the rows at those indices to the device."""
        # What index_select() makes is a copy already: the caller may edit it without reaching the data.
        if not self._is_there:
            return batches.to_device(self.rows(indices), self._device, copy=False)
        if not self._is_plain:
            return self.rows(indices)
        # unflatten() and a function for each leaf would show in windows of 100 µs.
        index = indices[_HOST]
        if len(self._leaves) == 2:
            first, second = self._leaves
            return first.index_select(0, index), second.index_select(0, index)
        return tuple([leaf.index_select(0, index) for leaf in self._leaves])

    def rows(self, indices: Indices) -> Any:
        """Copy the rows at those indices, where they lie."""
        pairs = zip(self._leaves, self._dims, strict=True)
        return self._spec.unflatten([_rows(leaf, indices, dim) for leaf, dim in pairs])

    def description(self) -> dict[str, Any]:
        """Return the number of samples, the shapes, and a digest: of tensors some megabytes, of lists a few entries."""
        digest = Rolling(digest_of([tensor for leaf in self._leaves for tensor in objects.tensors(leaf)]) or "")
        count = min(self._num_rows, 64)
        rows = torch.arange(count, device="cpu") * (self._num_rows - 1) // max(count - 1, 1)
        for leaf, dim in zip(self._leaves, self._dims, strict=True):
            if not (isinstance(leaf, torch.Tensor) or objects.has_samples(leaf)):
                digest.add(_rows(leaf, {_HOST: rows}, dim))
        shapes = [str(tuple(leaf.shape)) if hasattr(leaf, "shape") else type(leaf).__name__ for leaf in self._leaves]
        found = {"samples": self.num_samples, "tensors": ", ".join(shapes), "digest": digest.value}
        return found | self._of_split

    def read(self, epoch: int, plan_at: PlanAt, passed: Iterable[int] = ()) -> Reader:
        """Begin a pass over the rows; gathering is quick enough to prefetch nothing."""
        start, order = sum(passed), self._order(epoch)
        if isinstance(order, range):
            in_order = partial(torch.arange, len(order), device="cpu")
            order = insist(in_order, "the order of the samples was made")
        found = order if isinstance(order, Draws) else torch.as_tensor(order, device="cpu")
        orders: dict[torch.device, torch.Tensor | Draws] = {_HOST: found}
        # Draws that are not listed stay on the host, and so does an order that a device has no room for: indices are
        # then copied with each micro-batch.
        if isinstance(found, torch.Tensor):
            for place in self._places - {_HOST}:
                placed = attempt(partial(found.to, place))
                if not isinstance(placed, RanOut):
                    orders[place] = placed
        return self._order.reading(found, epoch, start, lambda: _TensorReader(self, orders, start))

    def example(self, num_samples: int) -> Any:
        """Return the first rows, repeated."""
        return self.gather({_HOST: torch.arange(num_samples, device="cpu") % self._num_rows})

    def form(self, num_samples: int) -> Any:
        """Return as many of what is no tensor, and tensors as they are, of which nothing is read."""
        rows = {_HOST: torch.arange(num_samples, device="cpu") % self._num_rows}
        pairs = zip(self._leaves, self._dims, strict=True)
        kept = [leaf if isinstance(leaf, torch.Tensor) else _rows(leaf, rows, dim) for leaf, dim in pairs]
        return self._spec.unflatten(kept)


def _on(place: torch.device, indices: Indices) -> torch.Tensor:
    """Return indices where rows lie; copied there where they are not."""
    return indices[place] if place in indices else indices[_HOST].to(place)


def _rows(leaf: Any, indices: Indices, dim: int | None = 0) -> Any:
    """Gather rows of a leaf, which lie in ``dim``, of a list too; return all of what has no rows."""
    if dim is None:
        return leaf
    return batches.pick(leaf, _on(leaf.device, indices) if isinstance(leaf, torch.Tensor) else indices[_HOST], dim)


@dataclass(slots=True)
class _TensorReader:
    """One pass over the rows in an order; a window takes the next of its indices."""

    source: TensorSource
    orders: Orders
    position: int = 0  # in the order, of the next window

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        start = self.position
        available = min(num_samples, len(self.orders[_HOST]) - start)
        if available < (num_samples if whole else 1):
            return None
        self.position += available
        return _TensorWindow(self.source, self.orders, start, available)


@dataclass(slots=True)
class _TensorWindow:
    """A stretch of the order; rows are gathered anew whenever a micro-batch is asked for."""

    source: TensorSource
    orders: Orders
    first: int  # its position in the order
    num_samples: int
    lengths: None = None  # all rows of a tensor are alike

    def micro_batch(self, start: int, size: int) -> Any:
        start += self.first
        if len(self.orders) == 1:
            return self.source.gather({_HOST: self.orders[_HOST][start : start + size]})
        return self.source.gather(self._indices(start, size))

    def samples(self, positions: Sequence[int]) -> Any:
        places = [self.first + position for position in positions]
        if places == list(range(places[0], places[0] + len(places))):  # as nearly always; and what follows is slow
            return self.source.rows(self._indices(places[0], len(places)))
        order = self.orders[_HOST]
        return self.source.rows({_HOST: torch.cat([order[place : place + 1] for place in places])})

    def _indices(self, first: int, size: int) -> Indices:
        return {place: order[first : first + size] for place, order in self.orders.items()}
