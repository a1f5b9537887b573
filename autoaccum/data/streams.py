"""Iterables as data: of samples, or of batches whose sizes need not be those that training asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from autoaccum import batches
from autoaccum.data.base import Collate, PlanAt, Reader
from autoaccum.data.pieces import BATCHES, Pieces, SampleReader, items_form, quietly
from autoaccum.errors import DataError, EmptyDatasetError
from autoaccum.randomness import IsolatedRandomness, mix


class StreamSource:
    """Anything that can be iterated: over samples when ``collate`` is given, else over batches."""

    num_samples: int | None = None

    def __init__(self, stream: Iterable[Any], *, collate: Collate | None, seed: int, device: torch.device) -> None:
        self._stream = stream
        self._seed = seed
        self._device = device
        self._form = BATCHES if collate is None else items_form(quietly(SampleReader(None, collate, seed)))
        self._of_samples = collate is not None

    def read(self, epoch: int, plan_at: PlanAt) -> Reader:
        """One pass over what the stream yields; the stream draws from random states of its own."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        return Pieces(self._reading(epoch), form=self._form, device=self._device)

    def _reading(self, epoch: int) -> Callable[[int], Any]:
        isolated = IsolatedRandomness(mix(self._seed, epoch))
        with isolated():
            iterator = iter(self._stream)
        position = 0

        def next_piece(wished: int) -> Any:
            nonlocal position
            with isolated():
                if not self._of_samples:
                    return next(iterator)
                items = [(epoch, position + i, sample) for i, sample in enumerate(islice(iterator, wished))]
            if not items:
                raise StopIteration
            position += len(items)
            return items

        return next_piece

    def example(self, num_samples: int) -> Any:
        """The first batch or samples of a pass of its own, repeated."""
        if hasattr(self._stream, "__next__"):
            raise DataError(
                "data: an iterator can be read only once, and looking at it would take samples from training. Pass "
                "something that can be iterated again: a Dataset, a DataLoader, a list of batches."
            )
        next_piece = self._reading(0)
        try:
            piece = next_piece(1)
        except StopIteration:
            raise EmptyDatasetError("data", "iterating over it yields nothing.") from None
        size = self._form.size(piece)
        repeated = self._form.join([piece] * -(-num_samples // size))
        batch = self._form.finish(self._form.take(repeated, 0, num_samples))
        return batches.to_device(batch, self._device, copy=True)
