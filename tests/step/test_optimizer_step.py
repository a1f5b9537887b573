"""The optimizer's step: what it says where memory runs out in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.memory.devices import memory_of
from autoaccum.step.optimizer_step import Stepper
from autoaccum.testing import simulated_memory
from tests.devices import DEVICE


class Momentum(Optimizer):
    """Somebody's own: it makes its state in the midst of its step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    moved = p.grad.clone()
                else:
                    moved = state["momentum"] * 0.9 + p.grad
                state["momentum"].copy_(moved)
                p.sub_(moved, alpha=0.5)


HERE = memory_of(torch.device(DEVICE))
pytestmark = pytest.mark.usefixtures("made_there")


class TestStepper:
    def trained(self, gradient: float) -> tuple[nn.Parameter, Optimizer]:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), gradient)
        return parameter, torch.optim.SGD([parameter], lr=0.5)

    @pytest.mark.device
    def test_steps(self) -> None:
        parameter, optimizer = self.trained(1.0)
        assert Stepper(optimizer, HERE).take(None, 1, 2**20) is None
        assert parameter.tolist() == [0.5, 0.5]

    @pytest.mark.device
    @pytest.mark.parametrize(("factor", "reason"), [(1.0, None), (float("inf"), "overflowed at a loss scale of 1024")])
    def test_a_scaler_steps_unless_the_gradient_overflowed(self, factor: float, reason: str | None) -> None:
        parameter, optimizer = self.trained(0.0)
        scaler = torch.amp.GradScaler(torch.device(DEVICE).type, init_scale=1024.0)
        scaler.scale((parameter * factor).sum()).backward()
        scaler.unscale_(optimizer)
        found = Stepper(optimizer, HERE).take(scaler, 1, 2**20)
        if reason is None:
            assert (found, parameter.tolist(), scaler.get_scale()) == (None, [0.5, 0.5], 1024.0)
        else:
            assert found is not None
            assert found.endswith(reason)
            assert (parameter.tolist(), scaler.get_scale()) == ([1.0, 1.0], 512.0)

    def test_an_oom_is_told_with_the_step_and_the_memory(self) -> None:
        parameter, optimizer = self.trained(1.0)
        with simulated_memory("1MiB") as device:
            kept = torch.zeros(1000)
            memory = memory_of(torch.device("cpu"))
            tries = []

            def fails() -> None:
                tries.append(None)
                raise torch.OutOfMemoryError("CUDA out of memory.")

            optimizer.step = fails  # type: ignore[assignment, method-assign]
            with pytest.raises(OptimizerOutOfMemoryError, match=r"SGD.step ran out of memory in step 9") as caught:
                Stepper(optimizer, memory).take(None, 9, 2**20)
            assert len(tries) == 1
            assert (caught.value.step, caught.value.limit_bytes) == (9, 2**20)
            assert caught.value.peak_bytes == device.peak >= kept.nbytes
        assert parameter.tolist() == [1.0, 1.0]
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert caught.value.__cause__.__traceback__ is None, "else it would pin what the failed step held"

    def scaler_that_fails_once(self, parameter: nn.Parameter, optimizer: Optimizer) -> torch.amp.GradScaler:
        """It runs out of memory in its first update, after the step."""
        scaler = torch.amp.GradScaler(torch.device(DEVICE).type, init_scale=1024.0)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        update, failures = scaler.update, [torch.OutOfMemoryError("CUDA out of memory.")]

        def fails_once() -> None:
            if failures:
                raise failures.pop()
            update()

        scaler.update = fails_once  # type: ignore[method-assign, assignment]
        return scaler

    @pytest.mark.device
    def test_a_scale_that_cannot_be_updated_is_not_stepped_on_twice(self) -> None:
        parameter, optimizer = self.trained(0.0)
        scaler = self.scaler_that_fails_once(parameter, optimizer)
        assert Stepper(optimizer, HERE).take(scaler, 1, 2**20) is None
        assert parameter.tolist() == [0.5, 0.5]

    @pytest.mark.device
    def test_what_a_step_that_went_well_made_stays_when_the_scale_cannot_be_updated(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = Momentum([parameter])
        scaler = self.scaler_that_fails_once(parameter, optimizer)
        assert Stepper(optimizer, HERE).take(scaler, 1, 2**20) is None
        assert optimizer.state[parameter]["momentum"].tolist() == [1.0, 1.0]

    @pytest.mark.device
    def test_other_errors_come_through(self) -> None:
        _, optimizer = self.trained(1.0)

        def fail() -> None:
            raise KeyError

        optimizer.step = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyError):
            Stepper(optimizer, HERE).take(None, 1, 2**20)
