"""Cuts, joins and moves batches: any pytree, of which what has one row per sample is cut and the rest goes along.

Rows: tensors and arrays with at least one dimension (dim 0 is the sample), lists that hold no tensor or tuples of texts
(captions, file names), packed sequences and batches of graphs. Everything else (numbers, texts, None, 0-dim tensors)
belongs to the whole batch.

A list that holds tensors is structure here, as in what default_collate makes of pairs. Whether it is a list of samples
is for ``lists`` to tell, by whose word its lists are leaves: that is what ``is_leaf`` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from autoaccum.data import graphs, objects
from autoaccum.errors import DataError, RaggedBatchError
from autoaccum.memory.oom import is_out_of_memory


def has_rows(leaf: object) -> bool:
    """Return whether a leaf has one row per sample."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, list | tuple) or objects.has_samples(leaf)


def num_rows(leaf: Any) -> int:
    """Count the rows of a leaf that has some."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return len(leaf)
    # By their own counts first, and not by a length that stands for something else.
    # A packed sequence is a tuple too, and a batch of graphs has the length it likes.
    return objects.count(leaf) if objects.has_samples(leaf) else len(leaf)


IsLeaf = Callable[[Any], bool]
"""(node) -> whether torch's pytree is to stop there"""


def is_leaf(node: object) -> bool:
    """Return whether torch's pytree is to stop at a node; teach it, on the way, mappings and dataclasses."""
    if isinstance(node, list):
        # A list of texts or numbers has one for each sample; one that holds tensors holds several parts of a batch.
        # By the types in it, of which there are few: it may be a column of data, with millions of entries.
        kinds = set(map(type, node))
        return not any(issubclass(kind, _MAY_HOLD) for kind in kinds) or not any(map(_holds_tensors, node))
    # A named tuple, whose parts have a row for each step and not for each sample.
    if type(node) is PackedSequence:
        return True
    if type(node) is tuple:  # what default_collate makes of texts; subclasses are named tuples, which are structure
        return bool(node) and all(isinstance(item, str | bytes) for item in node)
    if isinstance(node, torch.Tensor):
        return False
    if objects.has_samples(node) or objects.is_lazy(node):
        return True
    # Else it would be one leaf without rows, and go along whole with every micro-batch.
    if isinstance(node, Mapping) and type(node) not in pytree.SUPPORTED_NODES:
        _register(type(node))
    # As Lightning moves them to a device, field by field; a class that is registered knows better.
    if is_dataclass(node) and not isinstance(node, type) and type(node) not in pytree.SUPPORTED_NODES:
        _register_dataclass(type(node))
    return False


_BY_ROWS = is_leaf


def _are_plain(batch: Any) -> bool:
    """Return whether a batch is a tuple of plain tensors with rows, as most are: these need no walk through a tree."""
    if type(batch) is not tuple or not batch:
        return False
    for part in batch:
        if type(part) is not torch.Tensor or part.layout is not torch.strided or not part.ndim:
            return False
    return True


_MAY_HOLD = (list, tuple, torch.Tensor, np.ndarray, Mapping)
"""Types of entries that have rows of their own, or may hold some that do."""


def _holds_tensors(item: object) -> bool:
    """Return whether an entry of a list has rows of its own, so that the list is structure and not rows."""
    if isinstance(item, list | tuple):
        return any(map(_holds_tensors, item))
    return isinstance(item, torch.Tensor | np.ndarray | Mapping)


def leaves_by_path(batch: Any, is_leaf: IsLeaf = is_leaf) -> dict[str, Any]:
    """Return the leaves of a batch by where they are, such as ``['x'][0]``."""
    try:
        found = pytree.tree_flatten_with_path(batch, is_leaf=is_leaf)[0]
    except ValueError:  # a type that was registered without a function for paths
        return {f"leaf {index}": leaf for index, leaf in enumerate(flatten(batch, is_leaf)[0])}
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


def _register_dataclass(cls: type[Any]) -> None:
    """Teach torch's pytree a dataclass, whose fields are parts of a batch."""
    names = [field.name for field in fields(cls)]

    def made(values: Any, _: Any) -> Any:
        # Without its __init__, which may check what a part of a batch is not, or take other arguments.
        found = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(found, name, value)  # of a frozen one too
        return found

    pytree.register_pytree_node(
        cls,
        lambda node: ([getattr(node, name) for name in names], None),
        made,
        flatten_with_keys_fn=lambda node: ([(pytree.GetAttrKey(name), getattr(node, name)) for name in names], None),
    )


