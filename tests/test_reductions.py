"""What is read off a loss's graph; that it makes windows exact is in test_laws_losses.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.reductions import Reduction, Term, doubt, graph_alone, only_parameters, read

torch.manual_seed(0)
OUTPUTS = torch.randn(6, 4, requires_grad=True)
TARGETS = torch.tensor([0, 1, 2, -100, 3, -100])
WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 8.0])
PARAMETER = nn.Parameter(torch.ones(3, 2))

READ: dict[str, tuple[Callable[[], torch.Tensor], str, float]] = {
    "targets that count": (lambda: F.cross_entropy(OUTPUTS, TARGETS), "mean", 4),
    "their weights": (lambda: F.cross_entropy(OUTPUTS, TARGETS, weight=WEIGHTS), "mean", 15),
    "a scaled mean": (lambda: -3 * F.cross_entropy(OUTPUTS, TARGETS).double() / 7, "mean", 4),
    "a mean over numbers": (lambda: OUTPUTS.abs().mean(), "mean", 24),
    "a mean over samples": (lambda: OUTPUTS.pow(2).sum(1).mean(), "mean", 6),
    "a mean over samples, summed": (lambda: OUTPUTS.pow(2).mean(0).sum(), "mean", 6),
    "a mask": (lambda: (OUTPUTS[:, 0] * (TARGETS >= 0)).sum() / (TARGETS >= 0).sum(), "mean", 4),
    "a mean and a penalty": (lambda: F.mse_loss(OUTPUTS, WEIGHTS.expand(6, 4)) + PARAMETER.norm(), "mean", 24),
    "a sum": (lambda: F.cross_entropy(OUTPUTS, TARGETS, reduction="sum"), "sum", 6),
    "a sum of means": (lambda: OUTPUTS.mean(1).sum() * 0.5, "sum", 6),
    "a sum over no samples": (lambda: OUTPUTS.T.reshape(8, 3)[:5].sum(), "unknown", 6),
    "a root": (lambda: OUTPUTS.pow(2).mean().sqrt(), "unknown", 6),
    "one over a sum": (lambda: 1 / OUTPUTS.pow(2).sum(), "unknown", 6),
    "a product of two": (lambda: OUTPUTS.exp().mean() * OUTPUTS.exp().sum(), "unknown", 6),
}


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    make, kind, items = READ[name]
    found = read(make(), 6)
    assert (found.kind, found.items) == (kind, items)


def test_terms_of_parameters_beside_a_sum_are_named_by_their_nodes() -> None:
    penalty = 0.1 * PARAMETER.pow(2).sum()
    found = read(OUTPUTS.sum() + penalty, 6)
    assert found.kind == "sum"
    assert found.once == (penalty.grad_fn,)


def test_a_deep_sum_over_a_list_is_read() -> None:
    total = F.cross_entropy(OUTPUTS, TARGETS)
    for _ in range(5000):
        total = total + PARAMETER.sum()
    assert read(total, 6).items == 4


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: PARAMETER.norm(), True),
        (lambda: (PARAMETER.T @ PARAMETER - torch.eye(2)).pow(2).sum(), True),
        (lambda: 0.5 * (PARAMETER - 1).abs().mean().exp(), True),
        (lambda: (PARAMETER * torch.ones(3, 2)).sum(), False),  # may be data
        (lambda: OUTPUTS.sum(), False),  # a leaf, but no parameter: an input that wants a gradient
        (lambda: F.linear(torch.ones(1, 2), PARAMETER).sum(), False),
        (lambda: F.embedding(torch.tensor([0]), PARAMETER).sum(), False),
    ],
)
def test_only_parameters(make: Callable[[], torch.Tensor], expected: bool) -> None:
    assert only_parameters(make().grad_fn) is expected


def test_the_graph_alone_is_enough_to_read() -> None:
    linear = nn.Linear(4, 4)
    with torch.no_grad(), graph_alone():
        loss = F.cross_entropy(linear(OUTPUTS.detach()).relu(), TARGETS, weight=WEIGHTS)
        squared = F.mse_loss(linear(OUTPUTS.detach()), torch.ones(6, 4))
    assert read(loss, 6).items == 15
    assert read(squared, 6).items == 24
    assert loss.grad_fn._saved_self.device.type == "meta"  # type: ignore[union-attr]


def mean(*items: float, shape: tuple[int, ...] = (), sure: bool = True) -> Reduction:
    return Reduction("mean", items[0], tuple(Term("mean", count, shape, sure) for count in items))


@pytest.mark.parametrize(
    ("sizes", "reductions", "expected"),
    [
        ([4, 3], [mean(7), mean(2)], None),
        ([4, 4], [mean(7), mean(7)], None),
        ([4, 3], [mean(40, shape=(4, 10)), mean(30, shape=(3, 10))], None),
        ([4, 3], [mean(12, shape=(12,)), mean(12, shape=(12,))], "reduces 12 numbers"),
        ([4, 4], [mean(1000, shape=(4,), sure=False), mean(1000, shape=(4,), sure=False)], "divides by 1000"),
        ([4, 4], [mean(9, shape=(4,), sure=False), mean(7, shape=(4,), sure=False)], None),
        ([4, 3], [mean(7, 14), mean(5, 10)], None),
        ([4, 3], [mean(7, 4), mean(5, 3)], "different numbers of items"),
        ([4, 3], [mean(7, 7), mean(5)], "not the same ones"),
        ([4, 3], [mean(7), Reduction("sum", 3, (Term("sum", shape=(3,)),))], "mean in some"),
        ([4, 3], [Reduction("sum", n, (Term("sum", shape=(n,)),)) for n in (4, 3)], None),
        ([4, 2], [Reduction("sum", n, (Term("sum", shape=(8,)),)) for n in (4, 2)], "reduces 8 numbers"),
        ([4], [Reduction("unknown", 4, (Term("unknown", operation="Sqrt"),))], "ends in Sqrt"),
        ([4], [Reduction("unknown", 4, (Term("sum"), Term("mean")))], "adds a sum to a mean"),
    ],
)
def test_doubt(sizes: list[int], reductions: list[Reduction], expected: str | None) -> None:
    found = doubt(sizes, reductions)
    assert found is None if expected is None else found is not None and expected in found[0]
