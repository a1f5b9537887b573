"""Laws 1 to 3 where memory is saved on a device: what is elsewhere for a while changes no bit, whatever fails."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import NothingFitsError
from autoaccum.events import MemorySaving, OutOfMemory, Planned, Recomputed
from autoaccum.training.trainer import FitResult
from autoaccum.window.saving import MEASURED
from tests import standin
from tests.devices import DEVICE
from tests.faults import strides
from tests.models import same, state_of

pytestmark = [pytest.mark.gpu]

LENGTH, WIDTH = 16384, 64
"""A tensor of these takes 4 MiB."""
MIB = 2**20
BOTH = ["checkpoint", "offload"]
ALL = "checkpoint, model.blocks"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + F.dropout(self.down(torch.tanh(F.gelu(self.up(x)))), 0.1)


class Stack(nn.Module):
    """Blocks whose insides are saved, and a weight of 32 MiB, of which a corner is used."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(2048, 4096) / 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.wide[:WIDTH, :WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def data(num_samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randn(num_samples, LENGTH, 1, generator=generator)


def fit(optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **options: Any) -> FitResult:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "effective_batch": 2, "micro_batch": 1, "steps": 3, "loss_fn": F.mse_loss, "optimizer": optimizer,
        "headroom": 0.0, "patience": 0, "verify": False, **options,
    }  # fmt: skip
    return autoaccum.fit(Stack(), data(), progress=False, cache=False, **given)


def peak(found: FitResult) -> int:
    return max(report.peak_bytes for report in found.history)


def of(result: Any, kind: type) -> list[Any]:
    return [event for event in result.events if isinstance(event, kind)]


@cache
def unlimited(optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, mode: Any = "off") -> FitResult:
    return fit(optimizer, memory_saving=mode if isinstance(mode, str) else list(mode))


@cache
def needed(mode: Any) -> int:
    return peak(unlimited(sgd, mode))


def test_show() -> None:
    for optimizer in (sgd, momentum):
        for mode in ("off", "checkpoint", "offload", tuple(BOTH)):
            found = unlimited(optimizer, mode)
            print(optimizer.__name__, mode, [r.peak_bytes // MIB for r in found.history], of(found, MemorySaving), of(found, Recomputed))
            assert same(state_of(found), state_of(unlimited(optimizer)))
