"""Micro-batches add up as the hypothesis says that is held, and what is no number counts nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.planning.attempts import Piece
from autoaccum.step.gradient import Gradient
from autoaccum.training.setup import GivenBatch
from tests.models import classes, mlp
from tests.step.making import step_of

CPU = torch.device("cpu")


def by(hypothesis: Any, loss_of: Any, *sizes: int, num_items: Any = None) -> list[torch.Tensor]:
    """Return the gradient of a window in these sizes, by a hypothesis; that of the whole for None without sizes."""
    made = step_of(mlp(torch.float64), loss_of=loss_of, num_items=num_items).transaction
    made.hypothesis = hypothesis
    window = GivenBatch(classes(8, torch.float64), 8, CPU)
    made.begin(window)
    start = 0
    for size in sizes:
        made.add(Piece(start, size))
        start += size
    gradient = made.finish()
    assert isinstance(gradient, Gradient)
    made.commit()
    return [p.grad for p in made.trained() if p.grad is not None]


def a_mean(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def a_sum(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def weighed(factors: list[float], loss: Any, *sizes: int) -> list[torch.Tensor]:
    """Return what micro-batches add up to by these factors, each by itself."""
    model, total = mlp(torch.float64), [torch.zeros(())] * 4
    inputs, targets = classes(8, torch.float64)
    start = 0
    for factor, size in zip(factors, sizes, strict=True):
        part = inputs[start : start + size], targets[start : start + size]
        found = torch.autograd.grad(loss(model, part), list(model.parameters()))
        total = [one + factor * other for one, other in zip(total, found, strict=True)]
        start += size
    return total


@pytest.mark.parametrize(
    ("hypothesis", "loss", "factors"),
    [
        ("items", a_mean, [5 / 8, 3 / 8]),
        ("sum", a_mean, [1, 1]),
        ("sum", a_sum, [1, 1]),
        ("num_items", a_mean, [1 / 2, 1 / 2]),
    ],
)
def test_a_hypothesis_says_what_each_micro_batch_counts(hypothesis: Any, loss: Any, factors: list[float]) -> None:
    """Whatever the graph of the loss shows, and whatever the user says it counts."""
    for found, expected in zip(
        by(hypothesis, loss, 5, 3, num_items=lambda batch: 7), weighed(factors, loss, 5, 3), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("factor", [1.0, math.nan, math.inf])
def test_whether_loss_and_gradient_are_finite_is_told(factor: float) -> None:
    made = step_of(mlp(torch.float64), loss_of=lambda model, batch: a_mean(model, batch) * factor).transaction
    made.begin(GivenBatch(classes(8, torch.float64), 8, CPU))
    for start in (0, 4):
        made.add(Piece(start, 4))
    gradient = made.finish()
    assert isinstance(gradient, Gradient)
    assert gradient.is_finite is (factor == 1.0)
    assert made.signs.have_changed is (factor != 1.0)


def test_a_gradient_that_is_not_finite_beside_a_loss_that_is_shows() -> None:
    """As ``nan_to_num`` leaves it of a mean over nothing."""

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        taken = (batch[1] == 1).double()
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((losses * taken).sum() / taken.sum()).nan_to_num()

    made = step_of(mlp(torch.float64), loss_of=loss_of).transaction
    made.begin(GivenBatch((classes(8, torch.float64)[0], torch.tensor([0, 0, 1, 2, 1, 1, 0, 1])), 8, CPU))
    for start in (0, 2, 4, 6):
        made.add(Piece(start, 2))
    gradient = made.finish()
    assert isinstance(gradient, Gradient)
    assert gradient.loss.isfinite()
    assert not gradient.is_finite
