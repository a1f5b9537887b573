"""The laws of docs/laws.md, through ``fit``: exactness, replay, plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory
from autoaccum.testing import oom_at
from tests.devices import DEVICE
from tests.faults import Operations, strides
from tests.models import classes, mlp, noisy, relative_error, same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")


class Recorder(torch.optim.SGD):
    """Remembers the gradient of each step, as one vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        super().step(closure)


def check_gradients(
    device: str | None, dtype: torch.dtype, bound: float, effective_batch: int, micro_batch: int, num_samples: int
) -> None:
    """Fit, and compare each gradient that reached the optimizer with the big batch's."""
    data = classes(num_samples, dtype)
    effective_batch = min(effective_batch, num_samples)
    result = autoaccum.fit(
        mlp(dtype),
        data,
        effective_batch=effective_batch,
        micro_batch=min(micro_batch, effective_batch),
        loss_fn=cross_entropy,
        optimizer=Recorder,
        shuffle=False,
        device=device,
        progress=False,
    )
    where = next(result.model.parameters()).device
    data = data[0].to(where), data[1].to(where)
    big = mlp(dtype).to(where)
    optimizer = Recorder(big.parameters())
    assert len(result.history) == len(range(0, num_samples, effective_batch))
    for report, start in zip(result.history, range(0, num_samples, effective_batch), strict=True):
        window = slice(start, start + effective_batch)
        optimizer.zero_grad()
        loss = cross_entropy(big(data[0][window]), data[1][window])
        loss.backward()
        optimizer.step()
        assert report.effective_batch == min(effective_batch, num_samples - start)
        assert max(report.micro_batches) <= micro_batch
        assert report.loss == pytest.approx(loss.item(), rel=bound)
    assert isinstance(result.optimizer, Recorder)
    for found, expected in zip(result.optimizer.gradients, optimizer.gradients, strict=True):
        assert relative_error(found, expected) < bound


PRECISIONS = pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


class TestExactness:
    """Law 1: the gradient that reaches the optimizer is that of the loss over the whole window, whatever the plan."""

    @PRECISIONS
    @given(effective_batch=st.integers(1, 40), micro_batch=st.integers(1, 40), num_samples=st.integers(1, 60))
    @settings(max_examples=40, deadline=None)
    def test_gradient_is_the_windows(
        self, dtype: torch.dtype, bound: float, effective_batch: int, micro_batch: int, num_samples: int
    ) -> None:
        check_gradients(DEVICE, dtype, bound, effective_batch, micro_batch, num_samples)


def trainer(micro_batch: Any, device: str | None = DEVICE, **options: Any) -> autoaccum.Trainer:
    arguments: dict[str, Any] = {
        "effective_batch": 12,
        "loss_fn": cross_entropy,
        "epochs": 2,
        "clip_norm": 0.5,
        "progress": False,
        **options,
    }
    return autoaccum.Trainer(noisy(), classes(23), micro_batch=micro_batch, device=device, **arguments)


_clean: dict[Any, list[torch.Tensor]] = {}


def clean(plans: tuple[tuple[int, ...], ...], device: str | None = DEVICE) -> list[torch.Tensor]:
    """What a run of recorded plans leaves, without an OOM."""
    if (plans, device) not in _clean:
        result = trainer(plans, device).fit()
        assert tuple(report.micro_batches for report in result.history) == plans
        _clean[plans, device] = state_of(result)
    return _clean[plans, device]


def check_replays(device: str | None, stride: int = 1) -> tuple[int, int]:
    """An OOM at operations of a run in turn: (replayed, inside the optimizer's step)."""
    counting = trainer(6, device)
    with Operations() as operations:
        counting.fit()
    replayed, in_step = 0, 0
    for operation in operations.every(stride):
        running = trainer(6, device)
        with oom_at(operation):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                in_step += 1
                continue
        plans = tuple(report.micro_batches for report in result.history)
        assert [sum(plan) for plan in plans] == [12, 11, 12, 11]
        # Outside of windows, where a snapshot is taken, and in a step that had written nothing, the same is done again.
        failed = [event for event in result.events if isinstance(event, OutOfMemory)]
        replays = sum(report.replays for report in result.history)
        assert replays == sum(event.phase == "training" for event in failed)
        assert len(failed) <= 1
        assert same(state_of(result), clean(plans, device)), f"operation {operation} left a mark"
        replayed += replays
    print(f"{replayed} faults injected and replayed, {in_step} in the optimizer, {len(operations.names)} operations")
    return replayed, in_step


class TestReplay:
    """Law 2: an OOM anywhere in a window leaves no mark."""

    @strides(23)
    def test_oom_at_every_operation(self, stride: int) -> None:
        """Each run is bit-identical to one that used the smaller plan from that window on and met no OOM."""
        replayed, in_step = check_replays(DEVICE, stride)
        assert replayed * stride > 550
        assert in_step == (8 if stride == 1 else in_step)

    @pytest.mark.device
    @pytest.mark.parametrize("operations", [(30, 32), (30, 60), (30, 200)])
    def test_two_in_one_run(self, operations: tuple[int, int]) -> None:
        running = trainer(12)
        with oom_at(operations[1]), oom_at(operations[0]):
            result = running.fit()
        plans = tuple(report.micro_batches for report in result.history)
        assert sum(report.replays for report in result.history) == 2
        assert same(state_of(result), clean(plans))
