"""Laws 1 and 7: a loss that is not exact when split trains unsplit where the full batch fits, from the first step on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.testing import simulated_memory

DATA = torch.randn(256, 20), torch.randn(256, 20)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 32), nn.Linear(20, 32)


def contrastive(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model.a(batch[0]) @ model.b(batch[1]).T
    return cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def trained(**options: object) -> autoaccum.FitResult:
    torch.manual_seed(0)
    return autoaccum.fit(
        Towers(),
        DATA,
        effective_batch=64,
        training_step=contrastive,
        device="cpu",
        cache=False,
        progress=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore:.*windows that are cut get a gradient")
@pytest.mark.measured
def test_the_full_batch_is_run_at_once_and_the_first_step_too() -> None:
    with simulated_memory(10**7):
        found, expected = trained(), trained(micro_batch=64)
    assert [report.micro_batches for report in found.history] == [(64,)] * 4
    assert [report.loss for report in found.history] == [report.loss for report in expected.history]


@pytest.mark.weighted
@pytest.mark.filterwarnings("ignore:.*windows that are cut get a gradient")
@pytest.mark.measured
def test_where_it_does_not_fit_micro_batches_are_as_large_as_can_be() -> None:
    with simulated_memory(110_000):
        history = trained(epochs=3).history
    assert all(report.peak_bytes <= 110_000 for report in history)
    assert max(history[-1].micro_batches) >= 0.9 * max(max(report.micro_batches) for report in history)
    assert len(history[-1].micro_batches) < 16
