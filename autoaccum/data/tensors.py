"""Tensors as data: rows are gathered by index, so that a window costs its indices alone until it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoaccum import batches
from autoaccum.data.base import Order, PlanAt, Reader, Window


class TensorSource:
    """A pytree of tensors with one row per sample."""

    def __init__(self, tensors: Any, *, order: Order, device: torch.device) -> None:
        self._leaves, self._spec = batches.flatten(tensors)
        # unflatten() costs as much as gathering a small batch; the usual tuple of tensors does without.
        self._is_tuple = type(tensors) is tuple and len(self._leaves) == len(tensors)
        self._order = order
        self._device = device
        self.num_samples: int | None = order.num_samples

    def gather(self, indices: torch.Tensor) -> Any:
        """The rows at those indices, copied to the device."""
        rows = [leaf.index_select(0, indices.to(leaf.device)) for leaf in self._leaves]
        if self._device.type != "cpu":
            rows = [batches.to_device(row, self._device, copy=False) for row in rows]
        return tuple(rows) if self._is_tuple else self._spec.unflatten(rows)

    def read(self, epoch: int, plan_at: PlanAt) -> Reader:
        """One pass over the rows; gathering is quick enough to prefetch nothing."""
        return _TensorReader(self, torch.as_tensor(self._order(epoch)))

    def example(self, num_samples: int) -> Any:
        """The first rows, repeated."""
        return self.gather(torch.arange(num_samples) % self._leaves[0].shape[0])


@dataclass(slots=True)
class _TensorReader:
    source: TensorSource
    order: torch.Tensor
    position: int = 0

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        start = self.position
        there = min(num_samples, len(self.order) - start)
        if there < (num_samples if whole else 1):
            return None
        self.position += there
        return _TensorWindow(self.source, self.order, start, there)


@dataclass(slots=True)
class _TensorWindow:
    source: TensorSource
    order: torch.Tensor
    first: int
    num_samples: int

    def micro_batch(self, start: int, size: int) -> tuple[int, Any]:
        first = self.first + start
        return size, self.source.gather(self.order[first : first + size])
