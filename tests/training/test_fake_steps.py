"""A step without values: what it holds, and the levels that it can stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from autoaccum.data.splits import Automatic
from autoaccum.memory.fake import Fakes
from autoaccum.step.checkpointing import OFF
from autoaccum.training.check import open_samples
from autoaccum.training.fake_steps import FakeSamples, FakeStep

CPU = torch.device("cpu")


def step(model: nn.Module, **functions: Any) -> FakeStep:
    batch = torch.randn(4, 64), torch.randn(4, 64)
    window, examples = open_samples(batch, None, CPU, Automatic())
    fakes = Fakes()
    samples = FakeSamples(fakes, examples, window.num_samples, Automatic())
    given = {"loss_fn": mse_loss, "training_step": None, "optimizer": None, **functions}
    return FakeStep(fakes, samples, [model], given, "fp32")


def deep(layers: int = 8) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(layers)])


def test_the_level_takes_less_than_none_and_the_same_again() -> None:
    made = step(deep())
    (every,) = made.levels()
    assert every.name == "checkpoint, every Sequential"
    peaks = [made.peak(512, level) for level in (OFF, every)]
    assert peaks[1].bytes < 0.75 * peaks[0].bytes
    assert [made.peak(512, level)[:5] for level in (OFF, every)] == [peak[:5] for peak in peaks]
    assert made.peak(1024, OFF).bytes > peaks[0].bytes
    assert step(nn.Linear(64, 64)).levels() == []


def test_what_is_held() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False))
    weight = 64 * 64 * 4
    made = step(model)
    peak = made.peak(4, OFF)
    assert peak.parameters == weight + 3 * 512  # the running mean and variance, and the count of batches
    assert peak.gradients == weight
    assert peak.optimizer == 2 * weight + 512
    assert peak.copies == 3 * 512
    assert peak.held == sum(peak[1:5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_that_a_step_makes_is_held(momentum: float) -> None:
    made = step(nn.Linear(64, 64, bias=False), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum))
    peak = made.peak(4, OFF)
    assert peak.optimizer == (64 * 64 * 4 if momentum else 0)


def test_state_of_a_foreign_optimizer_too() -> None:
    class Foreign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad * p.grad.norm().item()

    Foreign.__module__ = "foreign"
    made = step(nn.Linear(64, 64, bias=False), optimizer=Foreign)
    peak = made.peak(4, OFF)
    assert peak.optimizer == 64 * 64 * 4
