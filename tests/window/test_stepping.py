"""The optimizer's step: what it leaves where memory runs out in it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.memory.devices import memory_of
from autoaccum.testing import oom_at, simulated_memory
from autoaccum.window.optimizers import allocate_state
from autoaccum.window.stepping import Stepper
from tests.devices import DEVICE
from tests.faults import Operations


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


class Pointers(Optimizer):
    """One whose kernel is given bare pointers, as those of extensions are: no counter moves."""

    fails = False

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.detach().numpy()[:] -= 0.5
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")


class Tracker:
    def __init__(self) -> None:
        self.seen = 0


class Counts(Optimizer):
    """It draws, and counts on itself and below, before it writes to anything."""

    def __init__(self, parameters: list[nn.Parameter], opaque: object = None) -> None:
        super().__init__(parameters, {"lr": 0.5, "taken": 0})
        self.taken, self.names, self.tracker, self.opaque = 0, ["a"], Tracker(), opaque
        self.generator = torch.Generator().manual_seed(5)

    def count(self) -> None:
        self.taken += 1
        self.names[0] += "b"
        self.tracker.seen += 1
        self.param_groups[0]["taken"] += 1
        if self.taken == 3:
            self.late = True

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.count()
        draws = (
            random.random() + float(np.random.rand()) + float(torch.rand((), generator=self.generator, device="cpu"))
        )
        for p in self.param_groups[0]["params"]:
            noise = torch.rand(()) + draws + self.taken + self.tracker.seen + self.param_groups[0]["taken"]
            p.sub_(noise * len(self.names[0]))


class ThroughData(Optimizer):
    """It decays through ``.data``, which moves no counter, and then writes by an operation that moves one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            decay(p)
            p.add_(p.grad * -0.5)


