"""What is done to the gradients of a window: dropped, multiplied once, clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoaccum.step.gradient import Gradient, Gradients, are_alike, count_nodes
from autoaccum.step.terms import Reduction


def gradients_of(*parameters: nn.Parameter) -> Gradients:
    return Gradients([nn.ParameterList(parameters)], torch.optim.SGD([{"params": parameters}], lr=0.1))


def test_what_is_trained_is_what_modules_have_and_what_the_optimizer_holds_by_now() -> None:
    shared, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    other, late = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    modules = [nn.ParameterList([shared, own]), nn.ParameterList([shared])]
    optimizer = torch.optim.SGD([other, own], lr=0.1)
    gradients = Gradients(modules, optimizer)
    assert [id(p) for p in gradients.trained()] == [id(p) for p in (shared, own, other)]
    optimizer.add_param_group({"params": [late]})
    assert [id(p) for p in gradients.trained()] == [id(p) for p in (shared, own, other, late)]


def test_all_gradients_are_dropped_and_none_is_left_at_zero() -> None:
    own, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    own.grad, other.grad = torch.ones(1), torch.ones(1)
    Gradients([nn.ParameterList([own])], torch.optim.SGD([other], lr=0.1)).drop()
    assert own.grad is None
    assert other.grad is None


def test_gradients_are_multiplied_in_place() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)] + [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameter in parameters[:1] + parameters[2:]:
        parameter.grad = torch.tensor([1.5, -4.0], dtype=parameter.dtype)
    gradients = [p.grad for p in parameters]
    gradients_of(*parameters).scale(0.5)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [
        [0.75, -2.0],
        None,
        *[[0.75, -2.0]] * 2,
    ]
    assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))


def test_without_gradients_there_is_nothing_to_multiply() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    gradients_of(parameter).scale(2.0)
    gradients_of().scale(2.0)
    assert parameter.grad is None


def test_a_gradient_with_a_graph_of_its_own_is_multiplied_outside_of_it() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    (gradient,) = torch.autograd.grad(parameter.square().sum(), parameter, create_graph=True)
    parameter.grad = gradient
    gradients_of(parameter).scale(3.0)
    assert gradient.tolist() == [12.0]
    assert torch.autograd.grad(gradient, parameter)[0].tolist() == [2.0], "it is still that of 2 x, not of 6 x"
    parameter.grad = None  # else the two hold each other


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    rows = torch.sparse_coo_tensor([[1, 3]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True)
    embedding.weight.grad = rows
    gradients_of(embedding.weight).scale(2.0)
    assert embedding.weight.grad.to_dense().tolist() == [[0, 0], [2, 4], [0, 0], [6, 8]]


def test_sparse_gradients_among_dense_ones() -> None:
    layers = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)
    layers[1](layers[0](torch.tensor([1, 1, 3]))).sum().backward()
    parameters = [layer.weight for layer in layers]
    before = [p.grad.to_dense().clone() for p in parameters if p.grad is not None]
    gradients_of(*parameters).scale(0.25)
    after = [p.grad.to_dense() for p in parameters if p.grad is not None]
    assert all(torch.equal(a, 0.25 * b) for a, b in zip(after, before, strict=True))


class TestClip:
    @pytest.mark.parametrize("max_norm", [0.1, 1e6])
    def test_of_dense_gradients_it_is_pytorchs_to_the_bit(self, max_norm: float) -> None:
        results = []
        for is_pytorchs in (False, True):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
            parameters.append(nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))
            for p in parameters:
                p.grad = torch.randn_like(p)
            unused = nn.Parameter(torch.ones(1))
            if is_pytorchs:
                norm = nn.utils.clip_grad_norm_([*parameters, unused], max_norm)
            else:
                norm = gradients_of(*parameters, unused).clip(max_norm)
            results.append([norm.item(), *(p.grad.tolist() for p in parameters if p.grad is not None)])
            assert unused.grad is None
        assert results[0] == results[1]

    def test_an_entry_of_a_sparse_gradient_counts_once(self) -> None:
        table, other = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(1))
        table.grad = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0], [2.0], [1.0]], (4, 1), check_invariants=True)
        other.grad = torch.ones(1)
        assert gradients_of(table, other).clip(1.5).item() == 3.0  # of 2, 2 and 1; it is not 1, 1, 2 and 1
        assert table.grad.is_sparse
        assert table.grad.to_dense().flatten().tolist() == pytest.approx([0, 1, 0, 1])
        assert other.grad.item() == pytest.approx(0.5)

    def test_to_measure_them_changes_no_gradient(self) -> None:
        table, other = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(1))
        table.grad = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0], [2.0], [1.0]], (4, 1), check_invariants=True)
        other.grad = torch.ones(1)
        assert gradients_of(table, other).norm().item() == 3.0
        assert table.grad.to_dense().flatten().tolist() == [0, 2, 0, 2]
        assert other.grad.item() == 1.0

    def test_without_gradients_the_norm_is_zero(self) -> None:
        assert gradients_of(nn.Parameter(torch.ones(1))).clip(1.0).item() == 0.0


@pytest.mark.parametrize(
    ("sizes", "counts", "alike"),
    [
        ((3, 2), (3, 2), True),
        ((3, 2), (-7.5, -5), True),
        ((3, 3), (4, 4), True),
        ((3, 2), (2, 3), False),
        ((3, 3), (4, 5), False),
        ((3, 2), (2, 2), False),
        ((3, 2), (3, 0), False),
    ],
)
def test_counts_are_sizes_but_for_a_factor_or_are_not(sizes: list[int], counts: list[float], alike: bool) -> None:
    assert are_alike(sizes, counts) is alike


def test_nodes_are_counted() -> None:
    p = nn.Parameter(torch.ones(1))
    before = count_nodes()
    (p * 2).exp().sum()
    assert count_nodes() - before == 3
    with torch.no_grad():
        p.exp()
    assert count_nodes() - before == 3


@pytest.mark.parametrize(("num_samples", "sizes"), [(0, ()), (2, ()), (3, (3,)), (6, (3, 3)), (10, (3, 3, 4))])
def test_what_is_known_of_its_first_samples(num_samples: int, sizes: tuple[int, ...]) -> None:
    whole = Gradient(
        sizes=(3, 3, 4), counts=(3.0, 0.0, 2.0), reductions=tuple(map(Reduction, (3.0, 0.0, 2.0))),
        loss=torch.tensor(1.0), grad_norm=None, items=5.0,
    )  # fmt: skip
    found = whole.of_first_samples(num_samples)
    assert found.sizes == sizes
    assert found.counts == whole.counts[: len(sizes)]
    assert len(found.reductions) == len(sizes)
    assert found.items == 5.0, "all else is that of the window"
