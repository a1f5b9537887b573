"""What a run leaves to its caller."""

from __future__ import annotations

import dataclasses

import pytest
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.training.result import FitResult
from tests.models import classes, mlp


def test_it_is_what_fit_returns_and_cannot_be_changed() -> None:
    model = mlp()
    result = autoaccum.fit(
        model, classes(20), effective_batch=8, micro_batch=3, loss_fn=cross_entropy, device="cpu", progress=False
    )
    assert type(result) is autoaccum.FitResult is FitResult
    assert (result.num_steps, result.num_samples, len(result.history)) == (3, 20, 3)
    assert result.plan.sizes == (3, 3, 2)
    assert result.model is model
    assert {id(p) for group in result.optimizer.param_groups for p in group["params"]} == set(
        map(id, model.parameters())
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_steps = 4  # type: ignore[misc]
