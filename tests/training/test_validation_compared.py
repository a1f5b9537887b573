"""The loss of ``evaluate``, whose micro-batches are weighted, or joined, or of which it is said that it depends on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoaccum
from autoaccum.testing import oom_at
from tests.models import classes, mlp, noisy

Loss = Callable[[Any, Any], Any]


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


def ones(batch: Any) -> torch.Tensor:
    return (batch[1] == 1).sum()


def told(loss_fn: Loss | None = cross_entropy, model: Any = None, data: Any = None, **options: Any) -> str:
    """What evaluate says, as a warning at this line, of its loss; "" where nothing."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, data = model or mlp(), classes(50) if data is None else data
        autoaccum.evaluate(model, data, **({"loss_fn": loss_fn} if loss_fn else {}), **options)
    assert all(each.filename == __file__ for each in said)
    return "\n".join(str(each.message) for each in said)


TOLD: dict[str, tuple[Loss, dict[str, Any]]] = {
    "a sum beside num_items": (summed, {"num_items": ones}),
    "by names": (lambda outputs, targets: {"a": summed(outputs, targets)}, {"num_items": {"a": ones}}),
}
JOINED: dict[str, Loss] = {
    "a root": lambda outputs, targets: mse_loss(outputs[:, 0], targets.float()).sqrt(),
    "kept from 0": lambda outputs, targets: outputs.exp().sum() / ((targets == 1).sum() // 4).clamp(min=1),
    "a count of few": lambda outputs, targets: outputs.exp().sum() / (targets == 1).sum().clamp(min=1),
    "two means": lambda outputs, targets: (
        (outputs * (targets == 1)[:, None]).sum() / (targets == 1).sum() + outputs.mean()
    ),
}
DO_NOT: dict[str, tuple[Loss, dict[str, Any]]] = {
    "a mean": (cross_entropy, {}),
    "a sum": (summed, {}),
    "a sum beside num_items": (summed, {"num_items": ones, "reduction": "sum"}),
    "a sum over a constant": (lambda outputs, targets: summed(outputs, targets) / 100, {}),
    "several": (lambda outputs, targets: {"a": cross_entropy(outputs, targets), "b": outputs.square().sum()}, {}),
    "no gradient": (lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(), {}),
    "nothing": (lambda outputs, _: (outputs - 100).relu().square().mean().sqrt(), {}),
    "draws": (lambda outputs, _: (outputs + torch.randn_like(outputs)).square().mean().sqrt(), {}),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_loss_that_depends_on_micro_batches_is_told(case: str) -> None:
    loss_fn, options = TOLD[case]
    said = told(loss_fn, **options)
    assert "The loss of the first 15 samples is" in said
    assert "depends on the micro-batches that fit" in said


@pytest.mark.parametrize("case", JOINED)
def test_one_that_cannot_be_weighted_is_that_of_all_samples(case: str) -> None:
    model, (inputs, targets) = mlp(), classes(50)
    found = autoaccum.evaluate(model, (inputs, targets), loss_fn=JOINED[case], max_micro_batch=60)
    whole = JOINED[case](model(inputs), targets).item()
    assert found.loss == pytest.approx(whole)
    assert told(JOINED[case]) == ""
    # Of more samples than may be run at once it is the mean over windows of as many.
    found = autoaccum.evaluate(model, (inputs, targets), loss_fn=JOINED[case], max_micro_batch=25)
    halves = [JOINED[case](model(inputs[part]), targets[part]).item() for part in (slice(25), slice(25, 50))]
    assert found.loss == pytest.approx(sum(halves) / 2)


def test_data_that_are_read_once_are_not_joined() -> None:
    inputs, targets = classes(50)
    once = ((inputs[i : i + 10], targets[i : i + 10]) for i in range(0, 50, 10))
    assert "depends on the micro-batches that fit" in told(JOINED["a root"], data=once)


@pytest.mark.parametrize("case", DO_NOT)
def test_of_others_nothing_is_said(case: str) -> None:
    loss_fn, options = DO_NOT[case]
    assert told(loss_fn, **options) == ""


def test_it_says_how_far_the_loss_of_these_samples_is_off() -> None:
    """Of sums beside counts that are none of theirs: of samples 0 to 14 they are those of 0, 1 to 2, 3 to 6 and 7 to 14."""
    values = torch.arange(15.0)
    said = told(
        lambda outputs, _: outputs.sum(),
        nn.Identity(),
        (values[:, None], values),
        num_items=lambda batch: len(batch[1]),
    )
    apart = (1 * 0 + 2 * 3 + 4 * 18 + 8 * 84) / 15
    assert f"is {(105 - apart) / 105 * 100:.2g} % off" in said


def test_parts_have_as_many_samples_as_the_model_needs() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert "The loss of the first 30 samples" in told(summed, model, num_items=lambda batch: len(batch[1]))


def test_what_16_bits_round_is_not_told() -> None:
    """Of a loss that is a bit off by the size of its batch, as kernels are."""

    def off(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.float(), targets) * (1 + 0.02 * (len(outputs) % 2))

    def short(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return off(outputs, targets).bfloat16()

    def samples(batch: Any) -> int:
        return len(batch[1])

    inputs, targets = classes(50)
    assert told(off, num_items=samples)
    assert told(off, precision="bf16", num_items=samples) == ""
    assert told(off, mlp().bfloat16(), (inputs.bfloat16(), targets), num_items=samples) == ""
    assert told(short, num_items=samples) == ""


def test_nothing_of_it_remains() -> None:
    """Of the loss, what it draws, what modules keep; and data may be such that are read once."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input)

    def drawn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(outputs[:, 0] + torch.rand(len(outputs)), targets.float()).sqrt()

    model, (inputs, targets) = noisy(), classes(50)
    state = torch.get_rng_state()
    metrics = {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()}
    first = autoaccum.evaluate(model, (inputs, targets), loss_fn=drawn, metrics=metrics)
    assert torch.get_rng_state().equal(state)
    second = autoaccum.evaluate(model, (inputs, targets), loss_fn=drawn)
    assert (first.loss, first.num_samples) == (second.loss, 50)
    counting, calls = Counting(8, 3), []
    for options in ({}, {"num_items": lambda batch: len(batch[1])}):
        counting.calls = 0
        told(cross_entropy, counting, **options)
        calls.append(counting.calls)
    assert calls[0] == calls[1] > 1


def test_memory_that_runs_out_in_it_is_nobodys() -> None:
    model, data, (loss_fn, options) = mlp(), classes(50), TOLD["a sum beside num_items"]
    with oom_at(None) as all_of_it:
        said = told(loss_fn, model, data, **options)
    heard = set()
    for operation in range(1, all_of_it.operations + 1):
        with oom_at(operation):
            heard.add(told(loss_fn, model, data, **options))
    # Of the other micro-batches that are run then it is off by another share.
    assert {text.split(" is ")[0] for text in heard} == {"", said.split(" is ")[0]}


def test_a_mean_that_cannot_be_read_is_told() -> None:
    def step(model: Any, batch: Any) -> torch.Tensor:
        found = model(batch[0])
        if found.requires_grad:
            raise RuntimeError("no graph, please")
        return cross_entropy(found, batch[1])

    assert "could not be read" in told(None, training_step=step)
