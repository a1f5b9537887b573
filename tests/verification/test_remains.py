"""What a window leaves in state that moves once a window: that of a queue is a part, that of a momentum encoder all."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import Notice
from autoaccum.verification.remains import is_of_a_part, remains_of
from tests.devices import DEVICE, there
from tests.verification.making import DOUBLE

KEYS = 40


class Momentum(nn.Module):
    """An encoder beside one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 4, dtype=DOUBLE)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return (self.encoder(inputs) - self.slow(inputs.flip(1))).square().mean(1)


class Queue(nn.Module):
    """An encoder beside the keys of the samples before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 4, dtype=DOUBLE)
        self.register_buffer("keys", torch.randn(KEYS, 4, dtype=DOUBLE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        encoded = F.normalize(self.encoder(inputs), dim=1)
        losses = (encoded @ self.keys.clone().T).logsumexp(1)
        self.keys = torch.cat([self.keys[len(inputs) :], encoded.detach()])
        return losses


class Normed(Queue):
    """The same without a queue, behind BatchNorm, whose statistics are told by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=DOUBLE).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.encoder(inputs)) @ self.keys.T).logsumexp(1)


def causes_of(model: nn.Module, **options: Any) -> list[str]:
    """Return what is announced of two windows, and see that the first one is exact."""
    inputs = torch.randn(24, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
        result = autoaccum.fit(
            there(model), inputs, effective_batch=12, micro_batch=4, device=DEVICE, progress=False,
            training_step=lambda model, batch: model(batch).mean(), **options,
        )  # fmt: skip
    return [event.cause[:30] for event in result.events if isinstance(event, Notice)]


@pytest.mark.device
def test_a_window_that_leaves_a_part_is_told() -> None:
    assert causes_of(Queue(), state="window") == ["What forwards write to state d"]
    assert causes_of(Momentum(), state="window") == []
    assert causes_of(Normed(), state="window") == []
    # Otherwise it is the gradient that is not exact.
    assert causes_of(Queue()) == ["A forward changes state that t"]


@pytest.mark.device
def test_what_is_alike_but_for_rounding_is_no_part() -> None:
    model = there(Queue())
    before = remains_of(model.modules())
    model.keys[0] += 1.0
    whole = remains_of(model.modules())
    assert not is_of_a_part(before, whole, whole)
    assert is_of_a_part(before, whole, before)
    model.keys[0] += 1e-9
    assert not is_of_a_part(before, whole, remains_of(model.modules()))
    model.keys = model.keys[1:]  # of another shape: it holds what is as long as a batch
    assert not is_of_a_part(before, whole, remains_of(model.modules()))
    assert [name for _, name in remains_of(there(Normed()).modules())] == ["keys"]
