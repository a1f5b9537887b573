"""Items are counted, and gradients multiplied once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.weighting import count_items, scale_gradients

BATCH = {"labels": torch.tensor([[1, -100], [2, 3]])}


@pytest.mark.parametrize(
    "make", [int, float, lambda count: count, lambda count: count.double(), lambda c: c.reshape(1)]
)
def test_items_as_the_user_counts_them(make: Any) -> None:
    found = count_items(lambda batch: make((batch["labels"] != -100).sum()), BATCH)
    assert found == 3.0
    assert type(found) is float


@pytest.mark.parametrize("value", [0, 0.0, False, torch.tensor(0)])
def test_no_item_at_all_is_a_count(value: Any) -> None:
    assert count_items(lambda batch: value, BATCH) == 0.0


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), torch.tensor(-2)])
def test_what_is_no_count(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^num_items=-?[\w.]+: expected a function .* a count of at least 0\.$"):
        count_items(lambda batch: value, BATCH)


@pytest.mark.parametrize("value", [None, "many", torch.ones(3)])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match="num_items="):
        count_items(lambda batch: value, BATCH)


def test_gradients_are_multiplied_in_place() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)] + [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameter in parameters[:1] + parameters[2:]:
        parameter.grad = torch.tensor([1.5, -4.0], dtype=parameter.dtype)
    gradients = [p.grad for p in parameters]
    scale_gradients(parameters, 0.5)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [
        [0.75, -2.0],
        None,
        *[[0.75, -2.0]] * 2,
    ]
    assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))


def test_without_gradients_there_is_nothing_to_multiply() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    scale_gradients([parameter], 2.0)
    scale_gradients([], 2.0)
    assert parameter.grad is None


def test_a_gradient_with_a_graph_of_its_own_is_multiplied_outside_of_it() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    (gradient,) = torch.autograd.grad(parameter.square().sum(), parameter, create_graph=True)
    parameter.grad = gradient
    scale_gradients([parameter], 3.0)
    assert gradient.tolist() == [12.0]
    assert torch.autograd.grad(gradient, parameter)[0].tolist() == [2.0], "it is still that of 2 x, not of 6 x"
    parameter.grad = None  # else the two hold each other


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    rows = torch.sparse_coo_tensor([[1, 3]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True)
    embedding.weight.grad = rows
    scale_gradients([embedding.weight], 2.0)
    assert embedding.weight.grad.to_dense().tolist() == [[0, 0], [2, 4], [0, 0], [6, 8]]
