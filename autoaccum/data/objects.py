"""Counts, cuts, joins and copies batches that are one object: packed sequences, batches of graphs, TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from autoaccum.data import graphs


def is_packed(leaf: object) -> bool:
    """Return whether something is a packed sequence, as ``pack_sequence`` makes it."""
    return isinstance(leaf, PackedSequence)


def is_collection(leaf: object) -> bool:
    """Return whether something holds tensors with rows in common and has rows itself, such as a TensorDict."""
    size = getattr(leaf, "batch_size", None)
    is_other = not isinstance(leaf, torch.Tensor) and hasattr(type(leaf), "__torch_function__")
    return isinstance(size, torch.Size) and len(size) > 0 and is_other


def has_samples(leaf: object) -> bool:
    """Return whether something is an object that holds samples."""
    return is_packed(leaf) or is_collection(leaf) or graphs.is_graphs(leaf)


def count(leaf: Any) -> int:
    """Count the samples in such an object."""
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])  # of the first step, which every sequence has
    if is_collection(leaf):
        return int(leaf.batch_size[0])
    return int(leaf.num_graphs)


def cut(leaf: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of such an object, in the order in which they were put into it."""
    if start == 0 and stop >= count(leaf):  # nothing is rebuilt that is not split
        return leaf
    # A packed sequence holds first steps, then second steps, sorted by length: samples are apart only when it is padded
    # again, and then in the order in which they were given.
    if is_packed(leaf):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        return _packed(padded[start:stop], lengths[start:stop], like=leaf)
    return leaf[start:stop] if is_collection(leaf) else graphs.cut(leaf, start, stop)


def join(parts: Sequence[Any]) -> Any:
    """Join such objects, one after the other."""
    if not is_packed(parts[0]):
        return torch.cat(list(parts)) if is_collection(parts[0]) else graphs.join(parts)
    unpacked = [pad_packed_sequence(part, batch_first=True) for part in parts]
    # Each was padded to its own longest sequence; what is added is left out again when they are packed.
    longest = max(padded.shape[1] for padded, _ in unpacked)
    rows = []
    for padded, _ in unpacked:
        missing = padded.new_zeros(padded.shape[0], longest - padded.shape[1], *padded.shape[2:])
        rows.append(torch.cat([padded, missing], dim=1))
    return _packed(torch.cat(rows), torch.cat([lengths for _, lengths in unpacked]), like=parts[0])


def _packed(padded: torch.Tensor, lengths: torch.Tensor, like: PackedSequence) -> PackedSequence:
    """Pack sequences again; without indices where those of ``like`` came sorted, and these still are."""
    # Sequences that were packed with the same lengths, inputs and targets say, are sorted into the same order again.
    is_sorted = like.sorted_indices is None and bool((lengths[:-1] >= lengths[1:]).all())
    padded = padded[:, : int(lengths.max())] if len(lengths) else padded
    return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=is_sorted)


def is_lazy(leaf: object) -> bool:
    """Return whether something is an array that is read when it is sliced, such as one of h5py or zarr."""
    is_other = isinstance(leaf, torch.Tensor | np.ndarray | np.generic) or is_collection(leaf)
    if is_other or not hasattr(type(leaf), "__getitem__") or hasattr(leaf, "to_numpy"):  # a column of a table
        return False
    shape = getattr(leaf, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(leaf, "dtype")


def can_move(leaf: object) -> bool:
    """Return whether something that is no tensor moves itself to a device."""
    return callable(getattr(leaf, "to", None)) and not isinstance(leaf, type | nn.Module | torch.Tensor)


def moved(leaf: Any, device: torch.device, *, copy: bool) -> Any:
    """Return such an object on a device; with ``copy`` another one, whose edits do not reach the original."""
    if copy:
        leaf = _copied(leaf)
    return leaf.to(device)


def _copied(leaf: Any) -> Any:
    """Return a copy of an object with all the tensors in it; the object itself where it does not bear to be copied."""
    if is_packed(leaf):
        parts: Any = [None if part is None else part.clone() for part in leaf]
        return PackedSequence(*parts)
    # Its own clone first, which knows what belongs to it: a deep copy may take along what it only refers to.
    if callable(getattr(leaf, "clone", None)):
        return leaf.clone()
    try:
        return deepcopy(leaf)
    except TypeError:
        return leaf
    except RuntimeError as error:
        # Of a tensor with a graph; any other one may be memory that ran out.
        if "deepcopy" not in str(error):
            raise
        return leaf


def mapped(leaf: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of such an object with what a function makes of its tensors; itself where it has no ``apply``."""
    if is_packed(leaf):
        return leaf._replace(data=function(leaf.data))
    # That of PyTorch Geometric changes the object itself, that of a TensorDict makes another one.
    return leaf.clone().apply(function) if callable(getattr(leaf, "apply", None)) else leaf


def tensors(leaf: Any) -> list[torch.Tensor]:
    """Return the tensors that a leaf of a batch is, or holds as far as they can be seen."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if is_packed(leaf):
        return [leaf.data]
    # PyTorch Geometric keeps them in stores of its own, which this lists; a collection is known to torch's pytree.
    if is_collection(leaf):
        held = leaf
    else:
        held = leaf.to_dict() if callable(getattr(leaf, "to_dict", None)) else getattr(leaf, "__dict__", {})
    return [value for value in pytree.tree_leaves(held) if isinstance(value, torch.Tensor)]
