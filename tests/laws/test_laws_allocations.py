"""Law 2 on a device: memory that runs out at any allocation leaves no mark, whatever it was that asked for it.

An operation may allocate several times: an output, a workspace, what backward keeps. ``test_laws_gpu`` has the faults
between operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import MemoryLimitError, OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory, Validated
from tests import standin
from tests.devices import DEVICE, there
from tests.faults import strides
from tests.models import classes, noisy, same, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm"),
    standin.only_there,
]


def two_terms(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """A mean over targets that are not ignored, and one over numbers."""
    inputs, targets = batch
    logits = model(inputs)
    targets = targets.masked_fill(inputs[:, 0] > 1, -100)
    return {"classes": cross_entropy(logits, targets, ignore_index=-100), "size": 0.1 * logits.square().mean()}


COUNTS = {"classes": lambda batch: (batch[0][:, 0] <= 1).sum(), "size": lambda batch: len(batch[0])}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


RUNS: dict[str, dict[str, Any]] = {
    "momentum, clipped": {"loss_fn": cross_entropy, "optimizer": momentum, "clip_norm": 0.5},
    "Adam, two terms": {"training_step": two_terms, "num_items": COUNTS, "optimizer": torch.optim.Adam},
    "bf16, two terms, clipped": {
        "training_step": two_terms,
        "num_items": COUNTS,
        "precision": "bf16",
        "clip_norm": 0.5,
    },
    "fp16": {"loss_fn": cross_entropy, "precision": "fp16", "optimizer": momentum},
    "data on the device": {"loss_fn": cross_entropy, "optimizer": momentum, "data": there(classes(23))},
}


def trainer(kind: str, micro_batch: Any) -> autoaccum.Trainer:
    options = {"data": classes(23), **RUNS[kind]}
    return autoaccum.Trainer(
        noisy(),
        effective_batch=12,
        micro_batch=micro_batch,
        epochs=1,
        validation_data=classes(9, seed=2),
        progress=False,
        verify=False,
        **options,
    )


def left_by(result: autoaccum.FitResult) -> tuple[list[torch.Tensor], list[float]]:
    """Return all that a run leaves, the device's random state too, and the losses of its validations."""
    losses = [event.loss for event in result.events if isinstance(event, Validated)]
    assert len(losses) == 1
    return [*state_of(result), torch.get_device_module().get_rng_state()], losses


class Clean:
    """What runs of recorded plans leave, without an OOM."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._known: dict[Any, Any] = {}

    def of(self, plans: tuple[tuple[int, ...], ...]) -> tuple[list[torch.Tensor], list[float]]:
        if plans not in self._known:
            result = trainer(self._kind, plans).fit()
            assert tuple(report.micro_batches for report in result.history) == plans
            self._known[plans] = left_by(result)
        return self._known[plans]


@strides(59)
@pytest.mark.parametrize("kind", list(RUNS))
def test_oom_at_every_allocation(kind: str, stride: int) -> None:
    """Copies, the snapshot, forward, backward, clipping, the step and validation."""
    trainer(kind, 6).fit()  # what libraries keep for as long as the process lives is allocated now
    counting = trainer(kind, 6)
    before = standin.allocations()
    counting.fit()
    count = standin.allocations() - before
    clean, replayed, in_step, phases = Clean(kind), 0, 0, set()
    for number in range(1, count + 1, stride):
        running = trainer(kind, 6)
        with standin.fails_at(number):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                in_step += 1
                continue
        plans = tuple(report.micro_batches for report in result.history)
        assert [sum(plan) for plan in plans] == [12, 11]
        failed = [event for event in result.events if isinstance(event, OutOfMemory)]
        replays = sum(report.replays for report in result.history)
        assert replays == sum(event.phase == "training" for event in failed)
        assert len(failed) <= 1
        left, validated = left_by(result)
        expected = clean.of(plans)
        assert same(left, expected[0]), f"allocation {number} left a mark"
        # After memory ran out validations are cut otherwise, and add up in another order.
        assert validated == pytest.approx(expected[1], rel=1e-6)
        replayed += replays
        phases |= {event.phase for event in failed}
    print(f"{kind}: {count} allocations, every {stride}: {replayed} replayed, {in_step} in the optimizer, {phases}")
    assert "training" in phases
    assert replayed * stride > count // 3
    assert stride > 1 or phases >= {"training", "validation"}


def accumulated(plans: tuple[tuple[int, ...], ...] = ()) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Return what two windows of an ``Accumulator`` leave, and how they were cut; as ``plans`` say, if there are any."""
    model, batch = noisy().to(DEVICE), there(classes(12))
    optimizer = momentum(model.parameters())
    options: dict[str, Any] = {"training_step": with_outputs, "clip_norm": 0.5, "verify": False}
    losses, sizes = [], []
    one = autoaccum.Accumulator(model, optimizer, micro_batch=6, **options)
    for step in range(2):
        if plans:
            one = autoaccum.Accumulator(model, optimizer, micro_batch=max(plans[step]), **options)
        loss = one.step(batch)
        losses += [loss, one.grad_norm, *one.outputs.values()]
        sizes.append(one.micro_batches)
    state = [*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    return [*state, *losses, torch.get_device_module().get_rng_state(), torch.get_rng_state()], sizes


def with_outputs(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return cross_entropy(logits, batch[1]), {"right": (logits.argmax(1) == batch[1]).float().mean()}


def test_oom_at_every_allocation_of_an_accumulator() -> None:
    """What it returns is placed on the device after the window has committed: that is no end of the run either."""
    accumulated()
    before = standin.allocations()
    accumulated()
    count, replayed = standin.allocations() - before, 0
    known: dict[Any, list[Any]] = {}
    # What is made before the first window, the model and the batch among it, is not ours.
    model_and_batch = len(list(noisy().state_dict())) + 2
    for number in range(model_and_batch + 1, count + 1):
        torch.manual_seed(0)
        try:
            with standin.fails_at(number):
                left, sizes = accumulated()
        except (OptimizerOutOfMemoryError, MemoryLimitError):
            continue  # by the optimizer, which is said
        plans = tuple(sizes)
        if plans not in known:
            torch.manual_seed(0)
            known[plans], again = accumulated(plans)
            assert tuple(again) == plans
        assert same(left, known[plans]), f"allocation {number} left a mark"
        replayed += plans != ((6, 6), (6, 6))
    assert replayed > count // 3
