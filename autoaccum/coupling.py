"""What couples the samples of a batch, so that cutting a window changes what is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.events import Notice


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
