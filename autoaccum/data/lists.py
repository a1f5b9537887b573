"""Tells lists of samples from lists of batches, and both from the parts of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from autoaccum.data import batches, objects
from autoaccum.data.parts import parts_of
from autoaccum.errors import AmbiguousBatchError, DataError
from autoaccum.events import Notice

_LOOKED_AT = 64
"""Look at so many entries of a list, evenly spread."""
_FEW_CHANNELS = 4
"""Rows of an entry that may as well be the channels of an image, or of a wave."""


class Reading(NamedTuple):
    """What the entries of a list are."""

    are_samples: bool
    is_new: bool = False
    """Whether they could be batches too, and were once taken for them."""


class _Entry(NamedTuple):
    """What one entry shows."""

    rows: tuple[int, ...]
    """How many each part has that has any."""
    dims: tuple[int, ...]
    """How many dimensions each of these has."""
    has_single: bool
    """Whether something in it belongs to one sample, or to a whole batch: a number, a text, None."""
    is_batch: bool
    """Whether a list within it can only be one of samples, as a collate_fn leaves images of different sizes."""


def read_list(data: Sequence[Any], argument: str = "data") -> Reading:
    """Return what the entries of a list are.

    A sample has a number or a text where a batch has a row for each sample, or its parts differ in their first
    dimension, or they are all vectors. What may be either is taken for a batch: two matrices, or a matrix and a vector,
    that agree on dim 0.

    Raises:
        AmbiguousBatchError: its entries may be images, or as many samples as these have channels.
        DataError: they are the parts of one batch.
    """
    # Not all of them, for a list may have millions.
    count = min(len(data), _LOOKED_AT)
    chosen = [data[place * len(data) // count] for place in range(count)]
    _refuse_parts(chosen, argument)
    entries = [_look_at(entry) for entry in chosen]
    if any(entry.is_batch for entry in entries):
        return Reading(False)
    if any(not entry.rows for entry in entries):
        return Reading(True)
    if len(data) == 1:  # nobody has a dataset of one sample, and a batch in a list is a frequent thing
        return Reading(False)
    if any(len(set(entry.rows)) > 1 for entry in entries):
        return Reading(True)
    # Of several parts that agree a number beside them may be what is shared by a batch.
    if any(entry.has_single and len(entry.rows) == 1 for entry in entries):
        return Reading(True, is_new=True)
    if all(max(entry.dims) == 1 for entry in entries):
        return Reading(True, is_new=True)
    if _may_be_images(entries):
        raise AmbiguousBatchError(
            len(data), sum(entry.rows[0] for entry in entries), f"a list of {len(data)}", argument, _IF_LIST
        )
    return Reading(False)


_IF_LIST = (
    "DataLoader(data) if each entry is a sample, as an image is, DataLoader(data, batch_size=None) if each is a batch."
)


def notice(argument: str) -> Notice:
    """Return what is said of a list that is read as samples, and was once read as batches."""
    return Notice(
        cause="Its entries look like samples, and not like batches",
        consequence=f"The list that is passed as {argument} is read as a dataset, as a DataLoader reads it",
        cure=f"Pass DataLoader({argument}, batch_size=None) if each entry is a batch",
    )


def are_batches(entry: Any, stream: Any, argument: str) -> bool:
    """Return whether a stream, which may yield either, yields batches, as its first entry and its batch sizes tell.

    Raises:
        DataError: nothing tells.
    """
    found = _look_at(entry)
    if not found.rows or len(set(found.rows)) > 1 or found.has_single:
        return False
    rows, are_vectors = found.rows[0], max(found.dims) == 1
    # It may be, or hold, a loader that says how large its batches are.
    is_size = rows in [getattr(part, "__dict__", {}).get("batch_size") for part in parts_of(stream)]
    if found.is_batch or (is_size and not are_vectors):
        return True
    if are_vectors and not is_size:  # as the tokens of a text and its labels
        return False
    kinds = " and ".join(f"shape {tuple(np.shape(leaf))}" for leaf in batches.flatten(entry)[0][:3])
    raise DataError(
        f"{argument}: what it yields first ({kinds}) may be one sample or a batch of {rows}. If each is a batch, pass "
        f"DataLoader({argument}, batch_size=None). If each is a sample, pass DataLoader({argument}, batch_size=32); "
        f"any batch_size will do, because autoaccum splits and joins its batches."
    )


def refuse_sample(entry: Any, argument: str) -> None:
    """Raise where what should be a batch can only be a sample, or is a vector alone, which may be either.

    A sample is a vector or an image with a label beside it, or a text's words by the name that models have for them.

    Raises:
        DataError: it is one.
    """
    # As batches of numbers, vectors have several parts: users, items and ratings. One alone is seldom that.
    vector = _vector_in(entry)
    if vector is not None:
        raise DataError(
            f"{argument}: it yields vectors of {len(vector)} numbers, and each may be a sample, or a batch of as many "
            f"samples. Pass list({argument}), which is read as a dataset, if each is a sample, or an IterableDataset "
            f"where it is too long; if each is a batch, split=autoaccum.splits.tensors beside it."
        )
    parts = list(entry.values()) if isinstance(entry, Mapping) else entry
    if not isinstance(parts, list | tuple) or batches.is_leaf(entry):
        return
    rows = [part for part in parts if batches.has_rows(part)]
    singles = [part for part in parts if isinstance(part, int | float | np.generic | torch.Tensor | np.ndarray)]
    singles = [part for part in singles if not batches.has_rows(part) and not isinstance(part, bool)]
    # Vectors of other lengths are no columns of a batch, which have as many rows.
    are_vectors = len(rows) == len(parts) and all(getattr(part, "ndim", 1) == 1 for part in rows)
    if are_vectors and isinstance(entry, tuple) and len(set(map(len, rows))) > 1:
        _refuse_zipped(parts, argument)
    if len(rows) > 1 or not singles:
        return
    # A number beside rows may be one that a batch shares, such as a temperature; beside a vector, or whole and in a
    # pair, it is a label.
    is_vector = not rows or getattr(rows[0], "ndim", 1) == 1
    if is_vector or (isinstance(entry, tuple | list) and any(map(_is_whole, singles))):
        _refuse_zipped(parts, argument)


def _refuse_zipped(parts: Sequence[Any], argument: str) -> None:
    """Raise the error for samples that are iterated over.

    Raises:
        DataError: always.
    """
    shapes = ", ".join(f"shape {tuple(np.shape(part))}" if batches.has_rows(part) else "a number" for part in parts)
    raise DataError(
        f"{argument}: it yields samples ({shapes}), as zip(inputs, targets) does, and what is iterated over is to "
        f"yield batches. Pass list({argument}), which is read as a dataset, or an IterableDataset where it is too "
        f"long; if these are batches, split=autoaccum.splits.tensors beside it."
    )


_WORDS = "input_ids"
"""What a text's words are called in all of transformers, where a batch of them has two dimensions."""


