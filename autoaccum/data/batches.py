"""Cuts, joins and moves batches: any pytree, of which what has one row per sample is cut and the rest goes along.

Rows: tensors and arrays with at least one dimension (dim 0 is the sample), and lists that hold no tensor or tuples of
texts (captions, file names). Everything else (numbers, texts, None, 0-dim tensors) belongs to the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autoaccum.errors import DataError, RaggedBatchError
from autoaccum.memory.oom import is_out_of_memory


def has_rows(leaf: object) -> bool:
    """Return whether a leaf has one row per sample."""
    return (isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0) or isinstance(leaf, list | tuple)


def _is_leaf(node: object) -> bool:
    """Return whether torch's pytree is to stop at a node; teach it, on the way, the mappings it does not know."""
    if isinstance(node, list):
        # A list of texts or numbers has one for each sample; one that holds tensors holds several parts of a batch.
        # By the types in it, of which there are few: it may be a column of data, with millions of entries.
        kinds = set(map(type, node))
        return not any(issubclass(kind, _MAY_HOLD) for kind in kinds) or not any(map(_holds_tensors, node))
    if type(node) is tuple:  # what default_collate makes of texts; subclasses are named tuples, which are structure
        return bool(node) and all(isinstance(item, str | bytes) for item in node)
    # Else it would be one leaf without rows, and go along whole with every micro-batch.
    if isinstance(node, Mapping) and type(node) not in pytree.SUPPORTED_NODES:
        _register(type(node))
    return False


_MAY_HOLD = (list, tuple, torch.Tensor, np.ndarray, Mapping)
"""Types of entries that have rows of their own, or may hold some that do."""


def _holds_tensors(item: object) -> bool:
    """Return whether an entry of a list has rows of its own, so that the list is structure and not rows."""
    if isinstance(item, list | tuple):
        return any(map(_holds_tensors, item))
    return isinstance(item, torch.Tensor | np.ndarray | Mapping)


def _leaves_by_path(batch: Any) -> dict[str, Any]:
    """Return the leaves of a batch by where they are, such as ``['x'][0]``."""
    try:
        found = pytree.tree_flatten_with_path(batch, is_leaf=_is_leaf)[0]
    except ValueError:  # a type that was registered without a function for paths
        return {f"leaf {index}": leaf for index, leaf in enumerate(flatten(batch)[0])}
    return {pytree.keystr(path): leaf for path, leaf in found}


def _register(cls: type[Any]) -> None:
    """Teach torch's pytree a Mapping it does not know, such as the batches of Hugging Face tokenizers."""
    pytree.register_pytree_node(
        cls,
        lambda node: (list(node.values()), list(node.keys())),
        lambda values, keys: cls(dict(zip(keys, values, strict=True))),
        flatten_with_keys_fn=lambda node: (
            [(pytree.MappingKey(key), value) for key, value in node.items()],
            list(node.keys()),
        ),
    )


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Split a batch into its leaves and its structure; a list without tensors is one leaf."""
    return pytree.tree_flatten(batch, is_leaf=_is_leaf)


def paths(batch: Any) -> list[str]:
    """Return where the leaves of a batch are, in the order of ``flatten``."""
    return list(_leaves_by_path(batch))


def _map_rows(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to all leaves that have rows."""
    leaves, spec = flatten(batch)
    return spec.unflatten([function(leaf) if has_rows(leaf) else leaf for leaf in leaves])


def num_samples(batch: Any, argument: str = "data") -> int:
    """Count the samples in a batch: the length on which all that has rows agrees.

    Args:
        batch: any pytree.
        argument: what errors call it.

    Raises:
        RaggedBatchError: they do not agree.
        DataError: there is nothing with rows in it.
    """
    try:
        leaves = _leaves_by_path(batch)
    except RecursionError:
        raise DataError(f"{argument}: a batch is nested too deeply, or holds itself. Let it be tensors.") from None
    for where, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.is_nested):
            what = "is on the meta device, which holds no numbers" if leaf.is_meta else "is nested, and has no rows"
            raise DataError(f"{argument}: the tensor {where or 'itself'} of a batch {what}. Pass plain tensors.")
    sizes = {where: len(leaf) for where, leaf in leaves.items() if has_rows(leaf)}
    if not sizes:
        raise DataError(
            f"{argument}: a batch of type {type(batch).__name__} holds no tensor with a dim 0, so it has no samples. "
            f"Let the data yield tensors, or a collate_fn make them."
        )
    if len(set(sizes.values())) > 1:
        raise RaggedBatchError(sizes, argument)
    return next(iter(sizes.values()))


