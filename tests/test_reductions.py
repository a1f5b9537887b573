"""What is read off a loss's graph; that it makes windows exact is in test_laws_losses.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.reductions import Reduction, Term, conclude, graph_alone, only_parameters, read

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
    "a mean times the samples": (lambda: OUTPUTS.mean() * 6, "unclear", 4),
    "a sum over no samples": (lambda: OUTPUTS.T.reshape(8, 3)[:5].sum(), "unclear", 1),
    "a root": (lambda: OUTPUTS.pow(2).mean().sqrt(), "unknown", 6),
    "one over a sum": (lambda: 1 / OUTPUTS.pow(2).sum(), "unknown", 6),
    "a product of two": (lambda: OUTPUTS.exp().mean() * OUTPUTS.exp().sum(), "unknown", 6),
}


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    make, kind, items = READ[name]
    found = read(make(), 6)
    assert {term.kind for term in found.terms} <= {kind}
    assert found.terms or kind == "mean"
    assert found.items == pytest.approx(items)


def test_terms_of_parameters_are_named_by_where_they_enter() -> None:
    loss = OUTPUTS.sum() + 0.1 * PARAMETER.pow(2).sum()
    found = read(loss, 6)
    assert found.is_sum
    assert found.constants == (0.1,)
    assert found.edges == ((loss.grad_fn, 1),)


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
        (lambda: F.mse_loss(PARAMETER, torch.ones(3, 2)), True),
        (lambda: 0.5 * (PARAMETER - 1).abs().mean().exp(), True),
        (lambda: (PARAMETER * torch.ones(3, 2)).sum(), True),  # a constant of its own shape, as an importance
        (lambda: (PARAMETER * torch.ones(5, 3, 2)).sum(), False),  # may be data
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


def mean(*items: float, counted: bool = True) -> Reduction:
    return Reduction(items[0], tuple(Term("mean", count, numbers=100, is_counted=counted) for count in items))


def total(numbers: int, constants: tuple[float, ...] = ()) -> Reduction:
    return Reduction(1.0, (Term("sum", 1.0, numbers),), constants)


@pytest.mark.parametrize(
    ("sizes", "reductions", "is_sum", "doubt"),
    [
        ([4, 3], [Reduction(7.0), Reduction(2.0)], False, None),
        ([4, 3], [mean(7), mean(2)], False, None),
        ([4, 4], [mean(7), mean(7)], False, None),
        ([4, 3], [mean(7), mean(7)], False, None),  # counts may be equal by chance, numbers of a program not
        ([4, 3], [mean(12, counted=False), mean(12, counted=False)], True, None),
        ([4, 3], [mean(7, 14), mean(5, 10)], False, None),
        ([4, 3], [mean(7, 4), mean(5, 3)], False, "different numbers of items"),
        ([4, 3], [mean(0, 4), mean(5, 3)], False, "different numbers of items"),
        ([4, 3], [mean(7, 7), mean(5)], False, "not the same ones"),
        ([4, 3], [total(4), total(3)], True, None),
        ([4, 4], [total(4), total(4)], True, None),
        ([4, 4], [total(4, (0.1,)), total(4, (0.1,))], True, None),
        ([4, 3], [total(4, (0.25,)), total(3, (0.33,))], True, "by a count of samples"),
        ([4, 4], [total(4, (8.0,)), total(4, (8.0,))], True, "by a count of samples"),
        ([4, 4], [Reduction(4.0, (Term("unclear", 4.0, 4),))] * 2, True, "divides by 4 in every micro-batch"),
        ([4, 3], [Reduction(n**2, (Term("mean", n**2, n, 1 / n),)) for n in (4.0, 3.0)], False, "another factor"),
        ([4], [Reduction(4, (Term("unknown", operation="Sqrt"),))], False, "leads to Sqrt"),
    ],
)
def test_conclude(sizes: list[int], reductions: list[Reduction], is_sum: bool, doubt: str | None) -> None:
    found = conclude(sizes, reductions)
    assert found.is_sum is is_sum
    assert (found.doubt is None) if doubt is None else (found.doubt is not None and doubt in found.doubt[0])
