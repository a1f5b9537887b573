"""Tensors that an optimizer trains and no module holds, as SAC's temperature is: exact, rolled back, resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum import Accumulator, errors
from autoaccum.events import Event, Notice, OutOfMemory, Verified
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import relative_error

COUNT = 22


def data(num_samples: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(num_samples, 5, generator=generator, dtype=torch.float64),
        torch.randn(num_samples, 1, generator=generator, dtype=torch.float64),
    )


def critic() -> nn.Module:
    torch.manual_seed(0)
    return there(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double())  # type: ignore[no-any-return]


def temperature() -> torch.Tensor:
    return torch.full((1,), 0.3, dtype=torch.float64, requires_grad=True, device=DEVICE)


Step = Callable[[Any, Any], torch.Tensor]


def mean_step(log_alpha: torch.Tensor) -> Step:
    """A critic's loss, and the temperature's as SAC has it: the entropies are data to it."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        values = model(inputs)
        entropy = -values.detach() - 0.5
        return mse_loss(values, targets) - (log_alpha * entropy).mean()

    return step


def sum_step(log_alpha: torch.Tensor) -> Step:
    def step(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        values = model(inputs)
        return ((values - targets) ** 2).sum() - (log_alpha * (values.detach() + 0.5)).sum()

    return step


def penalised_mean_step(log_alpha: torch.Tensor) -> Step:
    def step(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return mse_loss(model(inputs), targets) * log_alpha.exp().sum() - 0.1 * log_alpha.sum()

    return step


STEPS = {step.__name__: step for step in (mean_step, sum_step, penalised_mean_step)}


def by_hand(make: Callable[[torch.Tensor], Step], *, is_frozen: bool = False) -> tuple[list[torch.Tensor], float]:
    model, log_alpha = critic(), temperature()
    model.requires_grad_(not is_frozen)
    loss = make(log_alpha)(model, there(data()))
    loss.backward()
    return [p.grad for p in (*model.parameters(), log_alpha) if p.grad is not None], loss.item()


@pytest.mark.weighted
@pytest.mark.device(every=4)
@pytest.mark.parametrize("micro_batch", [1, 3, 7, COUNT, "auto"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_exact(name: str, micro_batch: Any) -> None:
    expected, loss = by_hand(STEPS[name])
    model, log_alpha = critic(), temperature()
    optimizer = torch.optim.SGD([*model.parameters(), log_alpha], lr=0.0)
    accumulator = Accumulator(model, optimizer, training_step=STEPS[name](log_alpha), micro_batch=micro_batch)
    for _ in range(2):  # the second drops the gradient of the first
        found = accumulator.step(data())
        for p, gradient in zip((*model.parameters(), log_alpha), expected, strict=True):
            assert p.grad is not None
            assert relative_error(p.grad, gradient) < 1e-12
    assert found.item() == pytest.approx(loss, rel=1e-12)
    verified = [event for event in accumulator.events if isinstance(event, Verified)]
    assert len(accumulator.micro_batches) == 1 or verified[0].error < 1e-12


@pytest.mark.device
@pytest.mark.parametrize("name", STEPS)
def test_a_loss_is_read_rightly_where_nothing_is_measured(name: str) -> None:
    expected, _ = by_hand(STEPS[name])
    model, log_alpha = critic(), temperature()
    optimizer = torch.optim.SGD([*model.parameters(), log_alpha], lr=0.0)
    accumulator = Accumulator(model, optimizer, training_step=STEPS[name](log_alpha), micro_batch=4, verify=False)
    accumulator.step(data())
    assert not [event for event in accumulator.events if isinstance(event, Notice)]
    assert log_alpha.grad is not None
    assert relative_error(log_alpha.grad, expected[-1]) < 1e-12


@pytest.mark.device
class TestAloneBesideAFrozenModel:
    def test_in_an_accumulator(self) -> None:
        expected, _ = by_hand(mean_step, is_frozen=True)
        model, log_alpha = critic().requires_grad_(False), temperature()
        optimizer = torch.optim.SGD([log_alpha], lr=1.0)
        accumulator = Accumulator(model, optimizer, training_step=mean_step(log_alpha), micro_batch=5)
        before = log_alpha.detach().clone()
        accumulator.step(data())
        assert relative_error(before - log_alpha.detach(), expected[-1]) < 1e-12
        assert [event.error < 1e-12 for event in accumulator.events if isinstance(event, Verified)] == [True]

    def test_in_fit_and_probe(self) -> None:
        expected, _ = by_hand(mean_step, is_frozen=True)
        model, log_alpha = critic().requires_grad_(False), temperature()
        optimizer = torch.optim.SGD([log_alpha], lr=1.0)
        before = log_alpha.detach().clone()
        step = mean_step(log_alpha)
        report = autoaccum.probe(
            model, data(), training_step=step, optimizer=optimizer, device=DEVICE, effective_batch=COUNT
        )
        assert report.max_micro_batch == COUNT
        assert log_alpha.grad is None
        assert torch.equal(log_alpha, before)
        autoaccum.fit(
            model, data(), training_step=step, optimizer=optimizer, effective_batch=COUNT, micro_batch=5,
            device=DEVICE, progress=False,
        )  # fmt: skip
        assert relative_error(before - log_alpha.detach(), expected[-1]) < 1e-12

    def test_a_parameter_that_the_function_holds_is_one_too(self) -> None:
        model, log_alpha = critic().requires_grad_(False), nn.Parameter(temperature().detach())
        optimizer = torch.optim.SGD([log_alpha], lr=1.0)
        Accumulator(model, optimizer, training_step=mean_step(log_alpha), micro_batch=5).step(data())
        assert log_alpha.grad is not None

    def test_those_of_another_model_are_refused_as_ever(self) -> None:
        model, log_alpha = critic(), temperature()
        for is_frozen in (False, True):
            model.requires_grad_(not is_frozen)
            optimizer = torch.optim.SGD(critic().parameters(), lr=1.0)
            with pytest.raises(errors.ForeignOptimizerError):
                Accumulator(model, optimizer, training_step=mean_step(log_alpha))
            with pytest.raises(errors.ForeignOptimizerError):
                autoaccum.fit(
                    model, data(), training_step=mean_step(log_alpha), optimizer=optimizer, effective_batch=4,
                    device=DEVICE, progress=False,
                )  # fmt: skip
        with pytest.raises(errors.NoTrainableParametersError):
            Accumulator(model, torch.optim.SGD([log_alpha.detach()], lr=1.0), loss_fn=mse_loss)
        with pytest.raises(errors.NoTrainableParametersError):
            autoaccum.fit(model, data(), loss_fn=mse_loss, effective_batch=4, device=DEVICE, progress=False)


def stepped(micro_batch: int, around: Any = None) -> tuple[list[torch.Tensor], list[Event], list[tuple[int, ...]]]:
    """Two steps, and what they leave."""
    model, log_alpha = critic(), temperature()
    optimizer = torch.optim.Adam([*model.parameters(), log_alpha], lr=0.1)
    step = mean_step(log_alpha)
    accumulator = Accumulator(model, optimizer, training_step=step, micro_batch=micro_batch, verify=False)
    batch, sizes = data(), []
    with nullcontext() if around is None else around:
        for _ in range(2):
            accumulator.step(batch)
            sizes.append(accumulator.micro_batches)
    return [p.detach().clone() for p in (*model.parameters(), log_alpha)], accumulator.events, sizes


@strides(5)
def test_an_error_of_memory_leaves_no_part_of_its_gradient(stride: int) -> None:
    operations = Operations()
    stepped(8, operations)
    expected: dict[int, list[torch.Tensor]] = {}
    hits = 0
    for place in operations.every(stride):
        try:
            found, events, sizes = stepped(8, oom_at(place))
        except errors.OptimizerOutOfMemoryError:
            continue
        ran_out = [event for event in events if isinstance(event, OutOfMemory) and event.phase == "training"]
        if ran_out and sizes[0] == sizes[1]:  # it was the first window that ran out
            hits += 1
            largest = max(sizes[0])
            if largest not in expected:
                expected[largest] = stepped(largest)[0]
            assert all(torch.equal(a, b) for a, b in zip(found, expected[largest], strict=True)), place
    assert hits > 10


@pytest.mark.device
class TestRunsThatGoOn:
    def fit(self, run_dir: Path | None, **options: Any) -> tuple[torch.Tensor, autoaccum.FitResult]:
        model, log_alpha = critic(), temperature()
        optimizer = torch.optim.AdamW(
            [{"params": list(model.parameters())}, {"params": [log_alpha], "lr": 0.1}], lr=0.01
        )
        result = autoaccum.fit(
            model, data(), training_step=mean_step(log_alpha), optimizer=optimizer, effective_batch=8, micro_batch=3,
            device=DEVICE, progress=False, run_dir=run_dir, epochs=4, **options,
        )  # fmt: skip
        return log_alpha, result

    def test_end_bit_for_bit_as_those_that_were_never_ended(self, tmp_path: Path) -> None:
        expected, whole = self.fit(None)

        def stop(record: Any) -> None:
            if isinstance(record, autoaccum.events.StepReport) and record.step == 5:
                raise autoaccum.StopTraining

        midway, first = self.fit(tmp_path, callbacks=[stop])
        assert len(first.history) == 5
        assert not torch.equal(midway, expected)
        found, second = self.fit(tmp_path)
        assert len(second.history) == len(whole.history) == 12
        assert torch.equal(found, expected)
        assert [report.loss for report in second.history] == [report.loss for report in whole.history]
        for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(p, q)

    def test_are_not_resumed_by_another_tensor(self, tmp_path: Path) -> None:
        """What is in a checkpoint is compared with what is there."""
        from autoaccum.training.trainer import Trainer

        trainers = []
        for shape in ((1,), (2,), None):
            model = critic()
            held = [] if shape is None else [torch.zeros(shape, dtype=torch.float64, requires_grad=True)]
            optimizer = torch.optim.SGD([*model.parameters(), *held], lr=0.1)
            trainers.append(
                Trainer(model, data(), effective_batch=4, loss_fn=mse_loss, optimizer=optimizer, device=DEVICE)
            )
        one, two, none = trainers
        weights, state = one.state_dict()
        assert [tuple(tensor.shape) for tensor in state["tensors"]] == [(1,)]
        with pytest.raises(errors.CheckpointCorruptError, match="tensors cannot be put back"):
            two.load_state_dict(weights, state)
        with pytest.raises(errors.CheckpointCorruptError, match="tensors cannot be put back"):
            none.load_state_dict(weights, state)
        with pytest.raises(errors.CheckpointCorruptError, match="tensors cannot be put back"):
            one.load_state_dict(*none.state_dict())
