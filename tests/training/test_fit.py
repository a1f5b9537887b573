"""``fit`` is ``Trainer`` called: the same arguments, and a TypeError that speaks of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from tests.devices import DEVICE
from tests.models import classes, noisy, same, state_of


def test_it_takes_what_the_trainer_takes_and_says_what_each_is() -> None:
    taken = inspect.signature(autoaccum.fit).parameters
    assert taken == inspect.signature(autoaccum.Trainer).parameters
    for name in taken:
        assert f"\n    {name}: " in (inspect.getdoc(autoaccum.fit) or ""), name


def test_a_wrong_argument_is_one_of_fit() -> None:
    with pytest.raises(TypeError, match=r"^fit\(\) has no argument 'batch_size'\. Use effective_batch "):
        autoaccum.fit(None, None, effective_batch=4, batch_size=2)  # type: ignore[call-arg, arg-type]


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
def test_a_default_device_of_the_programs_own_is_nothing_to_a_run(request: pytest.FixtureRequest) -> None:
    """What a run keeps on the host stays there: its order, the samples that are measured, what marks parameters."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        """Add a mean over samples and one over those of two classes."""
        inputs, targets = batch
        outputs, counted = model(inputs), targets > 0
        return cross_entropy(outputs, targets) + (outputs[:, 0] * counted).sum() / counted.sum()

    def run(model: nn.Module) -> list[torch.Tensor]:
        options: dict[str, Any] = {"effective_batch": 12, "micro_batch": 5, "epochs": 2, "progress": False}
        return state_of(autoaccum.fit(model, data, training_step=step, device=DEVICE, **options))

    models, data = [noisy(), noisy()], classes(23)
    without = run(models[0])
    if DEVICE != "cpu":  # which is the default anyway
        request.getfixturevalue("made_there")
    assert same(run(models[1]), without)
