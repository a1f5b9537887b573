"""The values of scalars are kept by the nodes that made them."""

from __future__ import annotations

import torch

from autoaccum.loss.values import Values


def test_scalars_with_a_graph_are_kept_as_they_were_when_they_were_made() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    with Values() as values:
        loss = weight.sum()
        node = loss.grad_fn
        loss += (weight**2).mean()  # which writes to what it is added to
        weight.detach().sum()
    assert values.of(node) == 3
    assert values.of(loss.grad_fn) == 5.5
    assert values.of(None) is None
    assert values.of((weight * 2).grad_fn) is None  # no scalar


def test_a_parameter_is_its_own_value() -> None:
    scale = torch.nn.Parameter(torch.tensor(0.5))
    node = (scale + 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert Values().of(node) == 0.5
