"""What is read off a loss's graph; that it makes windows exact is in test_laws_losses.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.step.loss_graph import graph_alone, read_reduction

torch.manual_seed(0)
OUTPUTS = torch.randn(6, 4, requires_grad=True)
TARGETS = torch.tensor([0, 1, 2, -100, 3, -100])
WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 8.0])
PARAMETER = nn.Parameter(torch.ones(3, 2))

READ: dict[str, tuple[Callable[[], torch.Tensor], str, float]] = {
    "targets that count": (lambda: F.cross_entropy(OUTPUTS, TARGETS), "mean", 4),
    "their weights": (lambda: F.cross_entropy(OUTPUTS, TARGETS, weight=WEIGHTS), "mean", 15),
    "a scaled mean": (lambda: -3 * F.cross_entropy(OUTPUTS, TARGETS).double() / 6.5, "mean", 4 * 6.5 / -3),
    "a mean over numbers": (lambda: OUTPUTS.abs().mean(), "mean", 24),
    "a mean over samples": (lambda: OUTPUTS.pow(2).sum(1).mean(), "mean", 6),
    "a mean over samples, summed": (lambda: OUTPUTS.pow(2).mean(0).sum(), "mean", 6),
    "a mask": (lambda: (OUTPUTS[:, 0] * (TARGETS >= 0)).sum() / (TARGETS >= 0).sum(), "mean", 4),
    "a mask inside": (lambda: (OUTPUTS[:, 0] / (TARGETS >= 0).sum()).sum(), "mean", 4),
    "a mean and a penalty": (lambda: F.mse_loss(OUTPUTS, WEIGHTS.expand(6, 4)) + PARAMETER.norm(), "mean", 24),
    "over samples by hand": (lambda: OUTPUTS.pow(2).sum() / 6, "mean", 6),
    "times one over them": (lambda: OUTPUTS.pow(2).sum() * (1 / 24), "mean", 24),
    "a sum": (lambda: F.cross_entropy(OUTPUTS, TARGETS, reduction="sum"), "sum", 1),
    "half a sum of means": (lambda: OUTPUTS.mean(1).sum() * 0.5, "sum", 8),
    "a mean times the samples": (lambda: OUTPUTS.mean() * 6, "mean", 4),
    "a sum over no samples": (lambda: OUTPUTS.T.reshape(8, 3)[:5].sum(), "sum", 1),
    "a root": (lambda: OUTPUTS.pow(2).mean().sqrt(), "unknown", 6),
    "one over a sum": (lambda: 1 / OUTPUTS.pow(2).sum(), "unknown", 6),
    "a product of two": (lambda: OUTPUTS.exp().mean() * OUTPUTS.exp().sum(), "unknown", 6),
}


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    make, kind, items = READ[name]
    found = read_reduction(make(), 6)
    assert {term.kind for term in found.terms} <= {kind}
    assert found.terms or kind == "mean"
    assert found.items == pytest.approx(items)


def test_terms_of_parameters_are_told_from_those_of_the_batch() -> None:
    loss = OUTPUTS.sum() + 0.1 * PARAMETER.pow(2).sum()
    found = read_reduction(loss, 6)
    assert found.is_sum
    assert found.constants == (0.1,)


def test_a_deep_sum_over_a_list_is_read() -> None:
    total = F.cross_entropy(OUTPUTS, TARGETS)
    for _ in range(5000):
        total = total + PARAMETER.sum()
    assert read_reduction(total, 6).items == 4


def test_the_graph_alone_is_enough_to_read() -> None:
    linear = nn.Linear(4, 4)
    with torch.no_grad(), graph_alone():
        loss = F.cross_entropy(linear(OUTPUTS.detach()).relu(), TARGETS, weight=WEIGHTS)
        squared = F.mse_loss(linear(OUTPUTS.detach()), torch.ones(6, 4))
    assert read_reduction(loss, 6).items == 15
    assert read_reduction(squared, 6).items == 24
    assert loss.grad_fn._saved_self.device.type == "meta"  # type: ignore[union-attr]
