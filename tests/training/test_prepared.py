"""Optimizers that Accelerate has prepared; the real ones are in tests/integrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum import errors
from autoaccum.training.accumulator import _unprepared as unprepared


class AcceleratedOptimizer:
    """One of its name, with what is asked of it."""

    def __init__(self, optimizer: Any, steps: int = 1, scaler: Any = None) -> None:
        self.optimizer, self.scaler, self.gradient_state = optimizer, scaler, SimpleNamespace(num_steps=steps)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_one_within_is_returned_and_any_other_as_it_is(optimizer: Any) -> None:
    assert unprepared(optimizer) is optimizer
    assert unprepared(AcceleratedOptimizer(optimizer)) is optimizer
    assert unprepared("no optimizer") == "no optimizer"


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"steps": 4}, "gradient_accumulation_steps"), ({"scaler": object()}, "mixed_precision")],
)
def test_what_leaves_out_steps_or_scales_losses_is_refused(optimizer: Any, options: Any, argument: str) -> None:
    with pytest.raises(errors.ConflictingArgumentsError) as caught:
        unprepared(AcceleratedOptimizer(optimizer, **options))
    assert caught.value.argument == argument