def flatten(batch: Any, is_leaf: IsLeaf = is_leaf) -> tuple[list[Any], pytree.TreeSpec]:
    """Split a batch into its leaves and its structure; a list without tensors is one leaf."""
    return pytree.tree_flatten(batch, is_leaf=is_leaf)


def leaves_within(batch: Any) -> list[Any]:
    """Return the leaves of a batch; of an object that holds samples, such as a batch of graphs, its tensors."""
    leaves = flatten(batch)[0]
    return [one for leaf in leaves for one in (objects.tensors(leaf) if objects.has_samples(leaf) else (leaf,))]


def paths(batch: Any) -> list[str]:
    """Return where the leaves of a batch are, in the order of ``flatten``."""
    return list(leaves_by_path(batch))


def _map_rows(function: Callable[[Any], Any], batch: Any, is_leaf: IsLeaf) -> Any:
    """Apply a function to all leaves that have rows."""
    leaves, spec = flatten(batch, is_leaf)
    return spec.unflatten([function(leaf) if has_rows(leaf) else leaf for leaf in leaves])


def num_samples(batch: Any, argument: str = "data", is_leaf: IsLeaf = is_leaf) -> int:
    """Count the samples in a batch: the length on which all that has rows agrees.

    Args:
        batch: any pytree.
        argument: what errors call it.
        is_leaf: tells where to stop.

    Raises:
        RaggedBatchError: they do not agree.
        DataError: there is nothing with rows in it.
    """
    sizes = sizes_of(batch, argument, is_leaf)
    if not sizes:
        raise DataError(
            f"{argument}: a batch of type {type(batch).__name__} holds no tensor with a dim 0, so it has no samples. "
            f"Let the data yield tensors, or a collate_fn make them; or say how it is cut: split=(batch, start, size) "
            f"-> micro-batch, or one of autoaccum.splits."
        )
    if len(set(sizes.values())) > 1:
        raise RaggedBatchError(sizes, argument)
    return next(iter(sizes.values()))


def sizes_of(batch: Any, argument: str = "data", is_leaf: IsLeaf = is_leaf) -> dict[str, int]:
    """Return how many rows each leaf has that has some, by where it is.

    Raises:
        DataError: it holds tensors that have no numbers or no rows.
    """
    try:
        leaves = leaves_by_path(batch, is_leaf)
    except RecursionError:
        raise DataError(f"{argument}: a batch is nested too deeply, or holds itself. Let it be tensors.") from None
    for where, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.is_nested):
            what = "is on the meta device, which holds no numbers" if leaf.is_meta else "is nested, and has no rows"
            raise DataError(f"{argument}: the tensor {where or 'itself'} of a batch {what}. Pass plain tensors.")
    return {where: num_rows(leaf) for where, leaf in leaves.items() if has_rows(leaf)}


def take(batch: Any, start: int, stop: int, is_leaf: IsLeaf = is_leaf) -> Any:
    """Take samples ``start`` to ``stop`` of a batch: tensors are views."""
    if is_leaf is _BY_ROWS and _are_plain(batch):
        return tuple([rows[start:stop] for rows in batch])
    return _map_rows(lambda rows: take_rows(rows, start, stop), batch, is_leaf)


def take_rows(rows: Any, start: int, stop: int) -> Any:
    """Take some rows of one leaf."""
    if isinstance(rows, torch.Tensor):
        if rows.layout is not torch.strided:  # a sparse one has no slices
            return rows.index_select(0, torch.arange(start, min(stop, len(rows)), device=rows.device))
        if not has_attributes(rows):
            return rows[start:stop]
        return _like(rows[start:stop], rows, lambda attribute: _of_rows(attribute, len(rows), start, stop))
    if objects.has_samples(rows):
        return _by_itself(rows, "split", lambda: objects.cut(rows, start, stop))
    return rows[start:stop]


