"""``convert_batch_norm``: layers without statistics of a batch in place of those that have them."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from autoaccum._checks import one_of
from autoaccum.errors import ArgumentError, ArgumentTypeError

MOST_GROUPS = 32
"""Groups of channels at most: the number that Wu and He, "Group Normalization" (2018), found the best."""
FEWEST_CHANNELS = 2
"""Channels of a group at least: of one number alone, as a channel of (samples, channels) is, nothing would be left."""

M = TypeVar("M", bound=nn.Module)


def convert_batch_norm(model: M, to: Literal["group", "layer"] = "group") -> M:
    """Replace the BatchNorm layers of a model, so that no sample depends on those beside it.

    Each becomes a ``GroupNorm`` over channels, (samples, channels, ...) as before, with the same weight and bias, which
    are the same ``Parameter`` objects, and the same eps. Running statistics are dropped: what the model computes
    changes, in evaluation too, so that it is best done before training. Layers of all dims are replaced, subclasses and
    SyncBatchNorm among them.

    Args:
        model: what is converted, in place.
        to: group: at most 32 groups of channels, of two channels at least (Wu and He, 2018); layer: one group of all
            channels.

    Returns:
        The model; where it is a BatchNorm layer itself, the layer that takes its place.

    Raises:
        ArgumentError: there is no BatchNorm in it; or one that cannot be replaced, for it has no shapes yet, has hooks,
            or is compiled or scripted. Nothing is replaced then.

    >>> model = convert_batch_norm(nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64)))
    >>> type(model[1]).__name__, model[1].num_groups
    ('GroupNorm', 32)
    """
    one_of("to", to, ("group", "layer"))
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", model, "an nn.Module")
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in model.modules()) or hasattr(model, "_orig_mod"):
        raise ArgumentError("model", type(model).__name__, "a model that is neither scripted nor compiled")
    # All of them are made before any is put in its place: what fails leaves the model as it was.
    replaced = {layer: _replacement(layer, to) for layer in model.modules() if isinstance(layer, _BatchNorm)}
    if not replaced:
        raise ArgumentError("model", type(model).__name__, "a model with BatchNorm layers", "There is nothing to do.")
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):  # one that stands in two places becomes one layer in both
                parent._modules[name] = replaced[child]
    return replaced[model] if isinstance(model, _BatchNorm) else model  # type: ignore[return-value]


def _replacement(layer: _BatchNorm, to: str) -> nn.GroupNorm:
    """Return what takes a layer's place.

    Raises:
        ArgumentError: nothing does.
    """
    kind = type(layer).__name__
    if any(is_lazy(held) for held in (*layer.parameters(), *layer.buffers())):
        raise ArgumentError("model", kind, "layers that have their shapes", "Run a forward first, which builds it.")
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        raise ArgumentError(
            "model", kind, "layers without hooks", "They would be lost: remove them, and add them after."
        )
    channels = layer.num_features
    groups = 1 if to == "layer" else _groups(channels)
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=False)
    # The same objects, for an optimizer may hold them.
    made.affine, made.weight, made.bias = layer.affine, layer.weight, layer.bias
    return made.train(layer.training)


def _groups(channels: int) -> int:
    """Return how many groups the channels make: as many as divide them, within the bounds above.

    >>> [_groups(channels) for channels in (1, 4, 7, 64, 66, 96, 2048)]
    [1, 2, 1, 32, 22, 32, 32]
    """
    fitting = [n for n in range(1, MOST_GROUPS + 1) if channels % n == 0 and channels // n >= FEWEST_CHANNELS]
    return max(fitting, default=1)
