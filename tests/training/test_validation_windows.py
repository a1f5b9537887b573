"""The validation of a loss over whole windows does not depend on its micro-batches, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Validated
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations
from tests.models import mlp


def embed(model: Any, batch: Any) -> Any:
    return model(batch[0])


def loss_fn(z: torch.Tensor, batch: Any) -> Any:
    assert len(batch[0]) == len(z)
    loss = cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))
    return loss, {"rows": float(len(z))}


def run(**options: Any) -> autoaccum.FitResult:
    generator = torch.Generator().manual_seed(2)
    held_out = torch.randn(29, 8, generator=generator, dtype=torch.float64)
    model = nn.Sequential(mlp(torch.float64), nn.Dropout(0.5))
    return autoaccum.fit(
        model, (held_out + 1,), effective_batch=12, loss_scope="window", embed=embed, loss_fn=loss_fn, steps=2,
        validation_data=(held_out,), device=DEVICE, progress=False, verify=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), **options,
    )  # fmt: skip


def expected() -> float:
    held_out = there(torch.randn(29, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    model = there(mlp(torch.float64))
    total = 0.0
    for start in (0, 12, 24):
        window = held_out[start : start + 12]
        total += loss_fn(model(window), (window,))[0].item() * len(window)
    return total / 29


@pytest.mark.parametrize("micro_batch", [1, 5, 7, 12])
def test_the_loss_is_that_of_windows(micro_batch: int) -> None:
    (event,) = [event for event in run(micro_batch=micro_batch).events if isinstance(event, Validated)]
    assert event.loss == pytest.approx(expected(), rel=1e-12)
    assert event.num_samples == 29
    assert event.metrics["rows"] == pytest.approx((12 * 12 + 12 * 12 + 5 * 5) / 29)


def test_memory_that_runs_out_makes_smaller_pieces_of_the_same_loss() -> None:
    with Operations() as operations:
        run(micro_batch=5)
    last = len(operations.names)
    met = 0
    for back in range(1, 200, 23):
        with oom_at(last - back):
            result = run(micro_batch=5)
        met += any(
            isinstance(event, autoaccum.events.OutOfMemory) and event.phase == "validation" for event in result.events
        )
        (event,) = [event for event in result.events if isinstance(event, Validated)]
        assert event.loss == pytest.approx(expected(), rel=1e-12)
    assert met