def _by_itself(leaf: Any, what: str, function: Callable[[], Any]) -> Any:
    """Return what a function makes of an object that holds samples.

    Raises:
        DataError: it cannot, as where a batch of graphs does not give them.
    """
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cure = graphs.cure(leaf) if graphs.is_graphs(leaf) else "Say how: split=(batch, start, size) -> micro-batch."
        name = type(leaf).__name__
        raise DataError(f"data: a batch of the class {name} cannot be {what}: {error}. {cure}") from error


def has_attributes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that says what its operations return, and may hold more than numbers."""
    cls = type(tensor)
    return cls is not torch.Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


def _like(made: torch.Tensor, tensor: torch.Tensor, part: Callable[[Any], Any]) -> torch.Tensor:
    """Return a tensor as one of another's class, with the attributes that an operation has not handed on.

    Args:
        made: what the operation returned.
        tensor: what it was computed from.
        part: (attribute of the tensor) -> what is to be that of the other.
    """
    if type(made) is not type(tensor):
        made = made.as_subclass(type(tensor))
    # What a class hands on itself, as MONAI's does with a slice, it knows better.
    for name in vars(tensor).keys() - vars(made).keys():
        vars(made)[name] = part(vars(tensor)[name])
    return made


def _of_rows(attribute: Any, count: int, start: int, stop: int) -> Any:
    """Return what some rows of a tensor have of its attribute; all of what has no entry for each of its rows."""

    def cut(leaf: Any) -> Any:
        return take_rows(leaf, start, stop) if num_rows(leaf) == count else leaf

    return _map_rows(cut, attribute, is_leaf)


def _join_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors in dim 0, with their attributes."""
    made = torch.cat(list(parts))
    if not has_attributes(parts[0]):
        return made
    made = _like(made, parts[0], lambda attribute: attribute)

    def join(path: str, leaves: Sequence[Any]) -> Any:
        are_rows = all(has_rows(leaf) and num_rows(leaf) == len(part) for leaf, part in zip(leaves, parts, strict=True))
        return join_rows(path, leaves) if are_rows else the_same(path, leaves)

    # Those of the first alone, as classes hand them on, are not those of all.
    for name, attribute in joined_by([vars(part) for part in parts], is_leaf, join).items():
        vars(made)[name] = attribute
    return made


def pick(rows: Any, indices: torch.Tensor, dim: int = 0) -> Any:
    """Copy the rows of one leaf at those indices."""
    if isinstance(rows, torch.Tensor) and (dim or not has_attributes(rows)):
        return rows.index_select(dim, indices)
    if objects.is_collection(rows):
        return rows[(slice(None),) * dim + (indices,)]
    if objects.has_samples(rows) or isinstance(rows, torch.Tensor):
        # Classes that hand on the attributes of a tensor row by row do so with slices alone.
        return join_rows("", [take_rows(rows, index, index + 1) for index in indices.tolist()])
    return type(rows)([rows[index] for index in indices.tolist()])


def concat(batches: Sequence[Any], is_leaf: IsLeaf = is_leaf) -> Any:
    """Join batches, one after the other: leaves by where they are, whatever order the keys of a dict are in.

    Raises:
        DataError: they differ in structure, in a dimension other than dim 0, or in what belongs to a whole batch.
    """
    if len(batches) == 1:
        return batches[0]
    return joined_by(batches, is_leaf, join_rows)


def joined_by(batches: Sequence[Any], is_leaf: IsLeaf, join: Callable[[str, Sequence[Any]], Any]) -> Any:
    """Join batches leaf by leaf.

    Args:
        batches: some, one after the other.
        is_leaf: tells where to stop.
        join: (where the leaf is, the leaves there) -> one leaf.

    Raises:
        DataError: they differ in structure, or the leaves cannot be joined.
    """
    # By paths, for two dicts of one batch need not have their keys in one order, in which flatten() lists the leaves.
    by_path = [leaves_by_path(batch, is_leaf) for batch in batches]
    first = by_path[0]
    for other in by_path[1:]:
        if other.keys() != first.keys():
            raise _not_joinable(f"they hold {sorted(first)} and {sorted(other)}")
    try:
        joined = [join(path, [leaves[path] for leaves in by_path]) for path in first]
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):  # a RuntimeError too, which a smaller micro-batch cures
            raise
        raise _not_joinable(str(error)) from error
    return flatten(batches[0], is_leaf)[1].unflatten(joined)


