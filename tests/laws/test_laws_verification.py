"""Laws 2, 3 and 8 together: faults and ends within a measurement, and what a run that goes on knows of it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import Notice, Resumed, StepReport, Verified
from autoaccum.testing import oom_at
from autoaccum.training.result import FitResult
from tests.devices import DEVICE
from tests.faults import Operations, strides
from tests.models import same, state_of


class Remembering(nn.Module):
    """Draws, counts in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.3)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return self.net(self.drop(inputs))  # type: ignore[no-any-return]


def trainer(micro_batch: Any = 3, model: nn.Module | None = None, **options: Any) -> autoaccum.Trainer:
    torch.manual_seed(5)
    data = torch.randn(12, 3), torch.randint(0, 2, (12,))
    arguments = {"loss_fn": cross_entropy, "effective_batch": 6, "lr": 0.1, "steps": 1, "device": DEVICE} | options
    arguments = {"accumulate": "weighted"} | arguments  # or state that moves with each micro-batch would be joined
    return autoaccum.Trainer(
        Remembering() if model is None else model, data, micro_batch=micro_batch, progress=False, cache=False,
        **arguments,
    )  # fmt: skip


def unmeasured(result: FitResult) -> list[Notice]:
    return [e for e in result.events if isinstance(e, Notice) and "could not be measured" in e.cause]


def verified(result: FitResult) -> list[Verified]:
    return [event for event in result.events if isinstance(event, Verified)]


@strides(19)
@pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
def test_memory_that_runs_out_anywhere_in_a_measurement_leaves_no_mark(stride: int) -> None:
    """At operations of the first window, of its measurement and of its step: the run ends as if nothing had been."""
    train = trainer()
    with Operations() as operations:
        train.fit()
    clean = {}
    ends: Counter[str] = Counter()
    for number in range(1, len(operations.names) + 1, stride):
        train = trainer()
        try:
            with oom_at(number):
                result = train.fit()
        except OptimizerOutOfMemoryError:  # whose step is not repeated
            ends["refused"] += 1
            continue
        plans = tuple(report.micro_batches for report in result.history)
        if plans not in clean:
            clean[plans] = state_of(trainer(list(plans)).fit())
        assert same(state_of(result), clean[plans]), f"operation {number} left a mark"
        assert all(event.passed for event in verified(result)), number
        assert verified(result) or unmeasured(result), number
        ends[f"{verified(result)[0].samples} samples" if verified(result) else "not measured"] += 1
    print(f"{len(operations.names)} operations: {dict(ends)}")
    assert ends["3 samples"] > ends["6 samples"] > 0
    assert not ends["not measured"]
    assert ends["refused"] < 0.1 * ends.total()


# Law 3: a run that was stopped goes on by what was measured, as if it had never been.


def squeezed(model: Any, batch: Any) -> torch.Tensor:
    """A mean over samples whose graph shows, of a single one, nothing that averages."""
    return mse_loss(model(batch[0])[:, :1].squeeze(), batch[1].float().squeeze())


def penalised(model: Any, batch: Any) -> torch.Tensor:
    """A sum over samples, beside a term that stands in it once."""
    return cross_entropy(model(batch[0]), batch[1], reduction="sum") + sum(p.pow(2).sum() for p in model.parameters())


def coupled(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=DEVICE))


def of_noise(model: Any, batch: Any) -> torch.Tensor:
    """Draw other rows in each part, of a generator that nothing watches."""
    return cross_entropy(
        model(batch[0] * torch.as_tensor(np.random.rand(len(batch[0]), 1)).float().to(DEVICE)), batch[1]
    )


def infinite(model: Any, batch: Any) -> torch.Tensor:
    """A mean over samples of one class, of which a micro-batch may hold none."""
    taken = batch[1] == 0
    return cross_entropy(model(batch[0])[taken], batch[1][taken])


SIX = [(3, 2, 1), (1, 1, 4), (2, 2, 2), (3, 3), (5, 1), (4, 2)]
LOSSES: dict[str, tuple[Callable[..., Any], str | None, str, Sequence[int]]] = {
    # loss: (it, the hypothesis that is held, the status of the run, the windows after which it is stopped)
    "a mean over samples": (squeezed, "items", "passed", [3]),
    "a sum and penalties": (penalised, None, "failed", range(1, 5)),
    "one that couples": (coupled, None, "failed", [2]),
    "one that cannot be measured": (of_noise, None, "unmeasured", [2]),
    "a mean over some": (infinite, "items", "passed", [4]),
}
OF_THIS_MOMENT = {
    "_job", "_transaction", "_parameters", "_measure_window", "_verify", "_strict",  # given anew
    "_announce", "_way",  # likewise
    "_sizes", "_number", "_shown", "_failed_on", "_has_tried_joining", "is_trying",  # of the window that runs
    "_remembered", "_remembered_of", "_short_bytes", "_short_way", "_written",  # taken before the next measurement
}  # fmt: skip
"""Attributes of an examiner that a checkpoint need not hold; every other one has to be there again."""


def knowledge(made: autoaccum.Trainer) -> dict[str, Any]:
    """Return all that an examiner knows, attribute by attribute, whatever its ``state_dict`` says."""
    step: Any = made._step
    examiner, transaction = step._examiner, step.transaction
    found = {name: value for name, value in vars(examiner).items() if name not in OF_THIS_MOMENT}
    found["_occasions"] = vars(examiner._occasions)
    found |= {name: getattr(transaction.signs, name) for name in transaction.signs.__slots__}
    return copy.deepcopy(found | {"hypothesis": transaction.hypothesis})


def train(loss: Any, directory: Path, callback: Any) -> tuple[FitResult, autoaccum.Trainer]:
    torch.manual_seed(3)
    np.random.seed(3)
    made = trainer(
        SIX, steps=6, loss_fn=None, training_step=loss, run_dir=directory, checkpoint_every=1, lr=0.01, seed=4,
        callbacks=[lambda event: callback(made, event)],
    )  # fmt: skip
    return made.fit(), made


@pytest.mark.weighted
@pytest.mark.device(every=2)
@pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_a_run_that_goes_on_knows_what_was_measured(name: str, tmp_path: Path) -> None:
    loss, hypothesis, status, stops = LOSSES[name]
    whole, made = train(loss, tmp_path / "whole", lambda made, event: None)
    assert (made._step.transaction.hypothesis, made._step._examiner._occasions.status) == (hypothesis, status)
    for stopped in stops:
        known: list[dict[str, Any]] = []

        def look(made: Any, event: Any, stopped: int = stopped, known: list[Any] = known) -> None:
            if isinstance(event, StepReport) and event.step == stopped and not known:
                known.append(knowledge(made))
                raise autoaccum.StopTraining
            if isinstance(event, Resumed):
                known.append(knowledge(made))

        directory = tmp_path / str(stopped)
        first, _ = train(loss, directory, look)
        torch.manual_seed(99)
        second, _ = train(loss, directory, look)
        assert first.num_steps == stopped
        assert known[0] == known[1]
        assert same(state_of(second), state_of(whole)), stopped
        assert [report.loss for report in second.history] == [report.loss for report in whole.history]
        assert said(second) == said(whole), "measured, and said, once"


def said(result: FitResult) -> list[Any]:
    """Return what was measured and noticed in a run, its first part included."""
    found: list[Any] = []
    for event in result.events:
        if isinstance(event, Verified):
            found.append(dataclasses.replace(event, seconds=0))
        elif isinstance(event, Notice):
            found.append(event)
    return found
