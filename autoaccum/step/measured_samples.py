"""Chooses the samples that a run is measured on, few and far apart, cuts them, and makes batches of parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches, splits
from autoaccum.data.randomness import collated_otherwise, preserved_randomness
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.step.findings import Part
from autoaccum.step.job import Job
from autoaccum.step.rng_replay import reading
from autoaccum.step.snapshot import same

MOST = 6
"""Samples that a measurement takes: enough for three cuts into parts of different sizes."""
_LOOKED_AT = 128
"""Samples of a window that those are chosen from."""
_LARGEST_BYTES = 2**24
"""Bytes of the samples that are looked at: of large ones there are fewer."""


_FEW_VALUES = 16
"""Different values up to which numbers are taken for labels or a mask, whatever their type."""
_FIRST = 4096
"""Look at so many numbers first."""


def choose(window: Any, num_samples: int, count: int, without: Sequence[int] = ()) -> list[int]:
    """Return the positions of ``count`` samples of a window that differ as much as they can.

    Two thirds are far from each other. The rest are nearest neighbours of these, for what compares samples of a kind
    with each other, such as a contrastive loss, needs two of a kind to do anything.

    Args:
        window: the window.
        num_samples: its samples.
        count: how many to choose, at most all.
        without: positions that are not to be among them, as long as there are others.
    """
    known = {*without}
    free = [position for position in range(num_samples) if position not in known]
    if len(free) <= count:
        return [*free, *without][:count]
    candidates = _candidates(window, free, count)
    features = attempt(lambda: _features(window.samples(candidates), len(candidates)))
    # Its rows are not samples, or the host has no room for so many at once: one is as good as another.
    if features is None or isinstance(features, RanOut):
        return _spread(free, count)
    chosen = [int(features.norm(dim=1).argmax())]
    apart = torch.cdist(features, features)
    while len(chosen) < count - count // 3:
        chosen.append(
            int(apart[chosen].min(dim=0).values.index_fill(0, torch.tensor(chosen, device="cpu"), -1).argmax())
        )
    for first in list(chosen):
        others = [index for index in range(len(candidates)) if index not in chosen]
        if len(chosen) < count and others:
            chosen.append(others[int(apart[first, others].argmin())])
    # The two that differ the most come first and last: in some cut each of them is a part by itself.
    return [candidates[index] for index in (chosen[0], *chosen[2:], chosen[1])]


def _candidates(window: Any, free: Sequence[int], count: int) -> list[int]:
    """Return the positions of samples to look at, evenly spread, by fours: neighbours may have been put together."""
    each = max(1, batches.num_bytes(window.samples(free[:1])))
    most = min(len(free), _LOOKED_AT, max(count, _LARGEST_BYTES // each))
    if most < len(free) and most % 4 == 0:
        starts = {int(index) for index in np.linspace(0, len(free) - 4, most // 4)}
        return [free[index] for index in sorted({start + next_one for start in starts for next_one in range(4)})]
    return _spread(free, most)


def _spread(free: Sequence[int], count: int) -> list[int]:
    return [free[index] for index in sorted({int(index) for index in np.linspace(0, len(free) - 1, count)})]


def _features(batch: Any, num_samples: int) -> torch.Tensor | None:
    """Return numbers that tell samples apart, (num_samples, some), each scaled to a spread of one; None where no leaf
    has a row for each sample.
    """
    inputs: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for leaf in batches.leaves_within(batch):
        numbers = numbers_of(leaf)
        if numbers is not None and len(numbers) == num_samples:
            # Whole numbers are classes, tokens or counts; others are where they take few values.
            is_whole = str(leaf.dtype).removeprefix("torch.").startswith(("bool", "int", "uint"))
            is_label = is_whole or _takes_few_values(numbers)
            (labels if is_label else inputs).extend(_of_rows(numbers.cpu().reshape(num_samples, -1)))
        elif isinstance(leaf, list | tuple) and len(leaf) == num_samples:
            labels.append(torch.tensor([_length(entry) for entry in leaf], dtype=torch.float64, device="cpu"))
    if not inputs and not labels:
        return None
    features = torch.stack([*inputs, *labels], dim=1).nan_to_num(0, 0, 0)
    features = features - features.mean(dim=0)
    features = features / features.std(dim=0).clamp(min=1e-12)
    # Labels and masks decide what a loss counts; of the numbers of inputs there are many, and they differ anyway.
    features[:, len(inputs) :] *= 3 * math.sqrt(max(len(inputs), 1) / max(len(labels), 1))
    return features


def _has_numbers(leaf: Any) -> bool:
    """Return whether a leaf has rows of numbers: no texts, dates, sparse, nested or quantised tensors, or scalars."""
    if isinstance(leaf, np.ndarray):
        # PyTorch takes none of more than 64 bits.
        return (
            leaf.ndim > 0 and leaf.dtype.kind in "biufc" and leaf.dtype.itemsize <= 8 * (1 + (leaf.dtype.kind == "c"))
        )
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.layout is torch.strided and leaf.ndim > 0


def numbers_of(leaf: Any) -> torch.Tensor | None:
    """Return the numbers of a tensor or array, with a row for each of its rows, where they lie, in 64 bits: a copy.

    Complex ones become pairs. None for what has no rows of numbers.
    """
    if not _has_numbers(leaf):
        return None
    if isinstance(leaf, np.ndarray):
        # As PyTorch takes them: in the machine's order of bytes, and not backwards.
        leaf = torch.as_tensor(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")))
    leaf = leaf.as_subclass(torch.Tensor)  # a subclass may not bear what is computed with its numbers
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    widest = torch.float64 if leaf.device.type != "mps" else torch.float32
    numbers: torch.Tensor = leaf.detach().to(widest, copy=True)
    return numbers


def _takes_few_values(numbers: torch.Tensor) -> bool:
    # Few of them show nearly always that there are many values: to sort all takes as long as some windows.
    return all(len(torch.unique(part)) <= _FEW_VALUES for part in (numbers.flatten()[:_FIRST], numbers))


def _of_rows(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Return the columns of one tensor: means, spreads, and what an entry may be left out for."""
    if not numbers.shape[1]:
        return []
    # The shares of entries that are zero or negative count double: padding, ignored targets and masks show in them.
    zero, negative = (numbers == 0).double().mean(1), (numbers < 0).double().mean(1)
    columns = [numbers.mean(1), zero, negative, zero > 0.999, negative > 0.999]
    if numbers.shape[1] > 1:
        columns += [numbers.std(1), numbers.amax(1), numbers.amin(1)]
    return [column.double() for column in columns]