def _vector_in(entry: Any) -> Any:
    """Return the vector that an entry is, or is made of alone; or the words of one text. None where it is neither."""
    if isinstance(entry, Mapping):
        only = next(iter(entry.values())) if len(entry) == 1 else entry.get(_WORDS)
    elif isinstance(entry, list | tuple) and len(entry) == 1:
        only = entry[0]
    else:
        only = entry
    if isinstance(only, torch.Tensor | np.ndarray):
        is_vector = only.ndim == 1 and getattr(getattr(only, "dtype", None), "kind", "f") in "biufc"
    else:  # lists of texts are batches of them
        is_vector = isinstance(only, list) and bool(only) and all(isinstance(one, int | float) for one in only)
    return only if is_vector else None


def _is_whole(number: Any) -> bool:
    """Return whether a number is an integer, as labels are."""
    if isinstance(number, torch.Tensor):
        return not (number.is_floating_point() or number.is_complex())
    return isinstance(number, int | np.integer) or getattr(getattr(number, "dtype", None), "kind", "") in "iu"


def _refuse_parts(chosen: Sequence[Any], argument: str) -> None:
    """Raise where a list holds tensors of other forms, as inputs and targets are."""
    if len(chosen) < 2 or not all(isinstance(entry, torch.Tensor | np.ndarray) and entry.ndim for entry in chosen):
        return
    # What a DataLoader yields is a list, which nobody means as two batches.
    if len(chosen) == 2 and len(chosen[0]) == len(chosen[1]) and min(entry.ndim for entry in chosen) > 1:
        raise DataError(
            f"{argument}: it is a list of two tensors with as many rows, as a DataLoader yields inputs and targets, "
            f"while a list is one of samples, or of batches. Pass tuple({argument}) if it is one batch, or "
            f"DataLoader({argument}, batch_size=None) if each of the two is one."
        )
    # Batches, and samples, are of one kind among themselves; tensors of one length that are not go together.
    forms = {(entry.ndim, str(entry.dtype)) for entry in chosen}
    if len(forms) > 1 and len({len(entry) for entry in chosen}) == 1:
        raise DataError(
            f"{argument}: it is a list of tensors that are not alike, as inputs and targets are, while a list is one "
            f"of samples, or of batches. Pass them as a tuple: tuple({argument})."
        )


