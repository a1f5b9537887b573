"""What couples the samples of a batch, so that cutting a window changes what is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.events import Notice


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """BatchNorm layers in training mode: each normalises a sample by the statistics of those beside it."""
    return sum(isinstance(module, _BatchNorm) and module.training for root in modules for module in root.modules())


def smallest_micro_batch(modules: Sequence[nn.Module]) -> int:
    """Samples that a micro-batch needs at least: BatchNorm has no statistics of one."""
    return 2 if count_batch_norms(modules) else 1


def batch_norm_notice(layers: int) -> Notice:
    """What to say when windows of a model with so many BatchNorm layers are cut."""
    return Notice(
        cause=f"The model holds {layers} BatchNorm layer{'s' if layers > 1 else ''} in training mode",
        consequence="Each normalises by the statistics of a micro-batch instead of the window, so that the gradient "
        "depends on how windows are cut",
        cure="Use GroupNorm or LayerNorm, put the BatchNorm layers in eval mode, or give windows the memory to be one "
        "micro-batch",
    )
