"""Models that normalise: by the batch, by the sample, by weights, by statistics that they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    class_data,
    image_data,
    mlp,
)

Tensor = torch.Tensor
cases = Cases("models", "normalisation")


def with_norm(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 8), norm(), nn.Tanh(), nn.Linear(8, CLASSES))


def convolutions(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm(), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))


def flat(name: str, model: Callable[[], nn.Module], function: Any = F.cross_entropy, **options: Any) -> None:
    cases.model(name, model, class_data, function, **options)


def images(name: str, model: Callable[[], nn.Module]) -> None:
    cases.model(name, model, image_data, F.cross_entropy)


class Frozen(nn.Sequential):
    """Layers of which BatchNorm stays in eval mode, whatever is said."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        return self


class ByHand(nn.Module):
    """Normalises by a function of a micro-batch: (rows) -> rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(rows)


class Running(nn.Module):
    """Normalises by a running mean or maximum that it moves in each forward, before or after it is used."""

    def __init__(self, *, first: bool, largest: bool = False) -> None:
        super().__init__()
        self.first, self.largest = first, largest
        self.register_buffer("value", torch.ones(8))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and self.first:
            self.move(rows)
        result = rows / self.value if self.largest else rows - self.value
        if self.training and not self.first:
            self.move(rows)
        return result

    @torch.no_grad()
    def move(self, rows: Tensor) -> None:
        if self.largest:
            self.value = torch.maximum(self.value, rows.abs().amax(0))
        else:
            self.value = 0.9 * self.value + 0.1 * rows.mean(0)


class Counted(Running):
    """Keeps a running mean for evaluation alone."""

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.move(rows)
            return rows
        return rows - self.value


class Renormalised(nn.Module):
    """Batch renormalisation: by the batch's statistics, corrected to running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, rows: Tensor) -> Tensor:
        mean, deviation = rows.mean(0), rows.std(0, unbiased=False) + 1e-3
        shift = ((mean - self.mean) / deviation).detach().clamp(-0.5, 0.5)
        self.mean = (0.9 * self.mean + 0.1 * mean).detach()
        return (rows - mean) / deviation + shift


class Ghost(nn.Module):
    """BatchNorm over pairs of neighbours."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part - part.mean(0) if len(part) > 1 else part for part in rows.split(2)])


def whitened(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(0)
    covariance = centred.T @ centred / len(rows) + 0.1 * torch.eye(rows.shape[1])
    return torch.linalg.solve(torch.linalg.cholesky(covariance), centred.T).T


flat("BatchNorm1d", with_norm(lambda: nn.BatchNorm1d(8)))
flat("BatchNorm1d without statistics", with_norm(lambda: nn.BatchNorm1d(8, track_running_stats=False)))
flat("BatchNorm1d without a weight", with_norm(lambda: nn.BatchNorm1d(8, affine=False, momentum=None)))
flat(
    "BatchNorm1d in eval mode",
    lambda: Frozen(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)),
)
flat("LayerNorm", with_norm(lambda: nn.LayerNorm(8)))
flat("RMSNorm", with_norm(lambda: nn.RMSNorm(8)))
flat("GroupNorm on rows", with_norm(lambda: nn.GroupNorm(2, 8)))
images("BatchNorm2d", convolutions(lambda: nn.BatchNorm2d(4)))
images("InstanceNorm2d", convolutions(lambda: nn.InstanceNorm2d(4)))
images(
    "InstanceNorm2d with statistics", convolutions(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
)
images("GroupNorm", convolutions(lambda: nn.GroupNorm(2, 4)))
images("LocalResponseNorm", convolutions(lambda: nn.LocalResponseNorm(2)))
images("LayerNorm of maps", convolutions(lambda: nn.LayerNorm([4, 4, 4])))
images("SyncBatchNorm, one process", convolutions(lambda: nn.SyncBatchNorm(4)))
images("normalised by F.instance_norm", convolutions(lambda: ByHand(F.instance_norm)))
flat("F.batch_norm in a forward", with_norm(lambda: ByHand(lambda x: F.batch_norm(x, None, None, training=True))))
flat("standardised by hand", with_norm(lambda: ByHand(lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3))))
flat(
    "standardised by hand, detached",
    with_norm(lambda: ByHand(lambda x: (x - x.mean(0).detach()) / (x.std(0, unbiased=False).detach() + 1e-3))),
)
flat(
    "inputs standardised by the batch",
    lambda: nn.Sequential(ByHand(lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)), mlp()),
)
flat(
    "standardised over features",
    with_norm(lambda: ByHand(lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3))),
)
flat("x / x.max()", with_norm(lambda: ByHand(lambda x: x / x.abs().max())))
flat("x / x.max(1)", with_norm(lambda: ByHand(lambda x: x / x.abs().amax(1, keepdim=True))))
flat("inputs / inputs.max()", lambda: nn.Sequential(ByHand(lambda x: x / x.max()), mlp()))
flat("x / x.norm()", with_norm(lambda: ByHand(lambda x: x / x.norm())))
flat("x / x.norm(dim=1)", with_norm(lambda: ByHand(lambda x: x / x.norm(dim=1, keepdim=True))))
flat("whitened", with_norm(lambda: ByHand(whitened)))
flat("softmax over the batch in a forward", with_norm(lambda: ByHand(lambda x: x.softmax(0) * 8)))
flat("a running mean, moved before use", with_norm(lambda: Running(first=True)))
flat("a running mean, moved after use", with_norm(lambda: Running(first=False)))
flat("a running maximum, moved before use", with_norm(lambda: Running(first=True, largest=True)))
flat("a running mean for evaluation", with_norm(lambda: Counted(first=True)))
flat("batch renormalisation", with_norm(Renormalised))
flat("ghost batches of two", with_norm(Ghost))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def spectral_parametrized() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, CLASSES))


def weight_norm() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, CLASSES))


def old_weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def orthogonal() -> nn.Module:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(FEATURES, 6))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, CLASSES))


class Standardised(nn.Linear):
    """A layer whose weight is standardised."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (weight.std(1, keepdim=True) + 1e-5), self.bias)


flat("spectral norm", spectral)
flat("spectral norm, parametrized", spectral_parametrized)
flat("weight norm", weight_norm)
flat("weight norm, the old one", old_weight_norm)
flat("orthogonal weights", orthogonal)
flat("standardised weights", lambda: nn.Sequential(Standardised(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
