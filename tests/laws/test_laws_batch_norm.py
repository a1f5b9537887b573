"""Law 1 for BatchNorm that is not joined: a micro-batch of a fixed size is a group with statistics of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum


def drawn(seed: int, *shape: int, below: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if below is not None:
        return torch.randint(below, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


IMAGES = drawn(0, 300, 2, 7, 7), drawn(1, 300, below=3)


class ByGroups(nn.Module):
    """Ghost batch normalisation by its formulas, for the whole window at once: what results are compared with."""

    def __init__(self, like: Any, group: int) -> None:
        super().__init__()
        self.like, self.group = like, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bounds = list(range(0, len(x), self.group))
        if len(x) % self.group == 1 and len(x) > 1:
            bounds.pop()  # one sample joins the group before
        outputs = []
        for start, stop in zip(bounds, [*bounds[1:], len(x)], strict=True):
            rows = x[start:stop]
            over = [dim for dim in range(x.ndim) if dim != 1]
            shape = [1, -1] + [1] * (x.ndim - 2)
            mean, var = rows.mean(over), rows.var(over, unbiased=False)
            normalised = (rows - mean.view(shape)) / (var.view(shape) + self.like.eps).sqrt()
            if self.like.affine:
                normalised = normalised * self.like.weight.view(shape) + self.like.bias.view(shape)
            outputs.append(normalised)
            if self.like.track_running_stats:
                self.like.num_batches_tracked += 1
                factor = self.like.momentum or 1 / int(self.like.num_batches_tracked)
                count = rows.numel() / rows.shape[1]
                with torch.no_grad():
                    self.like.running_mean.lerp_(mean, factor)
                    self.like.running_var.lerp_(var * count / (count - 1), factor)
        return torch.cat(outputs)


def convolutions(dropout: float = 0.0) -> nn.Sequential:
    """Every kind of layer: with and without parameters, statistics, a momentum."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(36, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        nn.Tanh(),
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 3),
    ).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(model: nn.Module, **options: Any) -> autoaccum.FitResult:
    return autoaccum.fit(
        model, IMAGES, loss_fn=cross_entropy, optimizer=sgd, epochs=2, shuffle=False, device="cpu", progress=False,
        cache=False, accumulate="weighted", **options,
    )  # fmt: skip


def apart(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of any parameter, statistic or count."""
    states = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    return max(float((value - other).abs().max()) for (_, value), other in states)


def by_hand(model: nn.Sequential, group: int, effective_batch: int, epochs: int) -> nn.Sequential:
    """Train with the formulas above, on whole windows, in an order that nobody shuffles."""
    whole = nn.Sequential(*(ByGroups(m, group) if isinstance(m, nn.modules.batchnorm._BatchNorm) else m for m in model))
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(IMAGES[0]), effective_batch):
            inputs, targets = (tensor[start : start + effective_batch] for tensor in IMAGES)
            optimizer.zero_grad()
            cross_entropy(whole(inputs), targets).backward()
            optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
@pytest.mark.parametrize("effective_batch", [48, 24])
def test_micro_batches_of_a_fixed_size_are_ghost_batch_normalisation(effective_batch: int) -> None:
    expected = by_hand(convolutions(), 12, effective_batch, 2)
    model = convolutions()
    result = fit(model, effective_batch=effective_batch, micro_batch=12)
    assert apart(model, expected) < 1e-12
    assert {size for report in result.history for size in report.micro_batches} == {12}


@pytest.mark.parametrize("micro_batch", [1, 7, 50])
def test_layers_in_eval_mode_normalise_by_running_statistics_and_still_train(micro_batch: int) -> None:
    def frozen() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)
        ).double()
        model[1].running_mean.uniform_(-1, 1)
        model[1].eval()
        return model

    model, expected = frozen(), frozen()
    fit(model, effective_batch=50, micro_batch=micro_batch)
    fit(expected, effective_batch=50, micro_batch=50)
    assert apart(model, expected) < 1e-12
    assert not model[1].weight.equal(frozen()[1].weight)
    assert model[1].running_mean.equal(frozen()[1].running_mean)
