"""Tells lists of samples from lists of the parts of a batch, where nobody has said which they are.

``[inputs, targets]``, as default_collate makes it, is structure: both tensors have a row for each sample. A list of
images of different sizes is a list of samples, and its tensors have a dim 0 too, their channels. Both readings are
tried. Where one alone fits the whole batch it is taken; where both do, evidence beside the shapes decides, and where
there is none nobody guesses: to cut images between their channels would train on nonsense without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches, objects
from autoaccum.errors import AmbiguousBatchError

_FEW_CHANNELS = 4
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
        if tensor.ndim == 3 and (tensor.shape[0] <= _FEW_CHANNELS or (len(node) > 2 and len(trailing) > 1)):
            return True
        # (channels, depth, height, width), while (samples, channels, height, width) has few in dim 1.
        if tensor.ndim > 3 and tensor.shape[0] <= _FEW_CHANNELS < tensor.shape[1]:
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