def decay(p: torch.Tensor) -> None:
    p.data.mul_(0.9)


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
            assert len(tries) == 3
            assert (caught.value.step, caught.value.limit_bytes) == (9, 2**20)
            assert caught.value.peak_bytes == device.peak >= kept.nbytes
        assert caught.value.is_untouched
        assert "the parameters are those from before the step" in str(caught.value)
        assert parameter.tolist() == [1.0, 1.0]
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert caught.value.__cause__.__traceback__ is None, "else it would pin what the failed step held"

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize(
        "name", sorted({"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "SparseAdam", "Adafactor"})
    )
    def test_an_oom_at_any_operation_is_tried_again_or_ends_it(self, name: str, foreach: bool) -> None:
        """It never steps twice: what was written before it ran out is not written again."""
        if foreach and name == "SparseAdam":
            pytest.skip("has no such implementation")

        def stepper(events: list[Any] | None = None) -> tuple[Stepper, Optimizer, list[nn.Parameter]]:
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4, 2))]
            for p in parameters:
                p.grad = torch.randn_like(p)
                if name == "SparseAdam":
                    p.grad = p.grad.to_sparse(1)
            options = {} if name == "SparseAdam" else {"foreach": foreach}
            optimizer: Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)
            allocate_state(optimizer)
            return Stepper(optimizer, HERE, (events if events is not None else []).append), optimizer, parameters

        stepping, optimizer, expected = stepper()
        with Operations() as operations:
            stepping.take(None, 1, 2**20)
        state = str(optimizer.state_dict())
        again = 0
        for operation in range(1, len(operations.names) + 1):
            events: list[Any] = []
            stepping, optimizer, parameters = stepper(events)
            with oom_at(operation):
                try:
                    stepping.take(None, 1, 2**20)
                except OptimizerOutOfMemoryError:
                    continue
            again += 1
            assert [event.phase for event in events] == ["optimizer"]
            assert all(map(torch.equal, parameters, expected))
            assert str(optimizer.state_dict()) == state
        assert 1 <= again < len(operations.names), (again, len(operations.names))

    @pytest.mark.device
    def test_state_that_a_failed_step_began_is_taken_out(self) -> None:
        """Of an optimizer that is somebody else's, once its writes are known to be counted."""
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        optimizer = Momentum(parameters)
        stepping = Stepper(optimizer, HERE)
        parameters[0].grad = torch.ones(2)
        stepping.take(None, 1, 2**20)
        parameters[1].grad = torch.ones(2)
        parameters[0].grad = None
        with oom_at(2):  # the first made its buffer
            stepping.take(None, 2, 2**20)
        assert [p.tolist() for p in parameters] == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]]

    def test_of_writes_that_are_not_counted_nothing_is_tried_again(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer = Pointers([parameter])
        stepping = Stepper(optimizer, HERE)
        stepping.take(None, 1, 2**20)
        optimizer.fails = True
        with pytest.raises(OptimizerOutOfMemoryError, match="may be half-stepped"):
            stepping.take(None, 2, 2**20)

    def run(self, make: Any, operation: int | None = None) -> tuple[list[float], str, int]:
        """Take three steps, the second of which may run out of memory; return where they end and how often it did."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        parameter, events = nn.Parameter(torch.ones(2)), list[Any]()
        optimizer = make([parameter])
        stepping = Stepper(optimizer, HERE, events.append)
        for step in (1, 2, 3):
            parameter.grad = torch.ones(2)
            with oom_at(operation) if step > 1 and operation else nullcontext():
                stepping.take(None, step, 2**20)
        own = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | list | Tracker)}
        return parameter.tolist(), str([own["taken"], own["names"], own["tracker"].seen]), len(events)

    @pytest.mark.device
    def test_a_step_that_is_tried_again_draws_and_counts_the_same(self) -> None:
        expected = self.run(Counts)
        for operation in (1, 2, 3):  # before it has written
            *found, retries = self.run(Counts, operation)
            assert (*found, 0) == expected
            assert retries == 2

    @pytest.mark.device
    def test_what_nobody_can_look_into_is_not_tried_again(self) -> None:
        with pytest.raises(OptimizerOutOfMemoryError, match="may be half-stepped"):
            self.run(lambda parameters: Counts(parameters, opaque=iter([1, 2])), 1)

    @pytest.mark.device
    def test_writes_through_data_are_not_tried_again(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        stepping = Stepper(ThroughData([parameter]), HERE)
        parameter.grad = torch.ones(2)
        stepping.take(None, 1, 2**20)
        with oom_at(2), pytest.raises(OptimizerOutOfMemoryError, match="may be half-stepped"):
            stepping.take(None, 2, 2**20)

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
    @pytest.mark.parametrize("in_place", [True, False])
    def test_a_step_that_wrote_to_gradients_is_not_tried_again(self, in_place: bool) -> None:
        """Else a hook would clip them twice, and a step add the weight decay twice."""
        parameter, optimizer = self.trained(1.0)

        def halve(*args: Any) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.mul_(0.5) if in_place else parameter.grad * 0.5
            raise torch.OutOfMemoryError("CUDA out of memory.")

        optimizer.register_step_pre_hook(halve)
        with pytest.raises(OptimizerOutOfMemoryError, match="may be half-stepped"):
            Stepper(optimizer, HERE).take(None, 1, 2**20)
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [0.5, 0.5]

    @pytest.mark.device
    def test_state_that_was_there_and_is_no_dict_stays(self) -> None:
        parameter, optimizer = self.trained(1.0)
        optimizer.state[parameter] = kept = torch.ones(2)  # type: ignore[assignment]

        def fail() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        optimizer.step = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(OptimizerOutOfMemoryError):
            Stepper(optimizer, HERE).take(None, 1, 2**20)
        assert optimizer.state[parameter] is kept

    @pytest.mark.device
    def test_other_errors_come_through(self) -> None:
        _, optimizer = self.trained(1.0)

        def fail() -> None:
            raise KeyError

        optimizer.step = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyError):
            Stepper(optimizer, HERE).take(None, 1, 2**20)