def _length(entry: Any) -> float:
    if isinstance(entry, int | float):
        return float(entry)
    return float(len(entry)) if hasattr(entry, "__len__") else 0.0


def cuts_of(count: int, smallest: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return three cuts of ``count`` samples, each as parts of their indices, all of them different.

    No part has fewer than ``smallest``: BatchNorm has no statistics of one sample.

    >>> cuts_of(6, 1)
    [((0,), (1, 2), (3, 4, 5)), ((0, 1, 2), (3, 4), (5,)), ((3, 0), (4, 1), (5, 2))]
    >>> cuts_of(3, 1)
    [((0,), (1, 2)), ((0, 1), (2,)), ((1,), (0,), (2,))]
    """
    permuted = _permuted(count)
    sizes: list[tuple[int, ...]]
    third = max(1, count // 6)
    if count // 3 >= smallest and count >= 6 and smallest == 1:
        first = (third, 2 * third, count - 3 * third)
        # Parts that are alike too: state that is carried on fits from one to the next.
        sizes = [first, first[::-1], (2 * third, 2 * third, count - 4 * third)]
    else:
        few = max(smallest, count // 3)
        if count - few < smallest:
            return []
        equal = (count // 2, count - count // 2) if count % few else (few,) * (count // few)
        sizes = [(few, count - few), (count - few, few), equal]
    orders: list[Sequence[int]] = [range(count), range(count), permuted]
    return [_parts(order, parts) for order, parts in zip(orders, sizes, strict=True)]


def _permuted(count: int) -> list[int]:
    """Return an order in which no two neighbours were neighbours: those of the second half alternate with the first."""
    half = (count + 1) // 2 if count > 3 else 1
    first, second = list(range(half)), list(range(half, count))
    mixed = [index for pair in zip(second, first, strict=False) for index in pair]
    return mixed + [index for index in range(count) if index not in mixed]


def _parts(order: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(order[start : start + size]))
        start += size
    return tuple(parts)


class Stretch:
    """A window of a few samples that are made into micro-batches as they are asked for, part by part."""

    lengths = None

    def __init__(self, parts: Sequence[Part], make: Callable[[Part], Any]) -> None:
        """Set up; ``make`` returns the batch of some of the samples."""
        self._order = [index for part in parts for index in part]
        self._make = make
        self.num_samples = len(self._order)

    def micro_batch(self, start: int, size: int) -> Any:
        """Return some samples, in the order of the parts."""
        return self._make(tuple(self._order[start : start + size]))

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at these positions on the host."""
        made = self._make(tuple(self._order[position] for position in positions))
        return batches.to_device(made, torch.device("cpu"), copy=False)


class Parts:
    """Batches of some samples of a window, each sample known by its place among them."""

    def __init__(self, job: Job, window: Any, chosen: Sequence[int]) -> None:
        """Set up.

        Args:
            job: what the run computes.
            window: the samples are its.
            chosen: their positions in it.
        """
        self.window = window
        """What the samples are of."""
        self.chosen = list(chosen)
        """Their positions in it."""
        self._job = job
        self._convert: Callable[[Any], Any] = lambda batch: batch
        self._collated: Any = None  # a batch of all samples, where parts are to be rows of it

    def make(self, part: Part) -> Any:
        """Return some of the samples as a batch, as the window makes it of them alone, on the device."""
        with reading():
            made = self._made(part)
        return self._convert(made)

    @contextmanager
    def converting(self, convert: Callable[[Any], Any]) -> Iterator[None]:
        """Compute within it with what some function makes of each batch, such as one in 64 bits."""
        before, self._convert = self._convert, convert
        try:
            yield
        finally:
            self._convert = before

    def _made(self, part: Part) -> Any:
        positions = [self.chosen[index] for index in part]
        batch = self.window.samples(positions)
        if self._collated is None:
            return batches.to_device(batch, self._job.device, copy=True)
        with preserved_randomness(), collated_otherwise():
            again = self.window.samples(positions)
        return without_padding(self.rows(self._collated, part), batch, again)

    def rows(self, collated: Any, part: Part) -> Any:
        """Return the rows of some samples of a batch of all of them, on the device."""
        # The user's own where there is one; else it is read off the batch, whose samples are known by their number.
        split = (self._job.split or splits.tensors).known(collated, len(self.chosen))
        taken = [split(collated, index, 1) for index in part]
        return batches.to_device(split.join(taken), self._job.device, copy=True)

    def collates_anew(self, put_back: Callable[[], None]) -> bool:
        """Return whether the same samples make another batch each time, as where a collate_fn draws masks.

        From then on parts are rows of one batch, padded as they are alone where that can be told.

        Args:
            put_back: puts the state back between two batches.
        """
        if self._collated is not None:
            return False
        whole = tuple(range(len(self.chosen)))
        first = self.make(whole)
        # Some draws are alike by chance, as lengths to cut samples to that are above those of all.
        for way in range(1, 4):
            with collated_otherwise(way):
                collated = self.make(whole)
            put_back()
            if not are_equal(first, collated):
                self._collated = collated
                return True
        return False


def are_equal(batch: Any, other: Any) -> bool:
    """Return whether two batches hold the same numbers."""
    leaves, others = batches.leaves_within(batch), batches.leaves_within(other)
    return len(leaves) == len(others) and all(map(_are_equal, leaves, others))


def _are_equal(first: Any, second: Any) -> bool:
    # What is no number says nothing.
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and same(first, second)
    return not isinstance(first, torch.Tensor | np.ndarray) or bool(np.array_equal(first, second))


def without_padding(rows: Any, alone: Any, again: Any) -> Any:
    """Return rows of a batch without the padding that they lack in one of their own; as they are if that is unclear.

    Args:
        rows: of a batch that longer samples are in.
        alone: the same samples, collated alone: of that the shapes count.
        again: the like, under other draws; where these decide how long samples are, shapes tell nothing.
    """
    leaves, spec = batches.flatten(rows)
    others, _ = batches.flatten(alone)
    if len(leaves) != len(others) or shapes_of(alone) != shapes_of(again):
        return rows
    # Padding is one number, behind the samples or before them, on the same side in all tensors.
    for is_behind in (True, False):
        found = [_trimmed(leaf, other, is_behind) for leaf, other in zip(leaves, others, strict=True)]
        if all(there for there, _ in found):
            return spec.unflatten([leaf for _, leaf in found])
    return rows


def shapes_of(batch: Any) -> list[torch.Size | None]:
    """Return the shapes of a batch's tensors; None for what is none."""
    return [getattr(leaf, "shape", None) for leaf in batches.flatten(batch)[0]]


def _trimmed(leaf: Any, other: Any, is_behind: bool) -> tuple[bool, Any]:
    """Return whether a tensor is of another's shape, once what is all one number is cut off, and what is left of it."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True, leaf
    if leaf.ndim != other.ndim or leaf.shape[:1] != other.shape[:1]:
        return False, leaf
    for dim in range(1, leaf.ndim):
        extent, more = other.shape[dim], leaf.shape[dim] - other.shape[dim]
        if not more:
            continue
        if more < 0:
            return False, leaf
        cut = leaf.narrow(dim, extent if is_behind else 0, more)
        if not bool((cut == cut.flatten()[0]).all()):
            return False, leaf
        leaf = leaf.narrow(dim, 0 if is_behind else more, extent)
    return True, leaf.contiguous()  # as collated ones are, and code that takes a view of them expects
