"""Law 2 of docs/laws.md for what is returned beside the loss: each sample's outputs once, wherever memory runs out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory, StepReport, Validated
from autoaccum.testing import oom_at
from tests.devices import DEVICE
from tests.faults import Operations, strides
from tests.models import classes, noisy, same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")

INPUTS, TARGETS = classes(23)
DATA = (torch.arange(23), INPUTS, TARGETS)


def step(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """With the number of each sample, so that one that is there twice, or not at all, is seen."""
    indices, inputs, targets = batch
    logits = model(inputs)
    losses = cross_entropy(logits, targets, reduction="none")
    counted = targets > 0
    return losses.mean(), {
        "index": indices,
        "logits": logits[:, 0],
        "mean": losses.mean(),
        "counted": (losses[counted].mean(), counted.sum()),
        "one": 1,
    }


def trainer(micro_batch: Any) -> autoaccum.Trainer:
    return autoaccum.Trainer(
        noisy(),
        DATA,
        training_step=step,
        effective_batch=12,
        micro_batch=micro_batch,
        clip_norm=0.5,
        validation_data=tuple(tensor[:7] for tensor in DATA),
        device=DEVICE,
        progress=False,
    )


def values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs to compare to the bit."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}


def of_windows(result: autoaccum.FitResult) -> list[Any]:
    return [(report.loss, values(report.outputs)) for report in result.history]


def served() -> list[list[int]]:
    """The numbers of each window's samples, as the data yields them."""
    seen: list[int] = []

    def watching(model: Any, batch: Any) -> torch.Tensor:
        if model.training:
            seen.extend(batch[0].tolist())
        return cross_entropy(model(batch[1]), batch[2])

    whole: dict[str, Any] = {"micro_batch": 12, "effective_batch": 12, "verify": False, "progress": False}
    autoaccum.fit(noisy(), DATA, training_step=watching, device=DEVICE, **whole)
    return [seen[:12], seen[12:]]


@strides(397)
def test_an_oom_at_every_operation_gives_each_samples_outputs_once(stride: int) -> None:
    with Operations() as operations:
        trainer(6).fit()
    windows, clean, replayed = served(), {}, 0
    for operation in operations.every(stride, 7):
        records: list[Any] = []
        running = trainer(6)
        running._callbacks.append(records.append)
        with oom_at(operation):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                continue
        replayed += sum(report.replays for report in result.history)
        assert len([event for event in result.events if isinstance(event, OutOfMemory)]) <= 1
        reports = [record for record in records if isinstance(record, StepReport)]
        assert [report.outputs["index"].tolist() for report in reports] == windows, f"operation {operation}"
        plans = tuple(report.micro_batches for report in reports)
        if plans not in clean:
            without = trainer(plans).fit()
            clean[plans] = of_windows(without), state_of(without)
        expected, state = clean[plans]
        assert of_windows(result) == expected, f"operation {operation} is to be seen in the outputs"
        assert same(state_of(result), state), f"operation {operation} left a mark"
        # The cut of the pass may be another one, and rounds otherwise.
        (validated,) = [event for event in result.events if isinstance(event, Validated)]
        assert list(validated.metrics) == ["mean", "counted", "one"]
        assert validated.metrics["mean"] == pytest.approx(validated.loss, rel=1e-6)
    print(f"{replayed} faults replayed, of {len(operations.names)} operations; plans {sorted(clean)}")
    assert replayed * stride > 300


@pytest.mark.device
def test_a_run_with_outputs_is_bit_for_bit_the_run_without() -> None:
    with_outputs = trainer(5).fit()
    without = autoaccum.fit(
        noisy(),
        DATA,
        training_step=lambda model, batch: step(model, batch)[0],
        effective_batch=12,
        micro_batch=5,
        clip_norm=0.5,
        validation_data=tuple(tensor[:7] for tensor in DATA),
        device=DEVICE,
        progress=False,
    )
    assert same(state_of(with_outputs), state_of(without))
    assert all(report.outputs == {} for report in without.history)
