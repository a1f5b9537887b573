"""Reads arrays that lie in files (of h5py, zarr, ...) by rows, as a dataset; each worker opens files of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from autoaccum.data import batches
from autoaccum.data.arrays import as_tensor
from autoaccum.data.objects import is_lazy
from autoaccum.errors import RaggedBatchError


def has_lazy(data: Any) -> bool:
    """Return whether data is an array that is read from a file, or a tuple or dict that holds one."""
    return is_lazy(data) or (isinstance(data, tuple | dict) and any(map(is_lazy, batches.flatten(data)[0])))


class LazyRows:
    """The rows of tensors and arrays, of which some lie in files, as a dataset."""

    def __init__(self, data: Any, argument: str) -> None:
        """Set up.

        Raises:
            RaggedBatchError: they have other numbers of rows.
        """
        self._leaves, self._spec = batches.flatten(data)
        paths, sizes = batches.paths(data), {}
        for path, leaf in zip(paths, self._leaves, strict=True):
            if is_lazy(leaf) or batches.has_rows(leaf):
                sizes[path] = int(leaf.shape[0]) if is_lazy(leaf) else batches.num_rows(leaf)
        if len(set(sizes.values())) > 1:
            raise RaggedBatchError(sizes, argument)
        self._are_rows = [path in sizes for path in paths]
        self._count = next(iter(sizes.values()))
        self._process = os.getpid()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if self._process != os.getpid():  # a file that is inherited is read at the place of the other process
            self._process, self._leaves = os.getpid(), [_opened(_place_of(leaf)) for leaf in self._leaves]
        parts = zip(self._leaves, self._are_rows, strict=True)
        return self._spec.unflatten([_row(leaf, index) if is_row else leaf for leaf, is_row in parts])

    def __reduce__(self) -> Any:
        # A file that is open cannot be sent to a worker.
        return _again, (self._spec.unflatten(map(_place_of, self._leaves)),)


def _again(data: Any) -> LazyRows:
    leaves, spec = batches.flatten(data)
    return LazyRows(spec.unflatten(map(_opened, leaves)), "data")


def _row(leaf: Any, index: int) -> Any:
    # One row and not a number, so that tensors are made of all types alike.
    row = batches.take_rows(leaf, index, index + 1)
    return (as_tensor(np.asarray(row)) if is_lazy(leaf) or isinstance(row, np.ndarray) else row)[0]


class _Place:
    """Where an array lies in a file that can be opened by its name."""

    def __init__(self, array: Any) -> None:
        self.opens, self.file, self.name = type(array.file), str(array.file.filename), str(array.name)


def _place_of(leaf: Any) -> Any:
    """Return where an array lies whose file has a name, as those of h5py; else itself."""
    return _Place(leaf) if is_lazy(leaf) and hasattr(getattr(leaf, "file", None), "filename") else leaf


def _opened(leaf: Any) -> Any:
    return leaf.opens(leaf.file, "r")[leaf.name] if isinstance(leaf, _Place) else leaf