def _look_at(entry: Any) -> _Entry:
    """Return what an entry shows."""
    rows: list[int] = []
    dims: list[int] = []
    has_single = False
    is_batch = isinstance(entry, list) and _are_samples(entry)
    pending = [entry]
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor | np.ndarray) and part.ndim:
            rows.append(len(part))
            dims.append(part.ndim)
        # Packed sequences and batches of graphs, which are batches by what they are.
        elif objects.has_samples(part):
            is_batch = True
        elif isinstance(part, Mapping):
            pending += part.values()
        elif isinstance(part, list | tuple) and part and (part is entry or not batches.is_leaf(part)):
            # Within a sample tuples are structure, and lists that hold tensors are what a batch has.
            is_batch = is_batch or (isinstance(part, list) and part is not entry)
            pending += part
        elif isinstance(part, list | tuple):
            rows.append(len(part))
            dims.append(1)
            # A list of texts has one for each sample; one of numbers may be the tokens of a text.
            is_batch = is_batch or any(isinstance(text, str | bytes) for text in part)
        else:
            # Of a sample, or shared by a batch: what stands beside it tells.
            has_single = True
    return _Entry(tuple(rows), tuple(dims), has_single, is_batch)


def _are_samples(entry: list[Any]) -> bool:
    """Return whether a list holds samples of one kind, and neither a sample's parts nor its numbers."""
    kinds = set(map(type, entry))
    # ``[inputs, targets]`` is two tensors, and ``[inputs, 3]`` a tensor and a number.
    return len(kinds) == 1 and not issubclass(kinds.pop(), torch.Tensor | np.ndarray | int | float | np.generic)


def _may_be_images(entries: Sequence[_Entry]) -> bool:
    """Return whether all that the entries hold are images, or batches of as few samples as these have channels."""
    # Of one size of batches alone: where it differs from entry to entry, it is no number of channels.
    kinds = {(dim, rows) for entry in entries for dim, rows in zip(entry.dims, entry.rows, strict=True)}
    return len(entries) > 1 and len(kinds) == 1 and all(dim == 3 and rows <= _FEW_CHANNELS for dim, rows in kinds)


_MOST_CHANNELS = 4
"""Channels of an image, or of a wave: a dim 0 up to this may well be one of them."""

_BY_SPLIT = (
    "split=autoaccum.splits.samples if a list has one entry for each sample, split=autoaccum.splits.tensors if tensors "
    "have one row for each."
)


