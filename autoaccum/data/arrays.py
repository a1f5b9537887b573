"""Makes tensors of NumPy arrays, as default_collate does."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches, objects


def as_tensor(array: np.ndarray) -> Any:
    """Return an array as a tensor that shares its memory where it can; one of texts as a list of them.

    Raises:
        TypeError: PyTorch has no tensors of the array's type; its text lists the types.
    """
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and array.ndim == 1 and all(isinstance(entry, str) for entry in array)):
        return array.tolist()
    # A copy, in the order of bytes, and of rows, that tensors have. Others share their memory, which may be a file's.
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    # Files that are mapped are read-only. Rows are copied before anything is computed with them.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def is_plain(batch: Any) -> bool:
    """Return whether a batch is a tuple, a list or a dict of tensors and of nothing else, as nearly every one is."""
    if isinstance(batch, Mapping):
        return not objects.has_samples(batch) and all(type(entry) is torch.Tensor for entry in batch.values())
    return isinstance(batch, tuple | list) and all(type(entry) is torch.Tensor for entry in batch)


def opened(data: Any) -> Any:
    """Return a dict of the arrays of a file or a group in it, of ``np.load`` too; data itself where it is none."""
    if isinstance(data, torch.Tensor | np.ndarray | dict | list) or objects.has_samples(data):
        return data
    if type(data) is tuple:
        entries = tuple(map(opened, data))
        return data if all(map(operator.is_, entries, data)) else entries
    if not (callable(getattr(data, "keys", None)) and hasattr(type(data), "__getitem__")):
        return data
    # What is no file is a mapping of another kind, such as a tokenizer's; an .npz reads an entry whenever it is asked.
    found = {name: opened(data[name]) for name in data.keys()}  # noqa: SIM118
    is_file = callable(getattr(data, "close", None)) or any(map(objects.is_lazy, found.values()))
    are_arrays = all(objects.is_lazy(entry) or isinstance(entry, np.ndarray | dict) for entry in found.values())
    return found if is_file and are_arrays and found else data


def converted(batch: Any) -> Any:
    """Return a batch with tensors in the place of its arrays; the batch itself where it has none."""
    if is_plain(batch):  # there are windows of 100 µs
        return batch
    batch = opened(batch)
    leaves, spec = batches.flatten(batch)
    if not any(isinstance(leaf, np.ndarray) or objects.is_lazy(leaf) for leaf in leaves):
        return batch
    # 0-dim ones are numbers that belong to the whole batch, and stay what they are.
    made = []
    for leaf in leaves:
        leaf = np.asarray(leaf[:]) if objects.is_lazy(leaf) else leaf
        made.append(as_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf)
    return spec.unflatten(made)
