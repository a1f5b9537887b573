"""A closure computes what is not there; what optimizers do with closures: training/test_closures."""

from __future__ import annotations

import pytest
import torch

from autoaccum.step.gradient import Gradient
from autoaccum.step.optimizer_step import Closure

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("made_there")]


def test_a_closure_runs_what_is_not_there() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    ran: list[str] = []

    def gradient(loss: float) -> Gradient:
        p.grad = torch.full_like(p, loss)
        return Gradient(sizes=(1,), loss=torch.tensor(loss), grad_norm=None, items=1.0)

    def run() -> Gradient:
        ran.append("run")
        return gradient(2.0)

    def closure() -> Closure:
        ran.clear()
        return Closure(gradient(1.0), optimizer, run, lambda: ran.append("rewind"))

    untouched = closure()
    assert (float(untouched()), ran) == (1.0, [])
    assert (float(untouched()), ran) == (2.0, ["run"])
    dropped = closure()
    p.grad = None
    assert (float(dropped()), ran) == (2.0, ["rewind", "run"])
    moved = closure()
    p.data.add_(1)
    assert (float(moved()), ran) == (2.0, ["run"])