def columns(batch: Any, *, is_said: bool, unpacked: int = 0) -> list[Any]:
    """Return the lists and tuples of a batch that would hold one entry for each sample.

    Args:
        batch: any pytree.
        is_said: whether the user says that it holds samples; else a tuple at the top is parts, as ``(inputs, targets)``
            is, and so is what a model is called with.
        unpacked: levels of the batch whose entries are arguments of a model or a loss: 0, 1 for the batch itself, 2
            for its first entry too.
    """
    found: list[Any] = []

    def walk(node: Any, depth: int, is_argument: bool) -> None:
        """Look through a node; ``is_argument`` tells that its entries are arguments if it is a list."""
        if isinstance(node, Mapping) and not objects.has_samples(node):
            for entry in node.values():
                walk(entry, depth + 1, False)
        elif not isinstance(node, list | tuple) or not node or objects.is_packed(node):
            return
        elif hasattr(node, "_fields") or is_argument or (depth == 0 and _is_of_parts(node, is_said)):
            for index, entry in enumerate(node):
                walk(entry, depth + 1, depth + 1 < unpacked and index == 0)
        else:
            found.append(node)

    walk(batch, 0, unpacked > 0)
    return found


def _is_of_parts(node: Sequence[Any], is_said: bool) -> bool:
    """Return whether a list or tuple at the top of a batch holds its parts, and not its samples."""
    are_lists = all(isinstance(entry, list | tuple) for entry in node)
    # What a user writes and what default_collate makes is ``(inputs, targets)``; nobody makes a tuple of samples but
    # with zip, which makes one of lists or tuples.
    if isinstance(node, tuple):  # ``tuple(zip(*samples))`` is one of lists
        kinds = {_kind(entry) if isinstance(entry, torch.Tensor | np.ndarray) else type(entry) for entry in node}
        return not is_said or are_lists or len(kinds) > 1
    if are_lists and is_said:
        # Samples are of one kind among themselves. ``list(zip(*samples))`` is a list of columns, which are not.
        lengths = {len(entry) for entry in node}
        return len(set(map(_kind, node))) > 1 and len(lengths) == 1 and all(map(_is_uniform, node))
    return not is_said and not _is_uniform(node)


def _is_uniform(node: Sequence[Any]) -> bool:
    """Return whether the entries of a list are of one kind, as samples are."""
    return len(set(map(_kind, node))) == 1


def _kind(entry: Any) -> Any:
    """Return what samples of one data set have in common: types, dimensions, names; not sizes."""
    if isinstance(entry, torch.Tensor | np.ndarray):
        return type(entry).__name__, entry.ndim, str(entry.dtype)
    # Names and what they stand for, for a sample may have as many boxes as it likes, but no other entries.
    if isinstance(entry, Mapping):
        return "mapping", tuple(sorted((str(key), _kind(value)) for key, value in entry.items()))
    if isinstance(entry, tuple):
        return "tuple", tuple(map(_kind, entry))
    if isinstance(entry, list):  # of which a sample may have any number, as of its images
        return "list", frozenset(map(_kind, entry))
    if isinstance(entry, bool | int | float | np.generic):
        return "number"
    return type(entry).__name__


def is_leaf_of(held: Sequence[Any]) -> batches.IsLeaf:
    """Return the ``is_leaf`` by which these lists of a batch are leaves: each has one entry for a sample."""
    # By identity, for lists that are equal may stand at several places, and tensors have an == of their own.
    ids = {id(node) for node in held}
    return lambda node: id(node) in ids or batches.is_leaf(node)


