"""The laws on an accelerator, with its own allocator running out of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import OutOfMemory
from autoaccum.testing import oom_at
from tests.faults import Operations, strides
from tests.laws.test_laws import PRECISIONS, check_gradients, check_replays
from tests.models import classes, mlp, noisy, same, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")]

MIB = 2**20


@pytest.fixture
def small() -> Iterator[None]:
    """A device on which this process may use 256 MiB more than the libraries already do."""
    torch.accelerator.empty_cache()
    module = torch.get_device_module()
    total = torch.accelerator.get_memory_info()[1]
    module.set_per_process_memory_fraction((torch.accelerator.memory_reserved() + 256 * MIB) / total)
    yield
    module.set_per_process_memory_fraction(1.0)
    torch.accelerator.empty_cache()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4096, 3))


def fit(**options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {"effective_batch": 4096, "loss_fn": cross_entropy, "progress": False, **options}
    return autoaccum.fit(wide(), classes(10_000), **arguments)


@PRECISIONS
@pytest.mark.parametrize("sizes", [(40, 7, 60), (12, 12, 30), (31, 1, 31), (8, 5, 23)])
def test_gradient_is_the_windows(dtype: torch.dtype, bound: float, sizes: tuple[int, int, int]) -> None:
    check_gradients(None, dtype, bound, *sizes)


@pytest.mark.weighted
@strides(131)  # every allocation has a test of its own, which is quicker
def test_oom_at_every_operation(stride: int) -> None:
    replayed, _ = check_replays(None, stride)
    assert replayed > (500 if stride == 1 else 4)


@pytest.mark.weighted
def test_a_real_oom_is_replayed_bit_for_bit(small: None) -> None:
    result = fit(micro_batch=4096, clip_norm=1.0)
    ooms = [event for event in result.events if isinstance(event, OutOfMemory)]
    assert len(ooms) >= 1
    plans = [report.micro_batches for report in result.history]
    assert [sum(plan) for plan in plans] == [4096, 4096, 1808]
    again = fit(micro_batch=plans, clip_norm=1.0)
    assert sum(report.replays for report in again.history) == 0
    assert same(state_of(result), state_of(again))


@pytest.mark.weighted
def test_auto_finds_a_size_and_keeps_the_limit(small: None) -> None:
    result = fit(epochs=2)
    assert [report.effective_batch for report in result.history] == [4096, 4096, 1808] * 2
    assert 500 < max(result.plan.sizes) < 4096
    limit_bytes = next(event.limit_bytes for event in result.events if hasattr(event, "limit_bytes"))
    assert max(report.peak_bytes for report in result.history) <= limit_bytes


def test_probe_is_within_the_limit_and_leaves_the_model_where_it_was(small: None) -> None:
    model = wide()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    state = torch.get_device_module().get_rng_state()
    report = autoaccum.probe(model, classes(10_000), loss_fn=cross_entropy)
    assert 500 < report.max_micro_batch < 10_000
    assert report.max_micro_batch in [trial.micro_batch for trial in report.trials if trial.fits]
    after = [*model.parameters(), *model.buffers()]
    assert all(tensor.device.type == "cpu" for tensor in after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(torch.get_device_module().get_rng_state(), state)


def test_a_tenant_that_takes_memory_costs_no_sample() -> None:
    """Another process takes all of the device but 128 MiB after the plan was settled."""
    tenants: list[subprocess.Popen[str]] = []

    def let_in(record: object) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == 2:
            code = (
                "import torch; free, _ = torch.accelerator.get_memory_info(); "
                "kept = torch.empty(free - 128 * 2**20, dtype=torch.uint8, device=torch.accelerator.current_accelerator()); "
                "print('in', flush=True); input()"
            )
            torch.accelerator.empty_cache()
            tenant = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            tenants.append(tenant)
            assert tenant.stdout is not None
            assert tenant.stdout.readline() == "in\n"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4096, 3))
    try:
        result = autoaccum.fit(
            model,
            classes(4096 * 4),
            effective_batch=4096,
            micro_batch=4096,
            loss_fn=cross_entropy,
            progress=False,
            callbacks=[let_in],
        )
    finally:
        for tenant in tenants:
            tenant.communicate("\n")
    assert [report.effective_batch for report in result.history] == [4096] * 4
    assert sum(report.replays for report in result.history) >= 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: Any) -> None:
    """Without dropout: CUDA draws it otherwise in 16 bits."""
    options: dict[str, Any] = {"effective_batch": 16, "loss_fn": cross_entropy, "progress": False, "clip_norm": 1e9}
    half, full = (autoaccum.fit(mlp(), classes(40), micro_batch=6, precision=p, **options) for p in (precision, "fp32"))
    norms = [[report.grad_norm for report in result.history] for result in (half, full)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_workers_and_pinned_memory() -> None:
    dataset = torch.utils.data.TensorDataset(*classes(40))
    loader = torch.utils.data.DataLoader(dataset, batch_size=7, shuffle=True, num_workers=2)
    options: dict[str, Any] = {"effective_batch": 16, "loss_fn": cross_entropy, "progress": False, "micro_batch": 6}
    first, second = (autoaccum.fit(noisy(), data, **options) for data in (loader, dataset))
    assert [report.loss for report in first.history] == [report.loss for report in second.history]


class OneBuffer:
    """Batches that are read, one after the other, into the same pinned memory."""

    def __init__(self, num_batches: int, size: int) -> None:
        names = torch.arange(num_batches * size).split(size)
        self.batches = [(*classes(size, seed=index), names[index]) for index in range(num_batches)]
        self.buffer = tuple(part.clone().pin_memory() for part in self.batches[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in self.batches:
            for part, read in zip(self.buffer, batch, strict=True):
                part.copy_(read)
            yield self.buffer
        for part in self.buffer:
            part.zero_()


class Keeping:
    """A training step that keeps a part of its batch, with which nothing is computed."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, _, names = batch
        self.kept.append(names)
        return model(inputs).square().mean()  # of which nothing is read before a step returns


