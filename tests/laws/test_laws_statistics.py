"""Law 1 for statistics of the batch that a step computes itself: they are those of the full batch by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Joined
from tests.models import mlp, relative_error

SAMPLES = 8
Step = Callable[[nn.Module, Any], torch.Tensor]


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 3, (SAMPLES,), generator=generator),
        "advantages": torch.randn(SAMPLES, generator=generator, dtype=torch.float64) * 3 + 1,
    }


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def each(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def normalised_advantages(model: nn.Module, batch: Any) -> torch.Tensor:
    ratio = model(batch["x"]).log_softmax(1).gather(1, batch["y"][:, None])[:, 0].exp()
    advantages = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.3, 0.4) * advantages).mean()


def hardest_half(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = each(model, batch)
    return (losses * (losses >= losses.detach().median())).mean()


def class_weights(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = 1 / (torch.bincount(batch["y"], minlength=3).double() + 1)
    return (each(model, batch) * weights[batch["y"]]).mean()


@pytest.mark.measured
@pytest.mark.parametrize("step", [normalised_advantages, hardest_half, class_weights])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_statistic_of_the_batch_is_that_of_the_full_batch(step: Step, micro_batch: int) -> None:
    model = mlp(torch.float64)
    step(model, data()).backward()
    expected = gradient(model)
    model.zero_grad()
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step, micro_batch=micro_batch
    )
    accumulator.backward(data())
    assert relative_error(gradient(model), expected) < 1e-10
    assert len(accumulator.micro_batches) > 1
    assert any(isinstance(event, Joined) for event in accumulator.events)


class Recording(nn.Module):
    """A layer whose running mean, count and list no gradient depends on: they are read in eval mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.largest: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls.add_(1)
            self.largest.append(x.detach().max().item())
        return x


@pytest.mark.measured
def test_state_that_forwards_write_is_that_of_training_without_splits() -> None:
    def trained(micro_batch: int) -> tuple[torch.Tensor, int, list[float]]:
        model = nn.Sequential(recording := Recording(), mlp(torch.float64))
        accumulator = autoaccum.Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            training_step=lambda model, batch: each(model, batch).mean(),
            micro_batch=micro_batch,
        )
        for _ in range(3):
            accumulator.step(data())
        return recording.mean, int(recording.calls), recording.largest

    (mean, calls, largest), expected = trained(3), trained(SAMPLES)
    torch.testing.assert_close(mean, expected[0], rtol=1e-12, atol=1e-12)
    assert (calls, largest) == expected[1:]
