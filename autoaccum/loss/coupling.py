"""Finds what couples the samples of a batch, so that cutting a window changes what is computed.

Two things do: layers that normalise by the statistics of a batch, which are found by their class, and losses that
compare samples with each other, which are found by the operations in their graph. The second is a guess, for a graph
does not name its dimensions: one that is as long as the micro-batch is taken for the samples, and only what all
micro-batches of a window show alike is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.loss.graph import is_linear_operation, is_parameter, only_parameters, operation_of, signed
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.granules import MICRO, Statistics


def batch_norms(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    """List every BatchNorm layer, once."""
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())  # in order, as no set would be
    return [layer for layer in layers if isinstance(layer, _BatchNorm)]


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """Count the BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    return sum(layer.training or not layer.track_running_stats for layer in batch_norms(modules))


def smallest_micro_batch(modules: Sequence[nn.Module], statistics: Statistics = MICRO) -> int:
    """Return how many samples a micro-batch needs at least: BatchNorm has no statistics of one."""
    if statistics != MICRO:
        return statistics.group  # of running statistics none, so that one sample will do
    return 2 if count_batch_norms(modules) else 1


DEPTH = 200
"""Look for operations across samples among so many, from the loss back."""

# Operations that reduce or normalise along a dimension, or order what is along it.
_ALONG_A_DIMENSION = {"Amax", "Amin", "Cumsum", "LinalgVectorNorm", "LogSoftmax", "Logcumsumexp", "Logsumexp", "Max"}
_ALONG_A_DIMENSION |= {"Mean", "Median", "Min", "Norm", "Prod", "Softmax", "Sort", "Std", "StdMean", "Sum", "Topk"}
_ALONG_A_DIMENSION |= {"Var", "VarMean"}


class Crossing(NamedTuple):
    """An operation across samples; the same one in the graphs of two micro-batches is equal, whatever their sizes."""

    operation: str
    """Its name."""
    rows: float
    """The first extent of what it makes, as a multiple of the samples."""
    columns: float
    """The second one; 0 where there is none."""
    is_certain: bool
    """Whether one size of micro-batches is enough to tell: a dimension may be as long as a micro-batch by chance, but
    not as long as two."""
    place: int = 0
    """How many nodes had been visited when it was met, from the loss on."""


def crossings(loss: torch.Tensor, num_samples: int) -> set[Crossing]:
    """Find the operations by which a loss lets samples of a micro-batch meet, as far as its graph shows.

    They are products and distances of all with all, and what reduces, normalises or moves along the samples anywhere
    but in the sums and means that make the loss. To be called before the backward, which frees what nodes saved.
    """
    found: set[Crossing] = set()
    seen: set[Any] = set()
    # Breadth first, for what lets samples meet stands near the loss, and a model may be of any depth. Each node comes
    # with whether all is linear from it to the loss: there a sum over the samples is what every loss has.
    queue: list[tuple[Any, bool]] = [(loss.grad_fn, True)]
    while queue and len(seen) < DEPTH:
        node, is_linear = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            found |= {crossing._replace(place=len(seen)) for crossing in _crossings_of(node, num_samples, is_linear)}
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            continue  # what it saved is gone or was written to: the backward will say so
        is_linear = is_linear and is_linear_operation(node)
        queue.extend((child, is_linear) for child, _ in node.next_functions)
    return found


def couples_samples(seen: Sequence[tuple[int, set[Crossing]]]) -> bool:
    """Return whether operations across samples were found in all micro-batches alike.

    Args:
        seen: (samples, operations) of each micro-batch. One sample meets nobody: micro-batches of one are asked only
            when there are no larger ones.
    """
    several = [(size, found) for size, found in seen if size > 1] or list(seen)
    if not several:
        return False
    common = set.intersection(*(found for _, found in several))
    sizes = {size for size, _ in several}
    return any(crossing.is_certain or len(sizes) > 1 for crossing in common)


