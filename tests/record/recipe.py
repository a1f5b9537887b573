"""Holds what the command line is told to train: a small net whose work takes time by the clock that is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.record.clock import work


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Take a millisecond, and half a one for each sample."""
    work(0.001 + 0.0005 * len(targets))
    return functional.cross_entropy(outputs, targets)


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return of each sample whether it was told."""
    return outputs.argmax(1) == targets


def recipe(width: int = 200) -> dict[str, Any]:
    """Return the arguments of fit."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(128, 8, generator=generator), torch.randint(0, 3, (128,), generator=generator)
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)),
        "data": (inputs[:96], targets[:96]),
        "validation_data": (inputs[96:], targets[96:]),
        "loss_fn": loss_of,
        "metrics": {"right": right},
        "device": "cpu",
        "progress": False,
        "cache": False,
    }


def broken() -> dict[str, Any]:
    """Raise, as a recipe may."""
    raise RuntimeError("nothing to train")
