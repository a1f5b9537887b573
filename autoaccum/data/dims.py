"""Cuts batches whose samples lie in another dim than 0, such as time-first ones, (time, samples, features)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autoaccum.data import batches, objects
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError, RaggedBatchError

Dims = Any
"""An int, None for what belongs to the whole batch, or a pytree of these: the beginning of that of a batch."""
_ACCEPTED = "an int of at least 0, or ints in the structure of a batch, such as {'inputs': 1, 'labels': 0}"


def check_dims(dims: Dims) -> None:
    """Check what a user says of the dimensions of samples.

    Raises:
        ArgumentError: it is no int of at least 0, nor a pytree of such.
    """
    try:
        _check_each(dims)
    except RecursionError:  # nothing is held that deep
        raise ArgumentError("batch_dim", "a structure that holds itself", _ACCEPTED) from None


def _check_each(dims: Dims) -> None:
    if isinstance(dims, Mapping | list | tuple):
        for entry in dims.values() if isinstance(dims, Mapping) else dims:
            if entry is not None:
                _check_each(entry)
    elif isinstance(dims, bool) or not isinstance(dims, int):
        raise ArgumentTypeError("batch_dim", dims, _ACCEPTED)
    elif dims < 0:
        # Of leaves with different dimensions, the last is another one in each.
        raise ArgumentError("batch_dim", dims, _ACCEPTED, "Count dimensions from the first.")


class AtDim(batches.SaidSplit):
    """The split of batches whose samples lie in ``dims``.

    With one number ``d`` the leaf with the most dimensions has its samples in dim d, and so has every leaf of the same
    extent in dim d. Other leaves, such as labels next to time-first inputs, have them in dim 0. A pytree gives a number
    for each leaf.
    """

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        # What one number came to, in the first batch of its structure. It holds for all that follow, and for what is
        # cut of them: in a batch as long as it is wide the extents alone would not tell.
        self._held: dict[str, int | None] = {}

    def description(self) -> dict[str, Any]:
        """Return where samples lie, for what tells data from other data."""
        return {"batch_dim": self.dims if isinstance(self.dims, int) else str(self.dims)}

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        """Return ``size`` samples of a batch from ``start`` on: tensors are views."""
        where = self.of_leaves(batch)
        leaves, spec = batches.flatten(batch)
        parts = []
        for leaf, dim in zip(leaves, where.values(), strict=True):
            parts.append(leaf if dim is None else _cut(leaf, dim, start, start + size))
        return spec.unflatten(parts)

    def count(self, batch: Any, argument: str = "batch") -> int:
        """Count the samples in a batch.

        Raises:
            RaggedBatchError: its leaves disagree.
            DataError: nothing tells in which dim the samples of a leaf lie.
        """
        return _extent(batch, self.of_leaves(batch, argument), argument)

    def join(self, parts: Sequence[Any]) -> Any:
        """Join batches, one after the other."""
        where = self.of_leaves(parts[0])

        def joined(path: str, leaves: Sequence[Any]) -> Any:
            dim = where[path]
            if dim is None:
                return batches.the_same(path, leaves)
            if isinstance(leaves[0], torch.Tensor) or objects.is_collection(leaves[0]):
                return torch.cat(list(leaves), dim=dim)
            if isinstance(leaves[0], np.ndarray):
                return np.concatenate(list(leaves), axis=dim)
            return batches.join_rows(path, leaves)

        return parts[0] if len(parts) == 1 else batches.joined_by(parts, batches.is_leaf, joined)

    def of_leaves(self, batch: Any, argument: str = "batch") -> dict[str, int | None]:
        """Return in which dim the samples of each leaf lie, by where the leaf is; None where it has none.

        Raises:
            DataError: a leaf may have them in either of two.
        """
        if not isinstance(self.dims, int):
            return _all_said(batch, self.dims)
        if self._held.keys() != batches.leaves_by_path(batch).keys():
            self._held = _found(batch, self.dims, argument)
        return self._held


def _all_said(batch: Any, dims: Dims) -> dict[str, int | None]:
    """Return what a pytree of dims says of each leaf."""
    said = {}
    for path, leaf in pytree.tree_flatten_with_path(batch, is_leaf=batches.is_leaf)[0]:
        dim = _said(dims, path) if batches.has_rows(leaf) else None
        if dim and dim >= getattr(leaf, "ndim", 1):
            which = f"{pytree.keystr(path)} has {getattr(leaf, 'ndim', 1)} dimension(s)"
            raise ArgumentError("batch_dim", dims, "a dim that each leaf has", f"{which}, and no dim {dim}.")
        said[pytree.keystr(path)] = dim
    return said


def _said(dims: Dims, path: tuple[Any, ...]) -> int | None:
    """Return the dim that a pytree of them says for the leaf at a path: its own, or that of what it is in."""
    # A number at a node holds for all that is in it.
    for step in path:
        if not isinstance(dims, Mapping | list | tuple):
            break
        key: Any = getattr(step, "key", getattr(step, "idx", getattr(step, "name", None)))
        try:
            dims = dims[key]
        except (LookupError, TypeError):
            cure = f"The batch holds {pytree.keystr(path)}: say its dim, or None where it belongs to the whole batch."
            raise ArgumentError("batch_dim", dims, "a dim for each leaf of a batch", cure) from None
    return dims if isinstance(dims, int) else None


def _extent(batch: Any, where: Mapping[str, int | None], argument: str = "batch") -> int:
    """Return how many samples the leaves agree on."""
    leaves = batches.leaves_by_path(batch)
    sizes = {}
    for path, dim in where.items():
        if dim is not None:
            leaf = leaves[path]
            sizes[path] = leaf.shape[dim] if hasattr(leaf, "shape") else batches.num_rows(leaf)
    if not sizes:
        raise DataError(f"{argument}: a batch of type {type(batch).__name__} holds no tensor, so it has no samples.")
    if len(set(sizes.values())) > 1:
        raise RaggedBatchError(sizes, argument, " These are their extents in the dims that batch_dim says.")
    return int(next(iter(sizes.values())))


def _found(batch: Any, dim: int, argument: str) -> dict[str, int | None]:
    """Find the dim of each leaf: ``dim`` where it has the extent of the leaf with the most dimensions, else 0."""
    leaves = batches.leaves_by_path(batch)
    rows = {path: leaf for path, leaf in leaves.items() if batches.has_rows(leaf)}
    shapes = {path: tuple(getattr(leaf, "shape", (batches.num_rows(leaf),))) for path, leaf in rows.items()}
    deepest = max(shapes.values(), key=len, default=())
    count = deepest[dim] if len(deepest) > dim else None
    found: dict[str, int | None] = dict.fromkeys(leaves)
    for path, shape in shapes.items():
        found[path] = dim if len(shape) > dim and shape[dim] == count else 0
        # Of labels (samples, classes) with as many classes as samples, both dims have that extent.
        if found[path] and len(shape) < len(deepest) and shape[0] == count:
            raise DataError(
                f"{argument}: a batch holds {path} of shape {shape}, with {count} in dim 0 and in dim {dim}, so that "
                f"batch_dim={dim} does not tell where its samples lie. Say it for each leaf, in the structure of the "
                f"batch: batch_dim=({dim}, 0), or {{'inputs': {dim}, 'labels': 0}}."
            )
    return found


def _cut(leaf: Any, dim: int, start: int, stop: int) -> Any:
    if not dim or not (isinstance(leaf, torch.Tensor | np.ndarray) or objects.is_collection(leaf)):
        return batches.take_rows(leaf, start, stop)
    return leaf[(slice(None),) * dim + (slice(start, stop),)]


def hint_of(batch: Any) -> str:
    """Return what to say of a batch whose tensors disagree on dim 0, where they agree on dim 1; else nothing."""
    try:
        count = AtDim(1).count(batch)
    except DataError:
        return ""
    return f" They look time-first, with {count} in dim 1. If these are the samples, pass batch_dim=1."
