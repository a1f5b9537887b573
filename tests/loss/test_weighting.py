"""Items are counted, and gradients multiplied once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.loss.weighting import clip_gradients, count_items, scale_gradients
from autoaccum.testing import oom_at

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
    with pytest.raises(ArgumentError, match=r"^num_items\(micro-batch\)=-?[\w.]+: expected a count of at least 0\.$"):
        count_items(lambda batch: value, BATCH)


@pytest.mark.parametrize("value", [None, "many", torch.ones(3)])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"num_items\(micro-batch\)="):
        count_items(lambda batch: value, BATCH)


def test_an_oom_while_it_is_read_is_no_matter_of_the_argument() -> None:
    """Tell torch.OutOfMemoryError from the other RuntimeErrors, such as that of a tensor of many elements."""
    counted = torch.tensor(3)
    with oom_at(1), pytest.raises(torch.OutOfMemoryError):
        count_items(lambda batch: counted, BATCH)


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


def test_sparse_gradients_among_dense_ones() -> None:
    layers = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)
    layers[1](layers[0](torch.tensor([1, 1, 3]))).sum().backward()
    parameters = [layer.weight for layer in layers]
    before = [p.grad.to_dense().clone() for p in parameters if p.grad is not None]
    scale_gradients(parameters, 0.25)
    after = [p.grad.to_dense() for p in parameters if p.grad is not None]
    assert all(torch.equal(a, 0.25 * b) for a, b in zip(after, before, strict=True))


class TestClipGradients:
    @pytest.mark.parametrize("max_norm", [0.1, 1e6])
    def test_of_dense_gradients_it_is_pytorchs_to_the_bit(self, max_norm: float) -> None:
        results = []
        for clip in (clip_gradients, nn.utils.clip_grad_norm_):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
            parameters.append(nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))
            for p in parameters:
                p.grad = torch.randn_like(p)
            unused = nn.Parameter(torch.ones(1))
            norm = clip([*parameters, unused], max_norm)
            results.append([norm.item(), *(p.grad.tolist() for p in parameters if p.grad is not None)])
            assert unused.grad is None
        assert results[0] == results[1]

    def test_an_entry_of_a_sparse_gradient_counts_once(self) -> None:
        table, other = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(1))
        table.grad = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0], [2.0], [1.0]], (4, 1), check_invariants=True)
        other.grad = torch.ones(1)
        assert clip_gradients([table, other], 1.5).item() == 3.0  # of 2, 2 and 1; it is not 1, 1, 2 and 1
        assert table.grad.is_sparse
        assert table.grad.to_dense().flatten().tolist() == pytest.approx([0, 1, 0, 1])
        assert other.grad.item() == pytest.approx(0.5)

    def test_without_gradients_the_norm_is_zero(self) -> None:
        assert clip_gradients([nn.Parameter(torch.ones(1))], 1.0).item() == 0.0
