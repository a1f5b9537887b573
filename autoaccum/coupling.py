"""What couples the samples of a batch, so that cutting a window changes what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.events import Notice
from autoaccum.reductions import only_parameters


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    layers = {module for root in modules for module in root.modules() if isinstance(module, _BatchNorm)}
    return sum(layer.training or not layer.track_running_stats for layer in layers)


def smallest_micro_batch(modules: Sequence[nn.Module]) -> int:
    """Samples that a micro-batch needs at least: BatchNorm has no statistics of one."""
    return 2 if count_batch_norms(modules) else 1


def batch_norm_notices(modules: Sequence[nn.Module]) -> list[Notice]:
    """What to say when windows of a model with BatchNorm are cut."""
    layers = count_batch_norms(modules)
    notice = Notice(
        cause=f"The model holds {layers} BatchNorm layer{'s' if layers > 1 else ''} in training mode",
        consequence="Each normalises by the statistics of a micro-batch instead of the window, so that the gradient "
        "depends on how windows are cut",
        cure="Use GroupNorm or LayerNorm, put the BatchNorm layers in eval mode, or give windows the memory to be one "
        "micro-batch",
    )
    return [notice] if layers else []


DEPTH = 60
"""Operations back from the loss among which a comparison of samples is looked for: it is one of the last."""


def couples_samples(loss: torch.Tensor, num_samples: int) -> bool:
    """Whether a loss compares the samples of a micro-batch with each other, as contrastive losses do.

    That is a product (samples, features) x (features, samples) of two tensors neither of which is made of parameters
    alone, or a distance between all pairs. To be asked before the backward.
    """
    seen: set[Any] = set()
    queue = [loss.grad_fn]
    while queue and len(seen) < DEPTH:
        node: Any = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if _compares(node, num_samples):
            return True
        queue.extend(child for child, _ in node.next_functions)
    return False


def _compares(node: Any, num_samples: int) -> bool:
    name = node.name()
    if name == "MmBackward0":
        if any(_is_weight(factor) for factor in (node._saved_self, node._saved_mat2)):
            return False
        rows, columns = node._saved_self_sym_sizes[0], node._saved_mat2_sym_sizes[1]
    elif name == "BmmBackward0":  # einsum's way of multiplying two matrices
        first, second = node._saved_self, node._saved_mat2
        if first is None or second is None or len(first) != 1:
            return False
        rows, columns = first.shape[1], second.shape[2]
    elif name == "CdistBackward0":
        rows, columns = node._saved_x1.shape[-2], node._saved_x2.shape[-2]
    else:
        return False
    # Two views of each sample, or several negatives for each, make multiples.
    if rows % num_samples or columns % num_samples or max(rows, columns) > 4 * num_samples:
        return False
    factors = [child for child, _ in node.next_functions[:2]]
    if None in factors:  # one side needs no gradient, as a frozen encoder's outputs
        return bool(rows == columns)
    return not any(only_parameters(factor) for factor in factors)


def _is_weight(factor: torch.Tensor | None) -> bool:
    """Whether it is a parameter, or a view of one such as its transpose."""
    return factor is not None and isinstance(factor if factor._base is None else factor._base, nn.Parameter)


def coupling_notice() -> Notice:
    """What to say when windows are cut whose loss compares samples with each other."""
    return Notice(
        cause="The loss compares the samples of a batch with each other, as contrastive losses do",
        consequence="Each sample meets those of its micro-batch only, instead of all in the window: fewer negatives, "
        "another loss",
        cure="Give windows the memory to be one micro-batch, or compare with samples that do not come from the batch, "
        "such as a queue of past ones",
    )
