"""A step without values: what it holds, and the rungs that it can stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from autoaccum.data.splits import Automatic
from autoaccum.memory.fake import Fakes
from autoaccum.training.check_samples import open_samples
from autoaccum.training.fake_copies import FakeSamples
from autoaccum.training.fake_steps import FakeStep

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


def test_rungs_are_those_of_a_run() -> None:
    names = {mode: [rung.name for rung in step(deep()).rungs(512, mode)] for mode in ("auto", "off", "checkpoint")}
    assert names["off"] == ["off"]
    assert len(names["auto"]) == 3
    assert names["auto"][0] == "off"
    assert names["auto"][1].startswith("checkpoint, every 2nd of ")
    assert names["checkpoint"] == names["auto"][2:]
    assert [rung.name for rung in step(nn.Linear(64, 64)).rungs(512, "auto")] == ["off"]
    assert [rung.name for rung in step(nn.Linear(64, 64)).rungs(512, "checkpoint")] == ["off"]


def test_each_rung_takes_less_than_the_one_above() -> None:
    made = step(deep())
    peaks = [made.peak(512, rung).bytes for rung in made.rungs(512, "auto")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.75 * peaks[0]


def test_the_same_size_takes_the_same_again() -> None:
    made = step(deep())
    off, some, every = made.rungs(64, "auto")
    first = [made.peak(64, rung) for rung in (off, some, every)]
    assert [made.peak(64, rung) for rung in (off, some, every)] == first
    assert made.peak(128, off).bytes > first[0].bytes


def test_what_is_held() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False))
    weight = 64 * 64 * 4
    made = step(model)
    peak = made.peak(4, next(iter(made.rungs(4, "off"))))
    assert peak.parameters == weight + 3 * 512  # the running mean and variance, and the count of batches
    assert peak.gradients == weight
    assert peak.optimizer == 2 * weight + 512
    assert peak.copies == 3 * 512
    assert peak.held == sum(peak[1:])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_that_a_step_makes_is_held(momentum: float) -> None:
    made = step(nn.Linear(64, 64, bias=False), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum))
    peak = made.peak(4, next(iter(made.rungs(4, "off"))))
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
    peak = made.peak(4, next(iter(made.rungs(4, "off"))))
    assert peak.optimizer == 64 * 64 * 4
