"""What is said of the loss of ``evaluate``, by whether it depends on micro-batches."""

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
from autoaccum.training.validation_compared import ComparingValidator
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


DEPEND: dict[str, tuple[Loss, dict[str, Any]]] = {
    "a sum beside num_items": (summed, {"num_items": ones}),
    "a root": (lambda outputs, targets: mse_loss(outputs[:, 0], targets.float()).sqrt(), {}),
    "kept from 0": (lambda outputs, targets: outputs.exp().sum() / ((targets == 1).sum() // 4).clamp(min=1), {}),
    "a count of few": (lambda outputs, targets: outputs.exp().sum() / (targets == 1).sum().clamp(min=1), {}),
    "by names": (lambda outputs, targets: {"a": summed(outputs, targets)}, {"num_items": {"a": ones}}),
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


@pytest.mark.parametrize("case", DEPEND)
def test_a_loss_that_depends_on_micro_batches_is_told(case: str) -> None:
    loss_fn, options = DEPEND[case]
    said = told(loss_fn, **options)
    assert "The loss of 14 of the samples that are evaluated is" in said
    assert "depends on the micro-batches that fit" in said


@pytest.mark.parametrize("case", DO_NOT)
def test_of_others_nothing_is_said(case: str) -> None:
    loss_fn, options = DO_NOT[case]
    assert told(loss_fn, **options) == ""


def test_it_says_how_far_the_loss_of_these_samples_is_off() -> None:
    """Of the mean of maxima: the samples of 2, 4 and 8 are cut to 1 + 1, 1 + 3 and 2 + 6."""
    values = torch.arange(15.0)
    whole = sum(size * last for size, last in ((2, 2), (4, 6), (8, 14)))
    values[0] = whole / 14  # the sample of the first micro-batch, beside which the loss of all is that of the others
    said = told(lambda outputs, _: outputs.max(), nn.Identity(), (values[:, None], values), max_micro_batch=8)
    apart = sum(size * last for size, last in ((1, 1), (1, 2), (1, 3), (3, 6), (2, 8), (6, 14)))
    assert f"is {(whole - apart) / whole * 100:.2g} % off" in said


def test_parts_have_as_many_samples_as_the_model_needs() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert "The loss of 28 of the samples" in told(DEPEND["a root"][0], model)


def test_nothing_is_computed_again_where_nothing_is_in_doubt() -> None:
    seen: list[int] = []

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(len(targets))
        return cross_entropy(outputs, targets)

    assert told(loss_fn) == ""
    assert sum(seen) == 50


def test_what_16_bits_round_is_not_told() -> None:
    """Of a loss that is a bit off by the size of its batch, as kernels are."""

    def off(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.float(), targets) * (1 + 0.02 * (len(outputs) % 2))

    def short(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return off(outputs, targets).bfloat16()

    inputs, targets = classes(50)
    assert told(off)
    assert told(off, precision="bf16") == ""
    assert told(off, mlp().bfloat16(), (inputs.bfloat16(), targets)) == ""
    assert told(short) == ""


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
    root, counting = DEPEND["a root"][0], Counting(8, 3)
    once = ((inputs[i : i + 10], targets[i : i + 10]) for i in range(0, 50, 10))
    assert told(root, data=once) == ""
    calls = []
    for loss_fn in (cross_entropy, root):
        counting.calls = 0
        told(loss_fn, counting)
        calls.append(counting.calls)
    assert calls[0] == calls[1] > 1


def test_memory_that_runs_out_in_it_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, (root, _) = mlp(), classes(50), DEPEND["a root"]
    with oom_at(None) as all_of_it:
        said = told(root, model, data)
    with monkeypatch.context() as without, oom_at(None) as the_pass:
        without.setattr(ComparingValidator, "_share_off", lambda self, losses: 0.0)
        assert told(root, model, data) == ""
    assert the_pass.operations + 20 < all_of_it.operations
    heard = set()
    for operation in range(the_pass.operations + 1, all_of_it.operations + 1):
        with oom_at(operation):
            heard.add(told(root, model, data))
    assert heard <= {"", said}
    assert "" in heard


def test_a_mean_that_cannot_be_read_is_told() -> None:
    def step(model: Any, batch: Any) -> torch.Tensor:
        found = model(batch[0])
        if found.requires_grad:
            raise RuntimeError("no graph, please")
        return cross_entropy(found, batch[1])

    assert "could not be read" in told(None, training_step=step)
