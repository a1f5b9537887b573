"""Which calls can be split: what is measured of each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.step.row_check import RowChecks
from autoaccum.step.split_calls import Layout, SplitCalls

pytestmark = pytest.mark.measured


class Applied(nn.Module):
    def __init__(self, function: Any, **held: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4, dtype=torch.float64), function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.linear(x))


def reasons(function: Any, **held: Any) -> str:
    """Return why such a module is opened; an empty text where it is split."""
    torch.manual_seed(0)
    model = Applied(function, **held)
    checks = RowChecks()
    x = torch.randn(7, 4, dtype=torch.float64)
    with SplitCalls(Layout([model]), (3, 2, 2), torch.device("cpu"), checks=checks):
        outputs = model(x)
    assert isinstance(outputs, torch.Tensor)
    return checks.reasons.get("0.", "")


class Counter:
    number = 0


def counted(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    model.counter.number += 1
    return hidden


def queued(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    model.seen.append(len(hidden))
    return hidden


def moved(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.linear.bias.data.mul_(1.0)
        model.total = getattr(model, "total", 0) + 1
    return hidden


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is that of the batch in another order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flip(0)


OUTSIDE = nn.Linear(4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "held", "why"),
    [
        (lambda model, hidden: hidden.tanh(), {}, ""),
        (lambda model, hidden: hidden.flatten().view(-1, 2), {}, ""),
        (lambda model, hidden: hidden - hidden.mean(0), {}, "rows depend on each other"),
        (lambda model, hidden: hidden.cumsum(0), {}, "rows depend on each other"),
        (lambda model, hidden: hidden.mean(), {}, "no row for each sample"),
        (lambda model, hidden: Reversed.apply(hidden), {}, "gradients of its rows"),
        (lambda model, hidden: hidden + random.random(), {}, "a generator that is not PyTorch's"),
        (lambda model, hidden: hidden + np.random.rand(), {}, "a generator that is not PyTorch's"),
        (lambda model, hidden: hidden @ OUTSIDE.weight, {}, "a parameter that it does not hold"),
        (counted, {"counter": Counter()}, "it moves state"),
        (queued, {"seen": []}, "it moves state"),
        (moved, {}, "it moves state"),
    ],
)
def test_what_is_opened(function: Any, held: dict[str, Any], why: str) -> None:
    found = reasons(function, **held)
    assert (why in found) if why else not found


def test_a_tensor_with_a_graph_that_stays_is_seen() -> None:
    kept: list[torch.Tensor] = []

    def keep(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        kept.append(hidden)
        return hidden.tanh()

    assert "leaves a tensor with a graph behind" in reasons(keep)


def test_each_kind_of_call_of_a_module_is_measured_by_itself() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor, squared: bool) -> torch.Tensor:
            return self.linear(x).square() if squared else self.linear(x)

    model, cpu = Switched(), torch.device("cpu")
    layout, x = Layout([model]), torch.randn(7, 4, dtype=torch.float64)
    with SplitCalls(layout, (3, 2, 2), cpu, checks=RowChecks()):
        model(x, True)
        model(x, False)
    with SplitCalls(layout, (3, 2, 2), cpu) as split:
        model(x, True)
        model(x, False)
    assert split.num_calls == 2


def test_state_is_put_back_after_the_measurement() -> None:
    counter = Counter()
    reasons(counted, counter=counter)
    assert counter.number == 1  # by the call itself, which runs on everything
