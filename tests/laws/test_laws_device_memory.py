"""What a device's allocator is spared: settled windows take nothing from it, and what others do costs no plan."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import autoaccum
from autoaccum.errors import LimitBelowModelError
from autoaccum.events import Planned, Replanned
from autoaccum.memory import clock
from autoaccum.memory.devices import find_device, memory_of
from tests import standin
from tests.laws.test_laws_lengths import pad
from tests.models import classes

pytestmark = [pytest.mark.gpu]

MIB = 2**20


@pytest.fixture(autouse=True)
def clean() -> Iterator[torch.device]:
    """An empty cache, as a process begins with."""
    gc.collect()
    torch.accelerator.empty_cache()
    device = find_device(None)
    before = torch.get_device_module().get_per_process_memory_fraction(device)
    yield device
    assert torch.get_device_module().get_per_process_memory_fraction(device) == pytest.approx(before)
    gc.collect()
    torch.accelerator.empty_cache()


def used(device: torch.device) -> int:
    return memory_of(device).used()


def deep(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, outputs))


class Tagger(nn.Module):
    """Tokens to tags, each on its own."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8)
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(self.embedding(tokens))  # type: ignore[no-any-return]


class Texts(Dataset[Any]):
    """(tokens, tags) of lengths that are spread as those of sentences are."""

    def __init__(self, count: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randn(count, generator=generator).mul(0.8).add(3.0).exp().long().clamp(1, longest).tolist()
        self.samples = [tuple(torch.randint(1, 5, (2, length), generator=generator)) for length in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def plain(**options: Any) -> dict[str, Any]:
    return {"model": deep(), "data": classes(8192), "effective_batch": 4096, "loss_fn": cross_entropy, **options}


def ragged(**options: Any) -> dict[str, Any]:
    given = {"model": Tagger(), "data": Texts(256, 120), "effective_batch": 64, "training_step": token_mean}
    return {**given, "collate_fn": pad, **options}


def held_out(place: Path) -> dict[str, Any]:
    return plain(validation_data=classes(1000, seed=3), validate_every=4096)


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda place: plain(),
    "ragged": lambda place: ragged(),
    "validation": held_out,
    "noise scale": lambda place: plain(noise_scale=True),
    "checkpoints": lambda place: plain(run_dir=place / "run", checkpoint_every=1),
}


class Watch:
    """What the device did in each window: what happened between two reports."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.planned: list[int] = []

    def __call__(self, record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            self.ends.append(standin._library().standin_log_size())
        elif isinstance(record, Planned | Replanned):
            self.planned.append(record.step)

    def of(self, entries: list[standin.Entry], first: int) -> Counter[str]:
        return Counter(entry.kind for entry in entries[self.ends[first - 1] : self.ends[-1]])


@pytest.mark.parametrize("is_limited", [False, True], ids=["all of the device", "a limit"])
@pytest.mark.parametrize("kind", KINDS)
def test_settled_windows_give_nothing_back(kind: str, is_limited: bool, tmp_path: Path, clean: torch.device) -> None:
    if clean.type != "standin":
        pytest.skip("only the stand-in keeps a log")
    limit = used(clean) + (60 if kind == "ragged" else 40) * MIB if is_limited else None
    watch = Watch()
    with standin.recorded() as entries:
        result = autoaccum.fit(
            **KINDS[kind](tmp_path),
            memory_limit=limit,
            steps=36 if kind == "ragged" else 20,
            progress=False,
            callbacks=[watch],
            cache=False,
        )
    settled = watch.planned[-1] + 8
    assert settled + 4 < len(watch.ends), "it has to settle"
    if is_limited:
        assert len(result.history[-1].micro_batches) > 1, "the limit has to matter"
    did = watch.of(entries, settled)
    assert did["launch"] > 100
    assert (did["flush"], did["segment free"], did["segment"]) == (0, 0, 0)


def micro_batches(result: autoaccum.FitResult) -> list[int]:
    return [len(report.micro_batches) for report in result.history]


def retries() -> int:
    return int(torch.accelerator.memory_stats().get("num_alloc_retries", 0))


def test_flushes_of_the_cache_leave_the_plan_as_it_is(clean: torch.device) -> None:
    """300 windows of texts; something else in the process fills the cache, so that the allocator flushes and retries."""
    # The first products keep a workspace, in backward another one: 32 MiB each on a GPU.
    deep().to(clean)(torch.ones(2, 8, device=clean)).sum().backward()
    every, limit = 3, used(clean) + 38 * MIB
    flushed = 0

    def disturb(record: Any) -> None:
        nonlocal flushed
        if isinstance(record, autoaccum.StepReport) and record.step > 30 and record.step % every == 0:
            torch.accelerator.empty_cache()
            # Small blocks, of no use to tensors that are large, fill what the limit leaves.
            room = limit - memory_of(clean).used()
            held = [torch.empty(MIB, dtype=torch.uint8, device=clean) for _ in range(room // (2 * MIB) * 2)]
            flushed += len(held) > 0
            del held
            if room > 8 * MIB:  # whole it is to be had only without them: the allocator flushes and retries
                torch.empty(room // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device=clean)

    module, before = torch.get_device_module(), retries()
    module.set_per_process_memory_fraction(limit / torch.accelerator.get_memory_info(clean)[1], clean)
    try:
        result = autoaccum.fit(**ragged(), steps=300, progress=False, callbacks=[disturb], cache=False)
    finally:
        module.set_per_process_memory_fraction(1.0, clean)
    assert flushed >= 270 // every
    assert retries() - before > 60, "the allocator has to be disturbed"
    counts = micro_batches(result)
    assert sum(counts[-30:]) <= sum(counts[:30]) * 1.05
    reasons = [event.reason for event in result.events if isinstance(event, Replanned)]
    assert not [reason for reason in reasons if "cache" in reason]


TENANT = """
import sys, torch
device = torch.accelerator.current_accelerator()
torch.ones(1, device=device)
free, total = torch.accelerator.get_memory_info()
held = torch.empty(eval(sys.argv[1], {"free": free, "total": total}), dtype=torch.uint8, device=device)
print("in", flush=True)
sys.stdin.readline()
"""


class Tenant:
    """Another process that takes so much of the device, until it is told to go."""

    def __init__(self, expression: str) -> None:
        command = [sys.executable, "-c", TENANT, expression]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "in\n"

    def leave(self) -> None:
        self._process.communicate("\n")


@standin.only_there  # a GPU's processes take hundreds of MiB before they hold anything: benchmarks/gpu.py has it
def test_a_tenant_that_takes_half_and_returns_it_costs_no_window_and_no_speed(clean: torch.device) -> None:
    """The rest of the device is held all the time, so that the window needs more than half of what there is for two."""
    torch.ones(1, device=clean)
    other = Tenant(f"free - {192 * MIB}")
    tenants: list[Tenant] = []

    def come_and_go(record: Any) -> None:
        if not isinstance(record, autoaccum.StepReport):
            return
        if record.step == 15:
            torch.accelerator.empty_cache()  # else it finds nothing free, and is the one who fails
            tenants.append(Tenant("free - 28 * 2**20"))
        if record.step == 25:
            tenants[0].leave()

    try:
        result = autoaccum.fit(**plain(), steps=45, progress=False, callbacks=[come_and_go], cache=False)
    finally:
        other.leave()
        for tenant in tenants:
            tenant.leave() if tenant._process.poll() is None else None
    assert [report.effective_batch for report in result.history] == [4096] * 45
    assert [report.num_samples for report in result.history] == [4096 * step for step in range(1, 46)]
    counts = micro_batches(result)
    assert counts[14] == 1
    assert min(counts[16:25]) > 1
    assert counts[-1] == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_the_limit_is_the_allocators_while_the_run_goes_on(
    error: type[BaseException] | None, clean: torch.device
) -> None:
    module, total = torch.get_device_module(), torch.accelerator.get_memory_info(clean)[1]
    limit, seen = used(clean) + 60 * MIB, []

    def look(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            seen.append(round(module.get_per_process_memory_fraction(clean) * total))
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(61 * MIB, dtype=torch.uint8, device=clean)
            if error is not None and record.step == 3:
                raise error

    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        autoaccum.fit(**plain(), memory_limit=limit, steps=4, progress=False, callbacks=[look], cache=False)
    assert seen == [limit] * (4 if error is None else 3)
    assert module.get_per_process_memory_fraction(clean) == 1.0


@standin.only_there
@pytest.mark.parametrize("call", ["fit", "Accumulator", "probe"])
def test_nor_does_what_is_there_before_the_first_sample_pass_the_limit(call: str, clean: torch.device) -> None:
    """The first weight alone takes 32 MiB of 24, and nothing is on the device when that is said."""
    model, start = nn.Sequential(nn.Linear(1024, 8192), nn.Linear(8192, 5)), used(clean)
    given: dict[str, Any] = {"loss_fn": cross_entropy, "memory_limit": start + 24 * MIB}
    data = torch.randn(64, 1024), torch.randint(0, 5, (64,))
    if call == "fit":
        begin = partial(autoaccum.fit, model, data, effective_batch=32, progress=False, cache=False)
    elif call == "probe":
        begin = partial(autoaccum.probe, model, data)
    else:  # the model is there by then; what the optimizer keeps for it is not
        wide = nn.Linear(1024, 4096).to(clean)
        given["memory_limit"] += 20 * MIB
        begin = partial(autoaccum.Accumulator, wide, torch.optim.AdamW(wide.parameters()))
    with standin.recorded() as log, pytest.raises(LimitBelowModelError) as raised:
        begin(**given)
    held = most = 0
    for entry in log:
        held += {"segment": entry.bytes, "segment free": -entry.bytes}.get(entry.kind, 0)
        most = max(most, held)
    assert most <= given["memory_limit"] - start
    assert raised.value.needed_bytes >= start + 32 * MIB


def test_a_limit_that_moves_moves_the_allocators(clean: torch.device) -> None:
    module, total = torch.get_device_module(), torch.accelerator.get_memory_info(clean)[1]
    start, seen = used(clean), []
    allowed = [start + 80 * MIB]

    def look(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            seen.append((round(module.get_per_process_memory_fraction(clean) * total) - start) // MIB)
            allowed[0] = start + (40 if record.step >= 10 else 80) * MIB
            if record.step > 10:
                assert used(clean) <= allowed[0]

    result = autoaccum.fit(
        **plain(), memory_limit=lambda: allowed[0], steps=14, progress=False, callbacks=[look], cache=False
    )
    assert seen == [80] * 10 + [40] * 4
    counts = micro_batches(result)
    assert counts[-1] > counts[8]


@standin.only_there
@pytest.mark.parametrize("mib", [36, 40])
def test_under_a_limit_that_fell_plans_hold_what_is_known_to_fit(mib: int, clean: torch.device) -> None:
    """An allocator holds twice as much beside tensors for 2,048 samples as for 1,024, which stay of use."""
    allowed, tried = [used(clean) + 80 * MIB], []

    def look(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            time.sleep(0.03)
            if record.step == 10:
                allowed[0] += (mib - 80) * MIB
                tried.extend(trial for trial in trainer._tuner.history if trial.peak_bytes is not None)

    # Which plan is the fastest is a matter of the machine: with this clock, one of fewer micro-batches.
    ticking = standin.VirtualClock(1e-3, 1e-13)
    with ticking, clock.using(ticking), mock.patch.object(time, "sleep", ticking.sleep):
        trainer = autoaccum.Trainer(
            **plain(), steps=14, memory_limit=lambda: allowed[0], progress=False, callbacks=[look], cache=False
        )
        result = trainer.fit()
    held = max(trial.micro_batch for trial in tried if trial.peak_bytes <= allowed[0] * 0.95)
    assert 512 < held < 4096
    assert result.history[8].micro_batches == (4096,)
    assert held <= max(result.history[-1].micro_batches) < 4096


def test_accumulators_have_each_their_own_limit(clean: torch.device) -> None:
    module, total = torch.get_device_module(), torch.accelerator.get_memory_info(clean)[1]
    start, seen = used(clean), []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((round(module.get_per_process_memory_fraction(clean) * total) - start) // MIB)
        return cross_entropy(outputs, targets)

    def made(mib: int) -> autoaccum.Accumulator:
        model = deep().to(clean)
        return autoaccum.Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=loss,
            memory_limit=start + mib * MIB,
            micro_batch=64,
        )

    first, second = made(200), made(100)
    batch = tuple(tensor.to(clean) for tensor in classes(64))
    for accumulator in (first, second, first):
        accumulator.step(batch)
        assert module.get_per_process_memory_fraction(clean) == 1.0
    second.backward(batch)
    assert seen == [200, 100, 200, 100]
    assert module.get_per_process_memory_fraction(clean) == 1.0


def test_a_users_own_fraction_is_an_upper_bound(clean: torch.device) -> None:
    module, total = torch.get_device_module(), torch.accelerator.get_memory_info(clean)[1]
    own = (used(clean) + 60 * MIB) / total
    seen: list[float] = []

    def look(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            seen.append(module.get_per_process_memory_fraction(clean))

    module.set_per_process_memory_fraction(own, clean)
    try:
        autoaccum.fit(**plain(), memory_limit="2GiB", steps=2, progress=False, callbacks=[look], cache=False)
        assert module.get_per_process_memory_fraction(clean) == pytest.approx(own)
    finally:
        module.set_per_process_memory_fraction(1.0, clean)
    assert seen == pytest.approx([own] * 2)


def test_a_size_is_measured_in_its_second_run(clean: torch.device) -> None:
    """What the first run takes besides, as kernels that are loaded and workspaces that are tried out, is in no trial."""
    seen: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        size = len(targets)
        seen[size] = seen.get(size, 0) + 1
        if seen[size] == 1:
            kept.append(torch.empty(48 * MIB, dtype=torch.uint8, device=clean))
            kept.clear()
        return cross_entropy(outputs, targets)

    given = {**plain(), "loss_fn": loss}
    given["model"].to(clean)(torch.ones(1, 8, device=clean)).sum().backward()  # a GPU's library keeps a workspace
    before = used(clean)
    trainer = autoaccum.Trainer(**given, steps=8, progress=False, cache=False, verify=False, max_micro_batch=512)
    result = trainer.fit()
    peaks = {trial.micro_batch: trial.peak_bytes for trial in trainer._tuner.history if trial.peak_bytes}
    assert len(peaks) >= 3
    assert max(peaks.values()) - before < 48 * MIB
    assert sum(map(sum, (report.micro_batches for report in result.history))) == 8 * 4096
