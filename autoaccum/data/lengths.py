"""How long samples are, and whether a collate_fn's batches are the longer for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from autoaccum.data import batches
from autoaccum.data.base import Item
from autoaccum.memory.oom import is_out_of_memory

PEEK = 32
"""Samples that stand for all of them."""

T = TypeVar("T")


def length_of(sample: Any) -> int:
    """The size of a sample's largest part: elements, characters or numbers; 0 when there is nothing to count.

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
        if all(issubclass(kind, int | float | complex | np.generic) for kind in set(map(type, sample))):
            return len(sample)
        parts = sample
    elif is_dataclass(sample):
        parts = [getattr(sample, field.name) for field in fields(sample)]
    return max(map(length_of, parts), default=0)


def lengths_of(items: Sequence[Item]) -> list[int]:
    """Each item's."""
    return [length_of(sample) for _, _, sample in items]


def in_turn(items: Sequence[Item], num_samples: int) -> list[Item]:
    """So many items: each in turn."""
    return [items[i % len(items)] for i in range(num_samples)]


def longest(items: Sequence[Item], num_samples: int) -> list[Item]:
    """So many items: the longest again and again, for no batch needs more memory; in turn where they are alike.

    They are copies, for a collate_fn may take parts out of its samples.
    """
    lengths = lengths_of(items)
    if min(lengths) == max(lengths):
        return in_turn(items, num_samples)
    epoch, position, sample = items[lengths.index(max(lengths))]
    return [(epoch, position, copy(sample)) for _ in range(num_samples)]


def again(function: Callable[[], T]) -> T:
    """What it returns, tried twice if memory runs out: what is done ahead of a window is not replayed with it."""
    try:
        return function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    return function()


class BatchLengths:
    """Tells how long the samples of batches are that come padded: of interest once one is longer than another."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._vary = False

    def __call__(self, batch: Any) -> int | None:
        """The size of a sample's largest part; None while that was the same in all batches."""
        leaves = batches.flatten(batch)[0]
        rows = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
        length = max((leaf.numel() // max(1, leaf.shape[0]) for leaf in rows), default=1)
        if self._first is None:
            self._first = length
        self._vary = self._vary or length != self._first
        return length if self._vary else None


class Padding:
    """What a collate_fn makes of samples of different lengths, learned by collating a few of them alone.

    One that pads everything to one length gains nothing when samples of a length are together. One that truncates makes
    a batch of one size of all samples from some length on: they are counted as being of that length.
    """

    def __init__(self, collate: Callable[[list[Item]], Any], follows: bool | None = None) -> None:
        """``collate`` leaves the random states as they were; ``follows`` is True where that is known already."""
        self._collate = collate
        self._follows = follows
        self._known = -1  # up to which length a sample has been collated alone
        self._largest = -1  # elements in the batch that was made of it
        self._cap = sys.maxsize

    def follows(self, shortest: Item, longest: Item) -> bool:
        """Whether longer samples make larger batches: learned from the first two it is asked for."""
        if self._follows is None:
            small, large = self._numel(shortest), self._numel(longest)
            self._follows = small is not None and large is not None and small < large
        return self._follows

    def capped(self, lengths: Sequence[int], item_at: Callable[[int], Item]) -> tuple[int, ...]:
        """Lengths, the longest first, as they count; ``item_at`` (index) reads the item of that length."""
        if lengths[0] > self._known:
            numel = self._numel(item_at(0))
            if numel is None:
                return tuple(lengths)
            self._known = lengths[0]
            if numel > self._largest:
                self._largest = numel
                self._cap = lengths[self._last_as_large(len(lengths), item_at)]
        return tuple([min(length, self._cap) for length in lengths])

    def _last_as_large(self, count: int, item_at: Callable[[int], Item]) -> int:
        """The index of the shortest sample whose batch is as large as that of the longest, by bisection."""
        last, first_smaller = 0, count
        while first_smaller - last > 1:
            middle = (last + first_smaller) // 2
            if (self._numel(item_at(middle)) or 0) >= self._largest:
                last = middle
            else:
                first_smaller = middle
        return last

    def _numel(self, item: Item) -> int | None:
        """Elements in the largest tensor of a batch of that item alone; None when there can be no such batch."""
        try:  # of a copy: a collate_fn may take parts out of its samples
            batch = again(lambda: self._collate([deepcopy(item)]))
        except Exception:
            return None
        leaves = batches.flatten(batch)[0]
        return max((length_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)), default=0)
