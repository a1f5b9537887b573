"""Makes windows of the samples that a step of an ``Accumulator`` is given, with the collate_fn of its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from autoaccum.data.base import Item, Window
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import Padding
from autoaccum.data.pieces import Pieces, SampleReader, items_form, with_preserved_randomness
from autoaccum.data.randomness import mix
from autoaccum.errors import ArgumentTypeError, EmptyDatasetError


class StepSamples:
    """The samples of one step after the other, collated as those of ``fit`` are.

    A micro-batch is collated under a seed of its own, and leaves the random states as they were; samples of different
    lengths are served longest first.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], seed: int, device: torch.device) -> None:
        """Set up.

        Args:
            collate_fn: makes a batch of a list of samples.
            seed: of what it draws.
            device: where micro-batches go.
        """
        # The reader of ``fit``, which collates under a seed for each micro-batch, and gives a collate_fn copies of
        # samples that it may take apart. There is nothing for it to read: the samples are there.
        self._collate = with_preserved_randomness(SampleReader(None, collate_fn, mix(seed)))
        self._device = device
        self._padding = None if collate_fn is default_collate else Padding(self._collate)

    def window(self, samples: Any, step: int) -> Window:
        """Return the samples of a step as a window.

        Raises:
            ArgumentTypeError: they are no list.
            EmptyDatasetError: there is none.
        """
        if not isinstance(samples, list | tuple) or hasattr(samples, "_fields"):
            cure = "With collate_fn, a step is given samples; leave it out for a batch that is collated already."
            raise ArgumentTypeError("batch", samples, "a list of samples", cure)
        if not samples:
            raise EmptyDatasetError("batch", "it is an empty list.")
        items: list[Item] = [(step, position, sample) for position, sample in enumerate(samples)]
        position = 0

        # In the form in which data are read, so that windows are grouped and kept as those of ``fit``.
        def next_items(wished: int) -> tuple[int, list[Item]]:
            nonlocal position
            found = items[position : position + wished]
            if not found:
                raise StopIteration
            position += len(found)
            return len(found), found

        if self._padding is None:  # of one shape: there is nothing to group
            reader: Any = Pieces(next_items, form=items_form(self._collate), device=self._device)
        else:
            reader = GroupedSamples(next_items, collate=self._collate, padding=self._padding, device=self._device)
        window: Window = reader.window(len(items))
        return window
