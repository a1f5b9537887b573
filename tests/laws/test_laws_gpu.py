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
from tests.laws.test_laws import PRECISIONS, check_gradients, check_replays
from tests.models import classes, noisy, same, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")]

GIB = 2**30


@pytest.fixture
def one_gib() -> Iterator[None]:
    """A device on which this process may use 1 GiB more than the libraries already do."""
    torch.accelerator.empty_cache()
    module = torch.get_device_module()
    total = torch.accelerator.get_memory_info()[1]
    module.set_per_process_memory_fraction((torch.accelerator.memory_reserved() + GIB) / total)
    yield
    module.set_per_process_memory_fraction(1.0)
    torch.accelerator.empty_cache()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16_384), nn.BatchNorm1d(16_384), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16_384, 3))


def fit(**options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {"effective_batch": 8192, "loss_fn": cross_entropy, "progress": False, **options}
    return autoaccum.fit(wide(), classes(20_000), **arguments)


@PRECISIONS
@pytest.mark.parametrize("sizes", [(40, 7, 60), (12, 12, 30), (31, 1, 31), (8, 5, 23)])
def test_gradient_is_the_windows(dtype: torch.dtype, bound: float, sizes: tuple[int, int, int]) -> None:
    check_gradients(None, dtype, bound, *sizes)


def test_oom_at_every_operation() -> None:
    replayed, _ = check_replays(None)
    assert replayed > 500


def test_a_real_oom_is_replayed_bit_for_bit(one_gib: None) -> None:
    result = fit(micro_batch=8192, clip_norm=1.0)
    ooms = [event for event in result.events if isinstance(event, OutOfMemory)]
    assert len(ooms) >= 1
    plans = [report.micro_batches for report in result.history]
    assert [sum(plan) for plan in plans] == [8192, 8192, 3616]
    again = fit(micro_batch=plans, clip_norm=1.0)
    assert sum(report.replays for report in again.history) == 0
    assert same(state_of(result), state_of(again))


def test_auto_finds_a_size_and_keeps_the_limit(one_gib: None) -> None:
    result = fit(epochs=2)
    assert [report.effective_batch for report in result.history] == [8192, 8192, 3616] * 2
    assert 500 < max(result.plan.sizes) < 8192
    limit_bytes = next(event.limit_bytes for event in result.events if hasattr(event, "limit_bytes"))
    assert max(report.peak_bytes for report in result.history) <= limit_bytes


def test_probe_is_within_the_limit_and_leaves_the_model_where_it_was(one_gib: None) -> None:
    model = wide()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    state = torch.get_device_module().get_rng_state()
    report = autoaccum.probe(model, classes(20_000), loss_fn=cross_entropy)
    assert 500 < report.max_micro_batch < 20_000
    assert report.max_micro_batch in [trial.micro_batch for trial in report.trials if trial.fits]
    after = [*model.parameters(), *model.buffers()]
    assert all(tensor.device.type == "cpu" for tensor in after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(torch.get_device_module().get_rng_state(), state)


def test_a_tenant_that_takes_memory_costs_no_sample() -> None:
    """Another process takes all of the device but 2 GiB after the plan was settled."""
    tenants: list[subprocess.Popen[str]] = []

    def let_in(record: object) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == 2:
            code = (
                "import torch; free, _ = torch.accelerator.get_memory_info(); "
                "kept = torch.empty(free - 2 * 2**30, dtype=torch.uint8, device=torch.accelerator.current_accelerator()); "
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
    model = nn.Sequential(nn.Linear(8, 65_536), nn.ReLU(), nn.Dropout(0.2), nn.Linear(65_536, 3))
    try:
        result = autoaccum.fit(
            model,
            classes(16_384 * 4),
            effective_batch=16_384,
            micro_batch=16_384,
            loss_fn=cross_entropy,
            progress=False,
            callbacks=[let_in],
        )
    finally:
        for tenant in tenants:
            tenant.communicate("\n")
    assert [report.effective_batch for report in result.history] == [16_384] * 4
    assert sum(report.replays for report in result.history) >= 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: Any) -> None:
    options: dict[str, Any] = {"effective_batch": 16, "loss_fn": cross_entropy, "progress": False, "clip_norm": 1e9}
    half, full = (
        autoaccum.fit(noisy(), classes(40), micro_batch=6, precision=p, **options) for p in (precision, "fp32")
    )
    norms = [[report.grad_norm for report in result.history] for result in (half, full)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_workers_and_pinned_memory() -> None:
    dataset = torch.utils.data.TensorDataset(*classes(40))
    loader = torch.utils.data.DataLoader(dataset, batch_size=7, shuffle=True, num_workers=2)
    options: dict[str, Any] = {"effective_batch": 16, "loss_fn": cross_entropy, "progress": False, "micro_batch": 6}
    first, second = (autoaccum.fit(noisy(), data, **options) for data in (loader, dataset))
    assert [report.loss for report in first.history] == [report.loss for report in second.history]
