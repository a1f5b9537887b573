"""Gradients that a loss changes are noticed; gradients that stay as they are, are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoaccum.errors import LossSideEffectError, NonScalarLossError
from autoaccum.step.verification import SideEffects

pytestmark = pytest.mark.measured


def parameters() -> list[nn.Parameter]:
    """Two of them, the first of which has a gradient."""
    made = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    made[0].grad = torch.ones(2)
    return made


def replace(made: list[nn.Parameter]) -> None:
    made[0].grad = torch.ones(2)


def drop(made: list[nn.Parameter]) -> None:
    made[0].grad = None


def write(made: list[nn.Parameter]) -> None:
    assert made[0].grad is not None
    made[0].grad.mul_(1)


def add(made: list[nn.Parameter]) -> None:
    made[1].grad = torch.ones(2)


def exchange(made: list[nn.Parameter]) -> None:
    made[1].grad, made[0].grad = made[0].grad, torch.ones(2)


def backward(made: list[nn.Parameter]) -> None:
    (made[0] * made[1]).sum().backward()


@pytest.mark.parametrize("change", [replace, drop, write, add, exchange, backward])
def test_a_change_is_refused(change: Callable[[list[nn.Parameter]], None]) -> None:
    made = parameters()
    before = [p.grad for p in made]  # alive, so that none of another's place is taken for it
    found = SideEffects(made)
    change(made)
    with pytest.raises(LossSideEffectError, match="loss_fn, training_step or the model"):
        found.refuse()
    assert before[0] is not None


def test_what_only_reads_is_not() -> None:
    made = parameters()
    found = SideEffects(made)
    assert made[0].grad is not None
    loss = (made[0] * made[1] + made[0].grad).sum()
    torch.autograd.grad(loss, made)
    with torch.no_grad():
        made[0].add_(1)
    found.refuse()
    assert made[1].grad is None


def test_a_backward_is_told_before_what_it_has_returned() -> None:
    made = parameters()

    def compute() -> None:
        backward(made)
        raise NonScalarLossError("training_step", "nothing")

    def fail() -> None:
        raise NonScalarLossError("training_step", "nothing")

    with pytest.raises(LossSideEffectError, match="out of it: autoaccum calls them for you"):
        SideEffects(made).refuse_in(compute)
    with pytest.raises(NonScalarLossError):
        SideEffects(made).refuse_in(fail)
    assert SideEffects(made).refuse_in(lambda: 3) == 3
