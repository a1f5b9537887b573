"""A walk finds every term of a loss, where it enters and what it is multiplied with; test_reductions.py has the kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoaccum.step import loss_graph
from autoaccum.step.loss_graph import Walk

OUTPUTS = torch.ones(6, 4, requires_grad=True)
PARAMETER = nn.Parameter(torch.ones(3, 2))


def test_a_loss_of_one_term_is_no_summand() -> None:
    ((summand, factor, term),) = Walk(6).terms((3 * OUTPUTS.mean()).grad_fn)
    assert summand is None
    assert (factor.value, term.divisor) == (3.0, 8.0)


def test_terms_of_a_sum_come_in_its_order() -> None:
    loss = OUTPUTS.mean() - 0.5 * PARAMETER.sum()
    first, second = Walk(6).terms(loss.grad_fn)
    assert [first[0], second[0]] == [node for node, _ in loss.grad_fn.next_functions]  # type: ignore[union-attr]
    assert (first[2].divisor, second[1].value) == (24.0, 0.5)


def test_a_term_times_zero_is_none() -> None:
    assert Walk(6).terms((0.0 * OUTPUTS.sum()).grad_fn) == []


def test_a_list_of_scalars_is_a_term_for_each_with_its_weight() -> None:
    parts = torch.stack([OUTPUTS.mean(), OUTPUTS.sum()]) * torch.tensor([1.0, 0.25])
    found = Walk(6).terms(parts.sum().grad_fn)
    assert sorted(float(term.divisor) for _, _, term in found) == [4.0, 24.0]


def test_a_factor_that_is_learnt_is_walked_through() -> None:
    scale = nn.Parameter(torch.tensor(0.3))
    for loss in (scale * OUTPUTS.mean(), OUTPUTS.mean() / scale):
        ((_, factor, term),) = Walk(6).terms(loss.grad_fn)
        assert (factor.value, term.kind) == (1.0, "mean")


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda: OUTPUTS.mean().sqrt(), "Sqrt"),
        (lambda: OUTPUTS.mean() * OUTPUTS.sum(), "Mul"),
        (lambda: 1 / OUTPUTS.mean(), "Reciprocal"),
        (lambda: torch.stack([row.mean() for row in OUTPUTS]).mean(), "a list as long as the batch"),
        (lambda: (OUTPUTS.sum(1) * torch.tensor([1.0, 1, 1, 1, 1, 5]) / 10).sum(), None),
        (lambda: (OUTPUTS.sum(1) * torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.5])).sum(), "weights that sum to one"),
    ],
)
def test_what_is_not_linear_is_unknown_and_named(make: Callable[[], torch.Tensor], operation: str | None) -> None:
    ((_, _, term),) = Walk(6).terms(make().grad_fn)
    assert (term.in_words() if term.kind == "unknown" else None) == operation


def test_a_graph_that_is_too_long_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_graph, "_LONGEST", 3)
    loss = OUTPUTS.mean() + OUTPUTS.mean() + OUTPUTS.mean()
    ((_, _, term),) = Walk(6).terms(loss.grad_fn)
    assert (term.kind, term.operation) == ("unknown", "a very long graph")