def take(batch: Any, start: int, stop: int) -> Any:
    """Take samples ``start`` to ``stop`` of a batch: tensors are views."""
    return _map_rows(lambda rows: _stretch(rows, start, stop), batch)


def _stretch(rows: Any, start: int, stop: int) -> Any:
    if isinstance(rows, torch.Tensor) and rows.layout is not torch.strided:  # a sparse one has no slices
        return rows.index_select(0, torch.arange(start, min(stop, len(rows)), device=rows.device))
    return rows[start:stop]


def concat(batches: Sequence[Any]) -> Any:
    """Join batches, one after the other: leaves by where they are, whatever order the keys of a dict are in.

    Raises:
        DataError: they differ in structure, in a dimension other than dim 0, or in what belongs to a whole batch.
    """
    if len(batches) == 1:
        return batches[0]
    # By paths, for two dicts of one batch need not have their keys in one order, in which flatten() lists the leaves.
    by_path = [_leaves_by_path(batch) for batch in batches]
    first = by_path[0]
    for other in by_path[1:]:
        if other.keys() != first.keys():
            raise _not_joinable(f"they hold {sorted(first)} and {sorted(other)}")
    try:
        joined = [_join(path, [leaves[path] for leaves in by_path]) for path in first]
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):  # a RuntimeError too, which a smaller micro-batch cures
            raise
        raise _not_joinable(str(error)) from error
    return flatten(batches[0])[1].unflatten(joined)


def _join(path: str, parts: Sequence[Any]) -> Any:
    """Join the leaves that stand at one place of several batches; what has no rows must be the same in all of them."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(list(parts))
    if isinstance(first, list | tuple):
        return type(first)([item for part in parts for item in part])
    # Only NaN differs from itself: one beside another is no difference.
    if any(part is not first and bool(part != first) and bool(part == part) for part in parts[1:]):
        raise ValueError(f"{path} belongs to a whole batch, and is {first!r} in one of them and other in the next")
    return first


def _not_joinable(reason: str) -> DataError:
    return DataError(
        f"data: batches that follow each other cannot be joined into one window ({reason}). Let the data yield batches "
        f"of one shape, or pass a Dataset and a collate_fn, which is then called on the samples of each micro-batch."
    )


def to_device(batch: Any, device: torch.device, *, copy: bool) -> Any:
    """Move a batch's tensors to a device, through pinned memory where that lets the copy overlap with computing.

    Args:
        batch: any pytree.
        device: where to.
        copy: also copy what is there already, so that in-place edits do not reach the original.
    """
    # From memory that may be swapped out the driver copies by way of a buffer of its own, and the CPU waits for it.
    overlap = device.type != "cpu"

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            # What a DataLoader with workers sends is pinned already, by a thread of its own.
            if overlap and leaf.device.type == "cpu" and not leaf.is_pinned():
                leaf = leaf.pin_memory()
            return leaf.to(device, non_blocking=True, copy=copy)
        return leaf.copy() if copy and isinstance(leaf, list | np.ndarray) else leaf

    leaves, spec = flatten(batch)
    return spec.unflatten([move(leaf) for leaf in leaves])


def num_bytes(batch: Any) -> int:
    """Count the bytes of a batch's tensors and arrays."""
    return sum(map(_num_bytes, flatten(batch)[0]))


def _num_bytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_coo:  # which does not know its own
        return leaf._values().nbytes + leaf._indices().nbytes
    return leaf.nbytes if isinstance(leaf, torch.Tensor | np.ndarray) else 0
