"""The samples of a check: a batch of the caller's, or some of the data that ``fit`` takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from autoaccum.data import batches, foreign
from autoaccum.data.arrays import converted
from autoaccum.data.base import Window
from autoaccum.data.lists import read
from autoaccum.data.sources import open_source
from autoaccum.data.splits import is_said, tensors
from autoaccum.data.streams import is_iterator
from autoaccum.errors import (
    AmbiguousBatchError,
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    EmptyDatasetError,
)
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.training.lazy import Examples
from autoaccum.verification.samples import MOST

_READ = 128
"""Samples of a data set that those to measure are chosen from."""
_LOOKED_AT = 64
"""Look at so many entries of a list, evenly spread."""
_MOST_PARTS = 8
"""Entries up to which a list may be the parts of a batch."""


class _GivenBatch:
    """A batch of the caller's as a window."""

    lengths = None

    def __init__(self, batch: Any, device: torch.device, split: Any = tensors) -> None:
        self.num_samples = split.count(batch, "batch")
        self._split = split
        self._batch = batch
        self._device = device

    def micro_batch(self, start: int, size: int) -> Any:
        # Copied, for a forward may write to its inputs.
        return batches.to_device(self._split(self._batch, start, size), self._device, copy=True)

    def samples(self, positions: Sequence[int]) -> Any:
        # Neighbours are taken together: a sample at a time takes longer than the steps that are measured.
        runs: list[list[int]] = []
        for position in positions:
            if runs and position == runs[-1][-1] + 1:
                runs[-1].append(position)
            else:
                runs.append([position])
        return self._split.join([self._split(self._batch, run[0], len(run)) for run in runs])

    def example(self, num_samples: int) -> Any:
        return self.micro_batch(0, num_samples)


def open_samples(
    batch: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    device: torch.device,
    split: Any = tensors,
    *,
    are_pairs: bool = False,
) -> tuple[Window, Examples]:
    """Return the samples to choose from, and what makes examples of them.

    Raises:
        ArgumentError: it is neither a batch nor data.
        DataError: it has no samples.
    """
    foreign.refuse("batch", batch)
    if _is_batch(batch, split) and not _are_samples(batch, collate_fn, split, are_pairs):
        if collate_fn is not None:
            cure = "A batch is collated already: leave collate_fn out, or pass the Dataset."
            raise ConflictingArgumentsError("collate_fn", collate_fn, "a batch", cure)
        batch = batch if is_said(split) else converted(batch)
        given = _GivenBatch(batch, device, split)
        return given, given
    if is_iterator(batch):
        cure = "What is read of it would be lost to you: pass one batch of it, next(iterator)."
        raise ArgumentTypeError("batch", batch, "a batch, or data that can be read again", cure)
    if isinstance(batch, DataLoader) and batch.num_workers:
        # A few samples are read in this process as quickly as workers start. The caller's own loader stays as it is.
        batch = copy.copy(batch)
        batch.num_workers, batch.timeout = 0, 0
    # In a new order, for data often come sorted, and samples of one kind tell little.
    source = open_source(
        batch, seed=0, shuffle=True, device=device, collate_fn=collate_fn, argument="batch", split=split
    )
    window = source.read(0, lambda position: (_READ,)).window(_READ)
    if window is None:
        raise EmptyDatasetError("batch", "reading it yields nothing.")
    return window, source


def _is_batch(batch: Any, split: Any) -> bool:
    """Return whether something is one batch, and not data to read some of."""
    # What is a tree, or has rows, is a batch, with a split or without.
    _, spec = batches.flatten(batch)
    if not spec.is_leaf() or batches.has_rows(batch):
        return True
    if not is_said(split) or isinstance(batch, Dataset | DataLoader) or is_iterator(batch):
        return False
    # Of any form: the split knows it. What it does not know may yield batches that it does.
    try:
        # One that it can count is a batch, and one without samples is none.
        return bool(split.count(batch))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False


def _are_samples(batch: Any, collate_fn: Callable[[list[Any]], Any] | None, split: Any, are_pairs: bool) -> bool:
    """Return whether a list is data, as ``fit`` takes it, and no batch, as a DataLoader yields it."""
    if type(batch) is not list or is_said(split):
        return False
    if collate_fn is not None:  # which nobody passes for what is a batch already
        return True
    # What a training_step takes may be a list of samples itself, as of images and their boxes.
    if not (are_pairs and batch and all(isinstance(entry, tuple | list | Mapping) for entry in batch)):
        return False
    # Of inputs and targets a batch has two parts: more are samples, or batches that follow each other.
    if len(batch) > 2:
        return True
    # Samples are alike: the parts of a batch, inputs and targets, seldom are, and have a row for each sample.
    found = [batches.flatten(entry) for entry in batch[:: -(-len(batch) // _LOOKED_AT)]]
    kinds = [(spec, [type(leaf) for leaf in leaves]) for leaves, spec in found]
    rows = {batches.num_rows(leaf) if batches.has_rows(leaf) else None for leaves, _ in found for leaf in leaves}
    if any(kind != kinds[0] for kind in kinds) or (len(batch) <= _MOST_PARTS and len(rows) == 1 and None not in rows):
        return False
    try:
        return read(batch, "batch").are_samples
    except AmbiguousBatchError:
        return False


def refuse_few(num_samples: int, smallest: int) -> None:
    """Refuse samples that are too few to be cut into parts of at least so many.

    Raises:
        ArgumentError: they are.
    """
    fewest = 2 * smallest
    if num_samples < fewest:
        why = "they are run whole, and in parts"
        if smallest > 1:
            groups = f", in groups of {smallest} here" if smallest > 2 else ""
            why = f"a part needs {smallest} where BatchNorm trains{groups}"
        cure = f"Pass more of them, {max(MOST, 3 * smallest)} at best: {why}."
        found = f"{num_samples} sample{'s' if num_samples != 1 else ''}"
        raise ArgumentError("batch", found, f"at least {fewest} samples", cure)
