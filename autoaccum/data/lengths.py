"""Tells how long samples are, and whether a collate_fn makes larger batches of longer ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from autoaccum.data import batches, objects
from autoaccum.data.base import Item
from autoaccum.memory.oom import is_out_of_memory

PEEK = 32
"""Look at so many samples where a few have to stand for all, and read no more than these at a time."""

T = TypeVar("T")


def length_of(sample: Any) -> int:
    """Return the size of a sample's largest part: elements, characters or numbers; 0 when there is nothing to count.

    >>> length_of({"ids": [5, 2, 9], "label": 1})
    3
    >>> length_of((torch.zeros(2, 4), "a text"))
    8
    """
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, str | bytes):
        return len(sample)
    parts: Any = ()
    if isinstance(sample, Mapping):
        parts = sample.values()
    elif isinstance(sample, list | tuple):
        # By the types in it, of which there are few, and not by its entries: token ids come in lists of thousands.
        if all(issubclass(kind, int | float | complex | np.generic) for kind in set(map(type, sample))):
            return len(sample)
        parts = sample
    elif is_dataclass(sample):
        parts = [getattr(sample, field.name) for field in fields(sample)]
    return max(map(length_of, parts), default=0)


def lengths_of(items: Sequence[Item]) -> list[int]:
    """Return the length of each item's sample, an empty one's being 1: a sample that weighs nothing has no plan."""
    return [max(1, length_of(sample)) for _, _, sample in items]


def repeat_in_turn(items: Sequence[Item], num_samples: int) -> list[Item]:
    """Return ``num_samples`` items: each in turn, and the first again after the last."""
    return [items[i % len(items)] for i in range(num_samples)]


def repeat_longest(items: Sequence[Item], num_samples: int) -> list[Item]:
    """Return ``num_samples`` times the longest item, for no batch needs more memory; items in turn if all are alike."""
    lengths = lengths_of(items)
    if min(lengths) == max(lengths):
        return repeat_in_turn(items, num_samples)
    epoch, position, sample = items[lengths.index(max(lengths))]
    # Copies, for a collate_fn may take parts out of its samples.
    return [(epoch, position, copy(sample)) for _ in range(num_samples)]


def try_twice(function: Callable[[], T]) -> T:
    """Return what a function returns; call it a second time if memory runs out at the first.

    A window is replayed when memory runs out. What is done ahead of it, such as reading it, is not: hence this.
    """
    try:
        return function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Out here the error is gone, and with it the frames that held what the first try had made.
    gc.collect()
    return function()


class BatchLengths:
    """The lengths of samples in batches that come padded: of interest once one is longer than another."""

    def __init__(self) -> None:
        self._first: int | None = None  # the length in the first batch
        self._vary = False  # whether another batch had another one

    def __call__(self, batch: Any, num_samples: int, split: Any = None) -> int | None:
        """Return the size of a sample's largest part; None while that was the same in all batches.

        ``split`` is what cuts the batch, and may tell what in it are lists of samples.
        """
        is_leaf_of = getattr(split, "is_leaf_of", None)
        leaves = batches.flatten(batch, batches.is_leaf if is_leaf_of is None else is_leaf_of(batch))[0]
        # By the number of samples, and not by rows: in a time-first tensor these are steps.
        sizes = [0]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                sizes.append(leaf.numel() // max(1, num_samples) if leaf.ndim else 0)
            elif isinstance(leaf, list | tuple) and not batches.is_leaf(leaf):  # of tensors: the largest sample
                sizes.append(max(map(length_of, leaf)))
            elif objects.has_samples(leaf):  # the mean
                sizes += [tensor.numel() // max(1, num_samples) for tensor in objects.tensors(leaf)]
        length = max(sizes) or 1  # of empty samples too
        if self._first is None:
            self._first = length
        self._vary = self._vary or length != self._first
        return length if self._vary else None

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of the batches so far."""
        return {"first": self._first, "vary": self._vary}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._first, self._vary = state["first"], state["vary"]


class Padding:
    """What a collate_fn makes of samples of different lengths, learned by collating a few of them alone.

    One that pads everything to one length gains nothing when samples of a length are together. One that truncates makes
    a batch of one size of all samples from some length on: they are counted as being of that length.
    """

    def __init__(self, collate: Callable[[list[Item]], Any], grows: bool | None = None) -> None:
        """Prepare to learn.

        Args:
            collate: makes a batch, leaving the random states as they were.
            grows: whether longer samples make larger batches; None where that is yet to be learned.
        """
        self._collate = collate
        self._grows = grows
        self._known = -1  # up to which length a sample has been collated alone
        self._largest = -1  # elements in the batch that was made of it
        self._truncated_at = sys.maxsize  # samples of this length and more make batches of one size

    def grows(self, shortest: Item, longest: Item) -> bool:
        """Return whether longer samples make larger batches: learned from the first two it is asked for."""
        if self._grows is None:
            small, large = self._numel(shortest), self._numel(longest)
            self._grows = small is not None and large is not None and small < large
        return self._grows

    def truncated(self, lengths: Sequence[int], item_at: Callable[[int], Item]) -> tuple[int, ...]:
        """Return lengths as they count in a batch.

        Args:
            lengths: of samples, the longest first.
            item_at: (index) -> the item of that length, which is read only where it has something to tell.
        """
        # Only a sample longer than all before can tell more of where the collate_fn truncates, and only if its batch is
        # larger than all before: else it was truncated as the longest one before.
        if lengths[0] > self._known:
            numel = self._numel(item_at(0))
            if numel is None:
                return tuple(lengths)
            self._known = lengths[0]
            if numel > self._largest:
                self._largest = numel
                self._truncated_at = lengths[self._last_as_large(len(lengths), item_at)]
        return tuple([min(length, self._truncated_at) for length in lengths])

    def _last_as_large(self, count: int, item_at: Callable[[int], Item]) -> int:
        """Find the shortest sample whose batch is as large as that of the longest, by bisection; return its index."""
        last, first_smaller = 0, count  # known to be as large, and known (or taken) to be smaller
        while first_smaller - last > 1:
            middle = (last + first_smaller) // 2
            if (self._numel(item_at(middle)) or 0) >= self._largest:
                last = middle
            else:
                first_smaller = middle
        return last

    def _numel(self, item: Item) -> int | None:
        """Count the elements in the largest tensor of a batch of that item alone; None if there is no such batch."""
        try:  # of a copy: a collate_fn may take parts out of its samples
            batch = try_twice(lambda: self._collate([deepcopy(item)]))
        except Exception:  # a collate_fn may refuse a batch of one; what is wrong with it comes up in training
            return None
        leaves = batches.flatten(batch)[0]
        return max((length_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)), default=0)
