"""Finds how what a user's function cuts is joined again: by what parts of one sample and of two differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches, objects
from autoaccum.errors import DataError
from autoaccum.memory.oom import is_out_of_memory

_HOW = "Give the function a join: split.join = lambda parts: ..., or pass an object that has a join(parts) besides"


class _CannotTellError(Exception):
    """What was cut does not show how it is joined."""


class Joining:
    """How what one function cuts is joined, learned of the first batch with two samples, and tried on it."""

    def __init__(self, function: Callable[[Any, int, int], Any]) -> None:
        self._function = function
        self._join: Callable[[Sequence[Any]], Any] | None = None
        self._why = "no batch has had two samples"
        self._is_known = False

    def look_at(self, batch: Any, count: int) -> None:
        """Learn of a batch how its parts are joined."""
        if self._is_known or count < 2:
            return
        self._is_known = True
        try:
            first, second, both = (self._function(batch, *where) for where in ((0, 1), (1, 1), (0, 2)))
            # Shapes may mislead, as of what is sorted or padded: it holds where it gives back what was cut of both.
            join = _learned(first, both)
            if not are_same(join([first, second]), both):
                raise _CannotTellError("two samples joined are not what it cuts of both, as where it pads or sorts")
            self._join = join
        except _CannotTellError as error:
            self._why = str(error)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._why = f"cutting one sample failed: {error!r}"  # which may be no mistake, if training needs none

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Join parts.

        Raises:
            DataError: nothing tells how.
        """
        if len(parts) == 1:
            return parts[0]
        if self._join is None:
            raise DataError(f"split: what it cuts cannot be joined ({self._why}). {_HOW}.")
        try:
            return self._join(parts)
        except _CannotTellError as error:
            raise DataError(f"split: what it cuts cannot be joined ({error}). {_HOW}.") from None


def _learned(one: Any, two: Any) -> Callable[[Sequence[Any]], Any]:
    """Return how parts are joined, of a part of one sample and of a part of two: what differs has one entry a sample.

    Raises:
        _CannotTellError: they differ in more than that.
    """
    if type(one) is not type(two):
        raise _CannotTellError(f"one sample is a {type(one).__name__}, and two are a {type(two).__name__}")
    if isinstance(one, torch.Tensor | np.ndarray):
        return _of_tensors(one, two)
    if objects.has_samples(one):
        return objects.join if objects.count(one) != objects.count(two) else _shared
    # Before mappings and tuples, which a batch of graphs and a packed sequence may be besides.
    if isinstance(one, Mapping):
        if one.keys() != two.keys():
            raise _CannotTellError("one sample has other keys than two")
        batches.is_leaf(one)  # by which torch's pytree learns of mappings that it does not know
        entries = {key: _learned(one[key], two[key]) for key in one}

        def of_mapping(parts: Sequence[Any]) -> Any:
            spec = batches.flatten(parts[0], lambda node: node is not parts[0])[1]  # of the mapping alone
            return spec.unflatten([entries[key]([part[key] for part in parts]) for key in parts[0]])

        return of_mapping
    # A list that does not grow with the samples holds parts of a batch, as ``[inputs, targets]``; one that does holds
    # one entry for each. Nothing else tells, for both may hold tensors.
    if isinstance(one, list | tuple):
        if hasattr(one, "_fields") or len(one) == len(two):
            inner = [_learned(first, second) for first, second in zip(one, two, strict=True)]

            def of_parts(parts: Sequence[Any]) -> Any:
                return _like(parts[0], [join([part[index] for part in parts]) for index, join in enumerate(inner)])

            return of_parts
        # What has several entries for each sample may have another number of them for the next one.
        if (len(one), len(two)) != (1, 2):
            raise _CannotTellError(f"a {type(one).__name__} has {len(one)} entries of one sample and {len(two)} of two")
        return lambda parts: _like(parts[0], [entry for part in parts for entry in part])
    return _shared


def _like(container: Any, entries: list[Any]) -> Any:
    """Return entries in a container of a kind."""
    return type(container)(*entries) if hasattr(container, "_fields") else type(container)(entries)


def _of_tensors(one: Any, two: Any) -> Callable[[Sequence[Any]], Any]:
    """Return how tensors are joined: in the dim in which those of one sample and of two differ."""
    differing = [dim for dim in range(min(one.ndim, two.ndim)) if one.shape[dim] != two.shape[dim]]
    if one.ndim != two.ndim or len(differing) > 1:
        raise _CannotTellError(f"tensors of one sample are {tuple(one.shape)}, and of two {tuple(two.shape)}")
    # One that is flattened may have as many rows for both, and then the parts themselves show that they differ.
    if not differing:
        return _shared
    join: Any = np.concatenate if isinstance(one, np.ndarray) else torch.cat
    return lambda parts: join(list(parts), differing[0])


def _shared(parts: Sequence[Any]) -> Any:
    """Return what belongs to a whole batch, and is in each part."""
    if not all(are_same(part, parts[0]) for part in parts[1:]):
        raise _CannotTellError(f"of a {type(parts[0]).__name__} that parts have in common they hold different ones")
    return parts[0]


def are_same(first: Any, second: Any) -> bool:
    """Return whether two batches hold the same."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if objects.has_samples(first) and objects.has_samples(second):
        return objects.count(first) == objects.count(second) and are_same(*map(objects.tensors, (first, second)))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(are_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(are_same, first, second))
    try:
        return first is second or bool(first == second) or bool(first != first and second != second)
    except (TypeError, ValueError, RuntimeError):
        return False
