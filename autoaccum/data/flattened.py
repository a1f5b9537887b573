"""Cuts batches in which parts of all samples stand in one tensor, as the images of a vision-language model do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autoaccum.data import batches
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError

_COUNT = "the name of the entry that holds how many rows each sample has, or a function (batch) -> these numbers"


class Flattened(batches.SaidSplit):
    """The split of such batches: entries that are flattened are cut by counts, and all others have a row a sample."""

    def __init__(self, counts: Mapping[str, str | Callable[[Any], Any]], *, none_if_empty: bool = False) -> None:
        if not counts:
            raise ArgumentError("counts", dict(counts), "at least one entry that is flattened", "pixels='num_images'.")
        for name, by in counts.items():
            if not isinstance(by, str) and not callable(by):
                raise ArgumentTypeError(name, by, _COUNT)
        self._counts = dict(counts)
        self._none_if_empty = none_if_empty

    def __repr__(self) -> str:
        return f"autoaccum.splits.flattened({', '.join(self._counts)})"

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        """Return ``size`` samples of a batch from ``start`` on: tensors are views."""
        bounds = self._bounds(batch)
        found, spec = pytree.tree_flatten_with_path(batch, is_leaf=batches.is_leaf)
        parts = []
        for path, leaf in found:
            name = _name(path)
            # Rows of one sample follow each other, those of the next one come behind them: they are one stretch.
            if name in bounds:
                first, last = bounds[name][start], bounds[name][min(start + size, len(bounds[name]) - 1)]
                is_none = self._none_if_empty and first == last
                parts.append(None if is_none else batches.take_rows(leaf, first, last))
            else:
                parts.append(batches.take_rows(leaf, start, start + size) if batches.has_rows(leaf) else leaf)
        return spec.unflatten(parts)

    def count(self, batch: Any, argument: str = "batch") -> int:
        """Count the samples in a batch.

        Raises:
            DataError: the counts do not sum to what there is.
            RaggedBatchError: entries that are not flattened disagree.
        """
        # What is flattened does not tell how many samples there are: it may have fewer rows than these, or none.
        rest = {pytree.keystr(path): leaf for path, leaf in _with_paths(batch) if _name(path) not in self._counts}
        count = batches.num_samples(rest, argument)
        for name, bounds in self._bounds(batch, argument).items():
            if len(bounds) != count + 1:
                raise DataError(
                    f"{argument}: {name!r} is counted for {len(bounds) - 1} samples, of which the batch holds {count}. "
                    f"Let it have one number for each."
                )
        return count

    def join(self, parts: Sequence[Any]) -> Any:
        """Join batches, one after the other: rows of all samples follow each other as the samples do."""
        if len(parts) == 1:
            return parts[0]
        names = {pytree.keystr(path): _name(path) for path, _ in _with_paths(parts[0])}

        def joined(path: str, leaves: Sequence[Any]) -> Any:
            if names[path] in self._counts:  # with none_if_empty, what had no rows is None
                leaves = [leaf for leaf in leaves if leaf is not None] or leaves
            return batches.join_rows(path, leaves)

        return batches.joined_by(parts, batches.is_leaf, joined)

    def _bounds(self, batch: Any, argument: str = "batch") -> dict[str, list[int]]:
        """Return of each flattened entry where the rows of each sample begin, and where the last ones end."""
        entries = {_name(path): leaf for path, leaf in _with_paths(batch)}
        found: dict[str, list[int]] = {}
        # One after the other, for an entry may be counted by another that is flattened too, as patches by images.
        for name in self._counts:
            if entries.get(name) is not None:  # a batch of texts alone may have none
                self._bound(name, batch, entries, found, argument, ())
        return found

    def _bound(
        self,
        name: str,
        batch: Any,
        entries: Mapping[str, Any],
        found: dict[str, list[int]],
        argument: str,
        asked: tuple[str, ...],
    ) -> list[int]:
        """Return the bounds of one entry, by those of what it is counted by where that is flattened too."""
        if name in found:
            return found[name]
        # Two entries that count each other would never come to an end.
        if name in asked:
            raise ArgumentError(name, self._counts[name], _COUNT, "It is counted by itself.")
        by = self._counts[name]
        if isinstance(by, str) and by not in entries:
            raise DataError(f"{argument}: {name!r} is counted by {by!r}, which the batch does not hold.")
        counts = _numbers(entries[by] if isinstance(by, str) else by(batch), name, argument)
        if isinstance(by, str) and by in self._counts:  # for each of its rows: an image's patches, say
            outer = self._bound(by, batch, entries, found, argument, (*asked, name))
            counts = [sum(counts[first:last]) for first, last in pairwise(outer)]
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        rows = batches.num_rows(entries[name])
        if bounds[-1] != rows:
            raise DataError(f"{argument}: {name!r} has {rows} rows, and its counts sum to {bounds[-1]}.")
        found[name] = bounds
        return bounds


def _with_paths(batch: Any) -> list[tuple[Any, Any]]:
    return list(pytree.tree_flatten_with_path(batch, is_leaf=batches.is_leaf)[0])


def _name(path: Sequence[Any]) -> str:
    """Return the name of an entry, wherever in the batch it stands."""
    last: Any = path[-1] if path else None
    return str(getattr(last, "key", getattr(last, "name", getattr(last, "idx", ""))))


def _numbers(counts: Any, name: str, argument: str) -> list[int]:
    """Return numbers of rows; of rows of numbers, such as (time, height, width), the product of each.

    Raises:
        DataError: they are no whole numbers of at least 0.
    """
    try:
        numbers = torch.as_tensor(np.asarray(counts) if isinstance(counts, list | tuple) else counts)
        if numbers.is_floating_point() or not numbers.ndim:
            raise ValueError("they are no list of whole numbers")
        # (time, height, width) of an image are as many patches as their product.
        found: list[int] = numbers.reshape(len(numbers), -1).prod(dim=1).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{argument}: {name!r} cannot be counted by a {type(counts).__name__} ({error}).") from None
    if any(number < 0 for number in found):
        raise DataError(f"{argument}: {name!r} is counted by a negative number.")
    return found