def join_rows(path: str, parts: Sequence[Any]) -> Any:
    """Join the leaves that stand at one place of several batches; what has no rows must be the same in all of them."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return _join_tensors(parts)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(list(parts))
    if objects.has_samples(first):
        return _by_itself(first, "joined", lambda: objects.join(parts))
    if isinstance(first, list | tuple):
        return type(first)([item for part in parts for item in part])
    return the_same(path, parts)


def the_same(path: str, parts: Sequence[Any]) -> Any:
    """Return what belongs to a whole batch, and stands in each of several.

    Raises:
        ValueError: it is not the same in all of them.
    """
    first = parts[0]
    # Only NaN differs from itself: one beside another is no difference.
    if any(part is not first and bool(part != first) and bool(part == part) for part in parts[1:]):
        raise ValueError(f"{path} belongs to a whole batch, and is {first!r} in one of them and other in the next")
    return first


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


def _not_joinable(reason: str) -> DataError:
    return DataError(
        f"data: batches that follow each other cannot be joined into one window ({reason}). Let the data yield batches "
        f"of one shape, or pass a Dataset and a collate_fn, which is then called on the samples of each micro-batch."
    )


class SaidSplit:
    """What cuts batches as the user has said."""

    is_said = True

    def known(self, batch: Any, count: int) -> Any:
        """Return what cuts a batch that is known to hold ``count`` samples: this."""
        return self


def to_device(batch: Any, device: torch.device, *, copy: bool, lasting: bool = False) -> Any:
    """Move a batch's tensors to a device, through pinned memory where that lets the copy overlap with computing.

    Args:
        batch: any pytree.
        device: where to.
        copy: also copy what is there already, so that in-place edits do not reach the original.
        lasting: whether nobody writes to what of it is pinned, ever.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _moved(leaf, device, copy=copy, lasting=lasting)
        if objects.can_move(leaf):  # a batch of graphs, say
            return objects.moved(leaf, device, copy=copy)
        # As a list of graphs, which is one leaf: each of its entries moves itself.
        if isinstance(leaf, list | tuple) and any(map(_can_move, set(map(type, leaf)))):
            return type(leaf)([move(entry) for entry in leaf])
        return leaf.copy() if copy and isinstance(leaf, list | np.ndarray) else leaf

    if _are_plain(batch):
        return tuple([_moved(part, device, copy=copy, lasting=lasting) for part in batch])
    leaves, spec = flatten(batch)
    return spec.unflatten([move(leaf) for leaf in leaves])


def _moved(tensor: torch.Tensor, device: torch.device, *, copy: bool, lasting: bool) -> torch.Tensor:
    """Move a tensor with its attributes; return before it has arrived only where that is safe."""
    if type(tensor) is not torch.Tensor and has_attributes(tensor):
        there = tensor.to(device, copy=copy)
        return _like(there, tensor, lambda attribute: to_device(attribute, device, copy=copy))
    # A copy to the host could be read too early. MPS may read a source that was freed meanwhile (pytorch#189690).
    if tensor.device.type != "cpu" or device.type in ("cpu", "mps"):
        return tensor.to(device, copy=copy)
    # From memory that may be swapped out the driver copies by way of a buffer of its own, and the CPU waits for it.
    # PyTorch keeps pinned memory until it was read, but its owner may write to it as soon as the step is over.
    if tensor.layout is not torch.strided:
        tensor = tensor.pin_memory()
    elif not (lasting and tensor.is_pinned()):
        # Dense, which ``pin_memory`` is not: it would fail on rows that share their memory, as expand() makes them.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True, copy=copy)


def _can_move(kind: type) -> bool:
    """Return whether the objects of a class move themselves: by classes, for a list may have millions of entries."""
    return callable(getattr(kind, "to", None))


def num_bytes(batch: Any) -> int:
    """Count the bytes of a batch's tensors and arrays."""
    return sum(map(_num_bytes, flatten(batch)[0]))


def _num_bytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_coo:  # which does not know its own
        return leaf._values().nbytes + leaf._indices().nbytes
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, list) and any(map(_can_move, set(map(type, leaf)))):
        return sum(map(_num_bytes, leaf))
    return sum(map(_num_bytes, objects.tensors(leaf))) if objects.can_move(leaf) else 0
