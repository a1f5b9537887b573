"""What a graph says about the operations in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoaccum.step.loss_graph import has_halves, only_parameters, operation_of, signed

OUTPUTS = torch.randn(6, 4, requires_grad=True)
PARAMETER = nn.Parameter(torch.ones(3, 2))


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


def test_a_checkpointed_block_is_not_computed_again_to_be_asked() -> None:
    calls = []

    def block(weight: torch.Tensor) -> torch.Tensor:
        calls.append(weight)
        return (weight * weight).abs()

    assert only_parameters(checkpoint(block, PARAMETER, use_reentrant=False).grad_fn) is False
    assert len(calls) == 1
    with torch.autograd.graph.save_on_cpu():
        assert only_parameters(block(PARAMETER).grad_fn) is True


def test_operations_bear_the_names_of_their_nodes() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad

    assert operation_of(OUTPUTS.sum().grad_fn) == "Sum"
    assert operation_of(OUTPUTS.sum(1).grad_fn) == "Sum"
    assert operation_of(Sum.apply(OUTPUTS).grad_fn) == "the autograd.Function Sum"  # type: ignore[no-untyped-call]
    assert operation_of(None) == ""


def test_dimensions_from_the_end_are_saved_without_their_sign() -> None:
    assert signed(OUTPUTS.mean(-1).grad_fn._saved_dim[0]) == -1  # type: ignore[union-attr]
    assert signed(1) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_autocast_of_the_users_own_rounds_shows_in_the_graph(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    assert not has_halves(layer(x).double().sum())
    with torch.autocast("cpu", dtype=dtype):
        outputs = layer(x)
    loss = outputs.float().square().sum()
    assert has_halves(loss)
    loss.backward()
    assert has_halves(loss)