@pytest.mark.parametrize("micro_batch", [5, 12])
def test_a_pinned_buffer_that_is_overwritten_after_each_step(micro_batch: int) -> None:
    """Copies towards the device are under way still when a step returns."""
    found = []
    for data in (OneBuffer(4, 12), OneBuffer(4, 12).batches):
        model, step = noisy().to(torch.accelerator.current_accelerator()), Keeping()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=micro_batch, verify=False)
        torch.manual_seed(0)
        for batch in data:
            accumulator.step(batch)
        found.append([t.cpu() for t in (*model.parameters(), *model.buffers(), *step.kept)])
    assert same(*found)


def test_a_loader_that_reads_into_one_pinned_buffer() -> None:
    steps = Keeping(), Keeping()
    options: dict[str, Any] = {"effective_batch": 12, "progress": False, "micro_batch": 5, "verify": False}
    first, second = (
        autoaccum.fit(noisy(), data, training_step=step, **options)
        for step, data in zip(steps, (OneBuffer(4, 12), OneBuffer(4, 12).batches), strict=True)
    )
    assert len(first.history) == 4
    assert same(state_of(first), state_of(second))
    assert same(*([names.cpu() for names in step.kept[-12:]] for step in steps))


class Failed(Exception):
    pass


def fails(model: nn.Module, batch: Any) -> torch.Tensor:
    raise Failed


def second() -> torch.device:
    """The second device, where there is one; the first one is current."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.accelerator.current_device_index() == 0
    return torch.device(torch.accelerator.current_accelerator().type, 1)  # type: ignore[union-attr]


CALLS: dict[str, Any] = {
    "fit": lambda device, **how: autoaccum.fit(
        mlp(), classes(24), effective_batch=12, device=device, progress=False, **how
    ),
    "probe": lambda device, **how: autoaccum.probe(mlp(), classes(24), device=device, max_micro_batch=8, **how),
    "check": lambda device, **how: autoaccum.check(mlp(), classes(24), device=device, **how),
    "Accumulator": lambda device, **how: accumulated(mlp().to(device), **how),
}


def accumulated(model: nn.Module, **how: Any) -> None:
    accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters()), micro_batch=5, **how)
    accumulator.step(classes(12))
    accumulator.backward(classes(12))


@pytest.mark.parametrize("name", list(CALLS))
def test_another_device_is_current_within_it_alone(name: str) -> None:
    """What names no device lands on that of the run while it goes on, and nowhere else before and after, errors too."""
    device = second()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert torch.empty(1, device=device.type).device == device
        return cross_entropy(model(batch[0]), batch[1])

    CALLS[name](device, training_step=step)
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(Failed):
        CALLS[name](device, training_step=fails)
    assert torch.accelerator.current_device_index() == 0


def test_what_is_drawn_on_any_device_is_drawn_again_in_a_replay() -> None:
    other = second()
    drawn: list[list[float]] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        drawn.append(torch.rand(2, device=other).tolist())
        return cross_entropy(model(batch[0]), batch[1])

    model = mlp().to(torch.accelerator.current_accelerator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=6, verify=False)
    with Operations() as operations:
        accumulator.step(classes(12))
    assert len({tuple(numbers) for numbers in drawn}) == 2
    drawn.clear()
    with oom_at(2 * len(operations.names) // 3):
        accumulator.step(classes(12))
    assert max(accumulator.micro_batches) < 6
    assert drawn[0] == drawn[len(drawn) - len(accumulator.micro_batches)]
