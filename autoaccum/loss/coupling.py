"""What couples the samples of a batch, so that cutting a window changes what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.loss.graph import is_linear_operation, only_parameters, operation_of, signed
from autoaccum.memory.oom import is_out_of_memory


def batch_norms(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    """Every BatchNorm layer, once."""
    return [m for m in dict.fromkeys(m for root in modules for m in root.modules()) if isinstance(m, _BatchNorm)]


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    return sum(layer.training or not layer.track_running_stats for layer in batch_norms(modules))


def smallest_micro_batch(modules: Sequence[nn.Module]) -> int:
    """Samples that a micro-batch needs at least: BatchNorm has no statistics of one."""
    return 2 if count_batch_norms(modules) else 1


def is_compiled(model: object) -> bool:
    """Whether every size of its micro-batches may be compiled for."""
    return hasattr(model, "_orig_mod")


DEPTH = 200
"""Operations back from the loss among which those across samples are looked for."""

Crossing = tuple[str, float, float, bool, int]
"""An operation across samples: its name, the extents of what it makes as multiples of the samples, whether one size of
micro-batches is enough to tell (a dimension may be as long as a micro-batch by chance, but not as long as two), and its
place in the graph."""


def crossings(loss: torch.Tensor, num_samples: int) -> set[Crossing]:
    """The operations by which a loss lets samples of a micro-batch meet, as far as its graph shows.

    Products and distances of all with all, and what reduces, normalises or moves along the samples anywhere but in the
    sums and means that make the loss. To be asked before the backward.
    """
    found: set[Crossing] = set()
    seen: set[Any] = set()
    queue: list[tuple[Any, bool]] = [(loss.grad_fn, True)]
    while queue and len(seen) < DEPTH:
        node, is_linear = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            found |= {(*crossing, len(seen)) for crossing in _crossing(node, num_samples, is_linear)}
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            continue  # what it saved is gone or was written to: the backward will say so
        is_linear = is_linear and is_linear_operation(node)
        queue.extend((child, is_linear) for child, _ in node.next_functions)
    return found


def couples_samples(seen: Sequence[tuple[int, set[Crossing]]]) -> bool:
    """Whether operations across samples were found in all micro-batches alike; each comes with its size.

    One sample meets nobody: micro-batches of one are asked only when there are no larger ones.
    """
    several = [(size, found) for size, found in seen if size > 1] or list(seen)
    if not several:
        return False
    common = set.intersection(*(found for _, found in several))
    return any(is_certain or len({size for size, _ in several}) > 1 for *_, is_certain, _ in common)


def _crossing(node: Any, num_samples: int, is_linear: bool) -> set[tuple[str, float, float, bool]]:
    operation = operation_of(node)
    if operation in ("Addmm", "Bmm", "Cdist", "EuclideanDist", "Mm", "Pdist"):
        return _all_with_all(node, operation, num_samples)
    if num_samples == 1:
        return set()
    if operation in ("Flip", "Roll"):  # the shape is not saved: taken for samples, which are the first dimension
        return {(operation, 1.0, 0.0, True)} if 0 in node._saved_dims else set()
    shape = _shape(node)
    found: set[tuple[str, float, float, bool]] = set()
    if len(shape) > 1 and shape[0] == shape[1] == num_samples:  # all beside all, as broadcasting has it
        found.add((f"{operation} of pairs", 1.0, 1.0, False))
    if not shape or operation not in _ALONG or (is_linear and operation in ("Mean", "Sum")):
        return found
    dimensions = getattr(node, "_saved_dim", None)
    if isinstance(dimensions, int):
        dimensions = (dimensions,)
    along = range(len(shape)) if dimensions is None else [signed(d) % len(shape) for d in dimensions]
    if shape[0] == num_samples and 0 in along:
        found.add((operation, 1.0, 0.0, True))
    return found


_ALONG = {"Amax", "Amin", "Cumsum", "LinalgVectorNorm", "LogSoftmax", "Logcumsumexp", "Logsumexp", "Max", "Mean"}
_ALONG |= {"Median", "Min", "Norm", "Prod", "Softmax", "Sort", "Std", "StdMean", "Sum", "Topk", "Var", "VarMean"}


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that a node saved; None where a hook would have to bring it back, as checkpointing does by computing."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or raw.unpack_hook is not None:
        return None
    saved = getattr(node, f"_saved_{name}")
    return saved if isinstance(saved, torch.Tensor) else None


def _shape(node: Any) -> tuple[int, ...]:
    """Of a node's input, or of its output where only that was saved and is as large."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(sizes)
    for name in ("self", "result", "output"):
        if (saved := _saved(node, name)) is not None:
            return tuple(saved.shape)
    return ()


def _all_with_all(node: Any, operation: str, num_samples: int) -> set[tuple[str, float, float, bool]]:
    """Products of two tensors neither of which is a weight, and distances."""
    inner = 0
    factors = node.next_functions[:2]
    if operation in ("Addmm", "Mm"):
        first = "mat1" if operation == "Addmm" else "self"
        if any(_is_weight(_saved(node, name)) for name in (first, "mat2")):
            return set()
        rows, inner = getattr(node, f"_saved_{first}_sym_sizes")
        columns = node._saved_mat2_sym_sizes[1]
        factors = node.next_functions[-2:]
    elif operation == "Bmm":  # einsum's way of multiplying two matrices
        left, right = _saved(node, "self"), _saved(node, "mat2")
        if left is None or right is None or len(left) != 1:
            return set()
        rows, inner, columns = *left.shape[1:], right.shape[2]
    elif operation == "Pdist":
        saved = _saved(node, "self")
        rows = columns = 0 if saved is None else len(saved)
    else:
        left, right = _saved(node, "x1"), _saved(node, "x2")
        if left is None or right is None:
            return set()
        rows, columns = left.shape[-2], right.shape[-2]
    if any(child is not None and only_parameters(child) for child, _ in factors):
        return set()
    found = set()
    if inner == num_samples > 1:  # a correlation of features, over the samples
        found.add((operation, 0.0, 1.0, True))
    # Two views of each sample, or several negatives for each, make multiples. One side may need no gradient.
    if rows and not rows % num_samples and not columns % num_samples and (num_samples > 1 or rows == columns == 1):
        found.add((operation, rows / num_samples, columns / num_samples, bool(rows == columns)))
    return found


def _is_weight(factor: torch.Tensor | None) -> bool:
    """Whether it is a parameter, or a view of one such as its transpose."""
    return factor is not None and isinstance(factor if factor._base is None else factor._base, nn.Parameter)