def holds_samples(batch: Any, argument: str = "data", unpacked: int = 0, known: int | None = None) -> bool | None:
    """Return whether the lists of a batch hold samples; None where there are none that could.

    Args:
        batch: any pytree.
        argument: what errors call it.
        unpacked: as in ``columns``.
        known: how many samples there are, where that is known.

    Raises:
        AmbiguousBatchError: they may, or may not.
    """
    held = columns(batch, is_said=False, unpacked=unpacked)
    # Lists of texts, numbers or objects are cut by their entries in any case: only those of tensors may be parts.
    doubtful = [node for node in held if not batches.is_leaf(node)]
    if not doubtful:
        return None
    as_parts = {*batches.sizes_of(batch, argument).values()}
    as_samples = batches.sizes_of(batch, argument, is_leaf_of(held))
    beside = _tensors_beside(batch, held)
    parts_fit = len(as_parts) == 1 and known in (None, *as_parts)
    samples_fit = (
        len({*as_samples.values()}) == 1
        and known in (None, *as_samples.values())
        and all(map(_is_uniform, doubtful))
        and not (beside and any(map(_may_be_state, doubtful)))
    )
    if not (parts_fit and samples_fit):
        return samples_fit
    # What is collated has no numbers left: one beside tensors is a sample's label.
    if all(map(_have_numbers, doubtful)):
        return True
    # Where neither a number nor anything beside the lists tells, the shapes say whether a mistake is likely.
    if known is None and any(map(_may_hold_samples, doubtful)):
        counts = next(iter(as_samples.values())), next(iter(as_parts))
        raise AmbiguousBatchError(*counts, _describe(doubtful), argument, _BY_SPLIT)
    return False


def _tensors_beside(batch: Any, held: Sequence[Any]) -> bool:
    """Return whether a batch has tensors with rows outside of those lists."""
    leaves, _ = batches.flatten(batch, is_leaf_of(held))
    return any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves)


def _may_be_state(node: Sequence[Any]) -> bool:
    """Return whether a tuple may be the hidden state (h, c) of an LSTM: two tensors of one shape (layers, B, H)."""
    if not isinstance(node, tuple) or len(node) != 2 or not all(isinstance(entry, torch.Tensor) for entry in node):
        return False
    return bool(node[0].shape == node[1].shape and node[0].ndim == 3)


def _have_numbers(node: Sequence[Any]) -> bool:
    """Return whether the entries of a list hold numbers beside tensors, as a sample that is not collated does."""
    if not isinstance(node[0], Mapping | tuple):
        return False
    leaves, _ = batches.flatten(list(node))
    return any(isinstance(leaf, int | float | torch.Tensor) and not getattr(leaf, "ndim", 0) for leaf in leaves)


def _may_hold_samples(node: Sequence[Any]) -> bool:
    """Return whether a list whose tensors agree on dim 0 may hold samples all the same.

    Vectors and matrices that agree on dim 0 are rows of a batch, as of ``[inputs, targets]``: samples of one length
    would have been stacked. Of images it is the channels that agree, whatever their sizes.
    """
    tensors = [leaf for leaf in batches.flatten(list(node))[0] if isinstance(leaf, torch.Tensor | np.ndarray)]
    if any(isinstance(entry, Mapping) for entry in node):  # as a tokenizer makes of each text
        return True
    # Sizes of images, which differ from one to the next where those of a batch's parts seldom do.
    trailing = {tuple(tensor.shape[1:]) for tensor in tensors}
    for tensor in tensors:
        if tensor.ndim == 3 and (tensor.shape[0] <= _MOST_CHANNELS or (len(node) > 2 and len(trailing) > 1)):
            return True
        # (channels, depth, height, width), while (samples, channels, height, width) has few in dim 1.
        if tensor.ndim > 3 and tensor.shape[0] <= _MOST_CHANNELS < tensor.shape[1]:
            return True
    return False


def _describe(doubtful: Sequence[Any]) -> str:
    """Say in a few words what a list holds."""
    node = doubtful[0]
    entry = node[0]
    shapes = ", ".join(str(tuple(part.shape)) for part in node[:3] if isinstance(part, torch.Tensor | np.ndarray))
    inner = f"of shapes {shapes}{', ...' * (len(node) > 3)}" if shapes else f"of {type(entry).__name__}"
    return f"a {type(node).__name__} of {len(node)} {inner}"


def unpacked_levels(loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None) -> int:
    """Return how many levels of a batch are arguments of a model or a loss, and so no samples: see ``columns``."""
    if training_step is not None:
        return 0
    return 1 if loss_fn is None else 2
