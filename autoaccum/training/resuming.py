"""What tells one run from another: its model, its options, and what people recognise a value by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoaccum.planning.schedules import Schedule

State = dict[str, Any]
"""Plain values and tensors."""

ONLY_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of optimizers that decide how a step is computed, which may depend on the device."""


def description(model: nn.Module) -> dict[str, Any]:
    """What tells one model from another: its class, the shapes and types it begins with, and what is not trained."""
    shapes = {
        name: f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    }
    buffers = {
        name: f"buffer {str(b.dtype).removeprefix('torch.')} {tuple(b.shape)}" for name, b in model.named_buffers()
    }
    return {"class": type(model).__name__, **shapes, **buffers}


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its class, and of each group how many parameters it has and what decides what they become.

    What is off is left out, for that is what options of a later PyTorch will be.
    """
    groups = {
        f"group {number}": {"parameters": len(group["params"])}
        | plain(
            {
                name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                for name, value in group.items()
                if name not in ("params", *ONLY_HOW) and value is not None and value is not False
            }
        )
        for number, group in enumerate(optimizer.param_groups)
    }
    return {"class": type(optimizer).__name__, **groups}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of them JSON can hold; of the rest a text."""
    return {
        name: value if value is None or isinstance(value, bool | int | float | str) else text_of(value)
        for name, value in values.items()
    }


def text_of(value: Any) -> str:
    """What a person recognises it by.

    >>> text_of(len), text_of((0.9, 0.999)), text_of([(3, 3, 2)]), text_of(object())
    ('len', '(0.9, 0.999)', 'list of 1', 'object')
    """
    if isinstance(value, Schedule | torch.device):
        return str(value)
    if isinstance(value, tuple | list | dict):
        if len(value) <= 8 and all(isinstance(entry, bool | int | float | str) for entry in value):
            return str(value)
        return f"{type(value).__name__} of {len(value)}"
    return str(getattr(value, "__qualname__", type(value).__name__))
