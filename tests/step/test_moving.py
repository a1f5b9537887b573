"""What forwards change in attributes is put back with a window that runs again, and comes back with a run."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import NonFiniteLossError
from autoaccum.events import Notice
from autoaccum.step.snapshot import Moving
from autoaccum.testing import oom_at
from tests.devices import there

DOUBLE = torch.float64


class Meter:
    """A counter of a user's own, which is no module."""

    def __init__(self) -> None:
        self.count, self.means = 0, [torch.zeros((), dtype=DOUBLE)]


class Keeping(nn.Module):
    """A net whose outputs depend on all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 1, dtype=DOUBLE)
        self.samples, self.mean = 0, 0.0
        self.places = {"at": 0, "seen": [0]}
        self.array = np.zeros(3)
        self.queue = torch.zeros(16, 6, dtype=DOUBLE)
        self.replaced = torch.zeros(6, dtype=DOUBLE)
        self.meter = Meter()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs.detach()
        kept = self.samples + self.mean + self.places["at"] + self.array.sum() + self.queue.mean().item()
        kept += self.replaced.mean().item() + self.meter.count + self.meter.means[0].item()
        kept += getattr(self, "late", 0)
        self.samples += len(inputs)
        self.mean = 0.9 * self.mean + 0.1 * float(found.mean())
        self.places["at"] = (self.places["at"] + len(inputs)) % 16
        self.places["seen"].append(len(inputs))
        self.array += 1
        self.queue = self.queue.to(found)
        self.queue[: len(found)].lerp_(found, 0.5)
        self.replaced = 0.5 * self.replaced.to(found) + found.mean(0)
        self.meter.count += 1
        self.meter.means[0] = 0.5 * self.meter.means[0].to(found) + found.mean()
        self.late = getattr(self, "late", 0) + 1
        return self.net(inputs) + 0.01 * kept

    def kept(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        return own | vars(own.pop("meter"))


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batches(count: int) -> list[torch.Tensor]:
    return list(there(torch.randn(count, 12, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))))


def trained(fails_in: int | None, operation: int, accumulate: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    model = there(Keeping())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4, training_step=step,
            accumulate=accumulate, verify=accumulate == "joined",
        )  # fmt: skip
        for number, batch in enumerate(batches(5)):
            if number == fails_in:
                with oom_at(operation):
                    accumulator.step(batch)
            else:
                accumulator.step(batch)
    return model.kept(), [p.detach() for p in model.parameters()]


@pytest.mark.device
@pytest.mark.parametrize("accumulate", ["weighted", "joined"])
@pytest.mark.parametrize("fails_in", [0, 2, 4])
def test_memory_that_runs_out_leaves_attributes_as_if_it_had_not(fails_in: int, accumulate: str) -> None:
    kept, parameters = trained(None, 0, accumulate)
    for operation in (9, 40):
        found, other = trained(fails_in, operation, accumulate)
        if accumulate == "joined":
            assert str(found) == str(kept)
            for p, expected in zip(other, parameters, strict=True):  # fewer rows at once may round otherwise
                torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-14)
        # Of weighted micro-batches, which are smaller from there on, the others depend on how many there are.
        assert (found["samples"], found["places"]["at"]) == (60, 60 % 16)


def test_a_run_that_goes_on_finds_them(tmp_path: Path) -> None:
    def run(name: str, *steps: int) -> tuple[Keeping, list[str]]:
        for count in steps:
            model = Keeping()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
                result = autoaccum.fit(
                    model, torch.cat(batches(6)).cpu(), effective_batch=12, micro_batch=4, steps=count, device="cpu",
                    progress=False, training_step=step, accumulate="weighted", verify=False, run_dir=tmp_path / name,
                )  # fmt: skip
        return model, [event.cause for event in result.events if isinstance(event, Notice)]

    (whole, _), (parts, told) = run("whole", 6), run("parts", 3, 6)
    assert str(parts.kept()) == str(whole.kept())
    assert all(map(torch.equal, parts.parameters(), whole.parameters()))
    assert not [cause for cause in told if cause.startswith("Forwards change")]


class Hidden(nn.Linear):
    """A layer that keeps what no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(6, 1, dtype=DOUBLE)
        self.last = [Meter()]
        self.sizes = deque([0], maxlen=2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = [Meter()]
        self.sizes.append(len(inputs))
        self.outputs = super().forward(inputs)
        return self.outputs


def test_what_is_not_saved_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": "weighted", "verify": False, "device": "cpu", "progress": False}
    with pytest.warns(autoaccum.AutoaccumWarning, match="Forwards change last, which checkpoints cannot store"):
        autoaccum.fit(
            Hidden(), torch.cat(batches(3)).cpu(), effective_batch=12, micro_batch=4, training_step=step,
            run_dir=tmp_path, **options,
        )  # fmt: skip


def test_models_without_such_attributes_pay_in_the_first_windows_alone() -> None:
    moving = Moving([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))])
    taken = []
    for _ in range(9):
        moving.take()
        taken.append(bool(moving._taken))
    assert taken == [True, True, False, True, False, False, False, True, False]


def test_data_and_what_holds_the_model_are_left_alone() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.steps = model, 0

    model: Any = nn.Linear(2, 2)
    model.trainer, model.numbers = Trainer(model), iter(range(9))
    moving = Moving([model])
    moving.take()
    model.trainer.steps, _ = 1, next(model.numbers)
    moving.restore()
    assert model.trainer.steps == 1
    assert next(model.numbers) == 1


class ActNorm(nn.Module):
    """A layer that sets its parameters by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shift = (nn.Parameter(torch.zeros(6, dtype=DOUBLE)) for _ in range(2))
        self.is_set = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.log_scale.copy_(-inputs.std(0).log())
                self.shift.copy_(-inputs.mean(0))
            self.is_set = True
        return ((inputs + self.shift) * self.log_scale.exp()).sum(1, keepdim=True)


@pytest.mark.device
@pytest.mark.measured
@pytest.mark.filterwarnings("ignore:std")
def test_parameters_that_a_first_forward_sets_are_as_they_were() -> None:
    model = there(ActNorm())
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=1, training_step=step, accumulate="weighted",
    )  # fmt: skip
    with pytest.raises(NonFiniteLossError, match="micro-batches of 1 and more samples") as raised:
        accumulator.step(batches(1)[0])
    assert "the model is as it was" in str(raised.value)
    assert not model.is_set
    assert not any(p.any() for p in model.parameters())


@pytest.mark.device
@pytest.mark.measured
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
@pytest.mark.parametrize("operation", [15, 40])
def test_they_are_set_by_what_fits(operation: int) -> None:
    found = []
    for fails in (False, True):
        model = there(ActNorm())
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4 if fails else 2, training_step=step,
            accumulate="weighted",
        )  # fmt: skip
        with oom_at(operation if fails else None):
            accumulator.step(batches(1)[0])
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
