"""Count BatchNorm layers, whose outputs for a sample depend on the other samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    """List every BatchNorm layer, once."""
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())  # in order, as no set would be
    return [layer for layer in layers if isinstance(layer, _BatchNorm)]


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """Count the BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    return sum(layer.training or not layer.track_running_stats for layer in batch_norms(modules))


def smallest_micro_batch(modules: Sequence[nn.Module]) -> int:
    """Return how many samples a micro-batch needs at least: BatchNorm has no statistics of one."""
    return 2 if count_batch_norms(modules) else 1
