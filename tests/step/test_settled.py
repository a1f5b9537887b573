"""Settled windows are run as those before them, to the same bits, and any that differs is run as if it were new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory, StepReport
from autoaccum.step.step import Step
from autoaccum.step.transaction import Transaction
from autoaccum.testing import oom_at
from tests.faults import Operations
from tests.models import same, state_of

pytestmark = [pytest.mark.measured, pytest.mark.filterwarnings("ignore:Forwards write to 1.mean")]

Loss = Callable[[Any, Any], torch.Tensor]

torch.manual_seed(0)
DATA = torch.randn(96, 6), torch.randint(3, (96,))
HOLES = DATA[1].clone()
HOLES[60] = -100  # in window 6 of 12 samples


class Seen(nn.Module):
    """Keeps the mean of what it has seen, which a replay has to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), Seen(), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def squared(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square().mean()


def penalised(model: Any, batch: Any) -> torch.Tensor:
    return mean(model, batch) + 0.01 * model[0].weight.square().sum()


class Counting:
    """Counts the micro-batches of settled windows, and the windows that turned out to be none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.micro_batches = self.refused = 0
        add, unsettle = Transaction.add_settled, Transaction.unsettle

        def added(*arguments: Any) -> Any:
            self.micro_batches += 1
            return add(*arguments)

        def unsettled(*arguments: Any) -> Any:
            self.refused += 1
            return unsettle(*arguments)

        monkeypatch.setattr(Transaction, "add_settled", added)
        monkeypatch.setattr(Transaction, "unsettle", unsettled)


def trainer(step: Loss = mean, micro_batch: Any = 4, data: Any = DATA, **options: Any) -> autoaccum.Trainer:
    given: dict[str, Any] = {"effective_batch": 12, "epochs": 2, "clip_norm": 0.5, "progress": False}
    given |= {"accumulate": "weighted", "shuffle": False} | options
    return autoaccum.Trainer(model(), data, training_step=step, micro_batch=micro_batch, device="cpu", **given)


def run(
    monkeypatch: pytest.MonkeyPatch, *arguments: Any, never: bool = False, **options: Any
) -> tuple[list[Any], list[Any]]:
    with monkeypatch.context() as patch:
        if never:
            patch.setattr(Step, "_expected_pieces", lambda *_: None)
        running = trainer(*arguments, **options)
        result = running.fit()
    told = [str((report.loss, report.grad_norm, report.micro_batches)) for report in result.history]
    return [*told, *[type(event) for event in result.events]], state_of(running)


@pytest.mark.parametrize("micro_batch", [4, 5, 12])
@pytest.mark.parametrize("step", [mean, total, squared, penalised])
def test_they_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, step: Loss, micro_batch: int) -> None:
    counting = Counting(monkeypatch)
    reduction = "sum" if step is total else None
    found = run(monkeypatch, step, micro_batch, reduction=reduction)
    # Of 16 windows the first three are measured, and the tenth, if they are cut; two are seen before one is settled.
    assert counting.micro_batches == (14 if micro_batch == 12 else 12 * 3)
    expected = run(monkeypatch, step, micro_batch, reduction=reduction, never=True)
    assert counting.micro_batches == (14 if micro_batch == 12 else 12 * 3)
    assert counting.refused == 0
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["count", "root", "nodes", "none", "nan", "mode", "layer"])
def test_one_that_differs_is_run_anew(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One micro-batch of window 6, of a loss that was the same until then."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        is_other = bool((batch[0] == DATA[0][60]).all(1).any())
        if kind == "root":  # with as many nodes
            return total(model, batch) + 0 if is_other else total(model, batch) * 1
        if kind == "nan":
            return mean(model, (batch[0] * (float("nan") if is_other else 1), batch[1]))
        loss = mean(model, batch)
        if is_other and kind == "nodes":
            return F.cross_entropy(model[:-1](batch[0]) @ model[-1].weight.t() + model[-1].bias, batch[1])
        if kind == "none":  # one of four samples counts, but none of this micro-batch
            counts = (torch.arange(len(batch[1])) == 0) & ~(batch[0] == DATA[0][60]).all(1)
            each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (each * counts).sum() / counts.sum().clamp(min=1)
        return loss

    def change(record: Any, running: autoaccum.Trainer) -> None:
        if isinstance(record, StepReport) and record.step == 5:
            if kind == "mode":
                running.model[3].eval()
            elif kind == "layer":
                running.model[2] = nn.Tanh()

    data = (DATA[0], HOLES) if kind == "count" else DATA
    options: dict[str, Any] = {"data": data, "epochs": 1, "callbacks": [change]}
    options |= {"reduction": "sum"} if kind == "root" else {}
    counting = Counting(monkeypatch)
    found = run(monkeypatch, step, **options)
    assert counting.micro_batches > 0
    assert counting.refused == 1
    expected = run(monkeypatch, step, never=True, **options)
    assert found[0] == expected[0]
    assert kind == "nan" or same(found[1], expected[1])


def test_memory_that_runs_out_in_one_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    with Operations() as operations:
        trainer(epochs=1, verify=False).fit()
    clean: dict[Any, Any] = {}
    replayed = 0
    last = len(operations.names)
    for operation in range(last // 2, last * 3 // 4, 2):  # of windows 5 and 6
        running, counting.micro_batches = trainer(epochs=1, verify=False), 0
        with oom_at(operation):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                continue
        assert counting.micro_batches > 6
        replayed += sum(report.replays for report in result.history)
        assert len([event for event in result.events if isinstance(event, OutOfMemory)]) <= 1
        plans = tuple(report.micro_batches for report in result.history)
        if plans not in clean:
            without = trainer(micro_batch=plans, epochs=1, verify=False)
            clean[plans] = without.fit().history, state_of(without)
        history, state = clean[plans]
        assert [report.loss for report in result.history] == [report.loss for report in history]
        assert same(state_of(running), state), f"operation {operation} left a mark"
    assert replayed > 60


def test_a_run_that_is_stopped_between_them_ends_as_one_that_is_not(tmp_path: Path) -> None:
    straight = trainer()
    straight.fit()

    def stop(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == 7:
            raise autoaccum.StopTraining

    trainer(run_dir=tmp_path, checkpoint_every=1, callbacks=[stop]).fit()
    resumed = trainer(run_dir=tmp_path, checkpoint_every=1)
    resumed.fit()
    assert same(state_of(resumed), state_of(straight))


def test_an_error_in_one_names_its_micro_batch() -> None:
    def step(model: Any, batch: Any) -> torch.Tensor:
        if bool((batch[0] == DATA[0][60]).all(1).any()):
            raise ValueError("no")
        return mean(model, batch)

    running = trainer(step, epochs=1)
    with pytest.raises(ValueError, match="no") as caught:
        running.fit()
    assert "(samples 0 to 3)" in str(caught.value.__notes__)
    assert running.step == 5
    assert all(p.grad is None for p in running.model.parameters())


def test_counts_that_differ_settle_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    targets = DATA[1].clone()
    targets[::5] = -100
    run(monkeypatch, data=(DATA[0], targets))
    assert counting.micro_batches == 0
