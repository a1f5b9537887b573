"""Models, data and comparisons that several tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoaccum.training.trainer import FitResult


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Eight inputs, three classes; no randomness, no buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def wide(width: int = 1000) -> nn.Module:
    """Activations, ``width`` floats a sample and layer, that fill a small device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def noisy(seed: int = 0) -> nn.Module:
    """Everything that a replay has to put back: dropout's random states and BatchNorm's buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.Dropout(0.3),
        nn.Linear(16, 3),
    )


def classes(num_samples: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_samples, 8) inputs and (num_samples,) targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 8, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (num_samples,), generator=generator)


def state_of(result: FitResult) -> list[Any]:
    """Everything that training leaves: parameters, buffers, optimizer state, the losses, the random states."""
    optimizer = [
        entry
        for state in result.optimizer.state.values()
        for entry in state.values()
        if isinstance(entry, torch.Tensor)
    ]
    return [
        *(p.detach().cpu().clone() for p in result.model.parameters()),
        *(b.cpu().clone() for b in result.model.buffers()),
        *(entry.cpu().clone() for entry in optimizer),
        torch.tensor([report.loss for report in result.history], dtype=torch.float64),
        torch.default_generator.get_state(),
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(first) == len(second) and all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, wherever they lie."""
    found, expected = found.cpu(), expected.cpu()
    return float((found - expected).norm() / expected.norm())