def _crossings_of(node: Any, num_samples: int, is_linear: bool) -> set[Crossing]:
    """Find how one node lets samples meet; ``is_linear`` where only sums and means lie between it and the loss."""
    operation = operation_of(node)
    if operation in ("Addmm", "Bmm", "Cdist", "EuclideanDist", "Mm", "Pdist"):
        return _all_with_all(node, operation, num_samples)
    if num_samples == 1:
        return set()
    if operation in ("Flip", "Roll"):  # the shape is not saved: taken for samples, which are the first dimension
        return {Crossing(operation, 1.0, 0.0, True)} if 0 in node._saved_dims else set()
    shape = _shape(node)
    found: set[Crossing] = set()
    if len(shape) > 1 and shape[0] == shape[1] == num_samples:
        # All beside all, as x[:, None] - x[None] makes. But as many features as samples would have the same shape.
        found.add(Crossing(f"{operation} of pairs", 1.0, 1.0, False))
    if not shape or operation not in _ALONG_A_DIMENSION or (is_linear and operation in ("Mean", "Sum")):
        return found
    dimensions = getattr(node, "_saved_dim", None)
    if isinstance(dimensions, int):
        dimensions = (dimensions,)
    along = range(len(shape)) if dimensions is None else [signed(d) % len(shape) for d in dimensions]  # None: all
    if shape[0] == num_samples and 0 in along:
        found.add(Crossing(operation, 1.0, 0.0, True))
    return found


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that a node saved; None where a hook would have to bring it back."""
    # Checkpointing brings a tensor back by computing its block again, and from the host it is copied, which costs more
    # than this is worth. Hooks of our own put what stays where it is in the first place: see ``window.offloading``.
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or (raw.unpack_hook is not None and not _is_kept(raw.data)):
        return None
    saved = getattr(node, f"_saved_{name}")
    return saved if isinstance(saved, torch.Tensor) else None


def _is_kept(packed: object) -> bool:
    return isinstance(packed, tuple) and isinstance(packed[0], torch.Tensor)


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's input, or of its output where only that was saved and is as large."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(sizes)
    for name in ("self", "result", "output"):
        if (saved := _saved(node, name)) is not None:
            return tuple(saved.shape)
    return ()


def _all_with_all(node: Any, operation: str, num_samples: int) -> set[Crossing]:
    """Find how a product of two tensors, neither of which is a weight, or a distance lets samples meet."""
    inner = 0  # the extent that a product sums over; a distance has none
    factors = node.next_functions[:2]
    if operation in ("Addmm", "Mm"):
        first = "mat1" if operation == "Addmm" else "self"
        if any(_is_weight(_saved(node, name)) for name in (first, "mat2")):
            return set()  # a linear layer
        rows, inner = getattr(node, f"_saved_{first}_sym_sizes")
        columns = node._saved_mat2_sym_sizes[1]
        factors = node.next_functions[-2:]  # behind the bias of Addmm
    elif operation == "Bmm":  # einsum's way of multiplying two matrices
        left, right = _saved(node, "self"), _saved(node, "mat2")
        if left is None or right is None or len(left) != 1:
            return set()  # a batch of several products is one for each sample, or head
        rows, inner, columns = *left.shape[1:], right.shape[2]
    elif operation == "Pdist":  # of all rows of one tensor with each other
        saved = _saved(node, "self")
        rows = columns = 0 if saved is None else len(saved)
    else:
        left, right = _saved(node, "x1"), _saved(node, "x2")
        if left is None or right is None:
            return set()
        rows, columns = left.shape[-2], right.shape[-2]
    if any(child is not None and only_parameters(child) for child, _ in factors):
        return set()  # a weight that was computed, as by a parametrisation
    found = set()
    if inner == num_samples > 1:  # a correlation of features, over the samples
        found.add(Crossing(operation, 0.0, 1.0, True))
    # Two views of each sample, or several negatives for each, make multiples. One side may need no gradient.
    if rows and not rows % num_samples and not columns % num_samples and (num_samples > 1 or rows == columns == 1):
        found.add(Crossing(operation, rows / num_samples, columns / num_samples, bool(rows == columns)))
    return found


def _is_weight(factor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a parameter, or a view of one such as its transpose."""
    if factor is None:
        return False
    return is_parameter(factor if factor._base is None else factor._base)
