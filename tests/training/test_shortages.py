"""A run out of memory leaves a file that says what held it, and is otherwise the run that it would have been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import AutoaccumWarning, NothingFitsError
from autoaccum.events import OutOfMemory, StepReport
from autoaccum.reporting.columns import load_run
from autoaccum.reporting.facts import facts_of
from autoaccum.runs.oom_files import MOST, oom_files
from autoaccum.testing import simulated_memory
from autoaccum.training import shortages


class Failing:
    """A loss that runs out of memory in its call of that number, once."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.mse_loss(outputs, targets)


def train(run_dir: Path | None, fails_at: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    data = torch.randn(48, 8), torch.randn(48, 1)
    given = {
        "loss_fn": Failing(fails_at),
        "effective_batch": 16,
        "micro_batch": 8,
        "steps": 6,
        "verify": False,
        "cache": False,
        **options,
    }
    return autoaccum.fit(model, data, device="cpu", progress=False, run_dir=run_dir, **given)


def weights(result: Any) -> list[Any]:
    return [parameter.tolist() for parameter in result.model.parameters()]


def test_a_replay_leaves_a_file_and_the_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain, kept = train(None, 6), train(tmp_path / "run", 6)  # the second micro-batch of window 3
    (event,) = [event for event in kept.events if isinstance(event, OutOfMemory)]
    assert event == OutOfMemory(step=3, phase="training", micro_batch=8)
    assert [event for event in plain.events if isinstance(event, OutOfMemory)] == [event]
    assert weights(kept) == weights(plain)
    assert [report.loss for report in kept.history] == [report.loss for report in plain.history]
    (path,) = oom_files(tmp_path / "run")
    assert path.name == f"oom-{event.step}.json"
    found = json.loads(path.read_text())
    assert (found["step"], found["phase"], found["micro_batch"]) == (event.step, event.phase, event.micro_batch)
    assert found["limit_bytes"] > 0
    assert found["bytes_by_kind"]["parameters"] == 4 * (8 * 16 + 16 + 16 + 1)
    assert found["bytes_by_kind"]["inputs"] == 4 * 8 * (8 + 1)
    assert found["asked_bytes"] == 2 * 2**30


def test_what_does_not_fit_at_all_is_told_too_and_inputs_are_known(tmp_path: Path) -> None:
    def wide(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * torch.ones(100_000)).mean()

    with simulated_memory("40KiB"), pytest.raises(NothingFitsError):
        train(tmp_path, loss_fn=wide, micro_batch=1, patience=0)
    (path,) = oom_files(tmp_path)
    found = json.loads(path.read_text())
    assert found["asked_bytes"] == 400_000
    assert found["bytes_by_kind"]["inputs"] == 4 * (8 + 1)
    assert found["peak_bytes"] <= found["limit_bytes"] == 40 * 2**10
    # The report of the run leads there, once a window of it has committed.
    assert facts_of(load_run(tmp_path)).num_out_of_memory == 1


def test_the_report_names_the_file(tmp_path: Path) -> None:
    train(tmp_path, 6)
    (path,) = oom_files(tmp_path)
    assert facts_of(load_run(tmp_path)).rows()["out of memory"] == f"1 time, 1 step replayed; see {path.name}"


def test_without_a_directory_nobody_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(shortages, "held", lambda *_: looks.append(_) or {})
    train(None, 6)
    assert looks == []
    train(tmp_path, 6)
    assert len(looks) == 1
    assert oom_files(tmp_path) == [], "nothing was seen"


def test_a_look_that_fails_is_no_failure_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    expected = weights(train(None, 6))
    monkeypatch.setattr(shortages, "held", fail)
    assert weights(train(tmp_path, 6)) == expected
    assert oom_files(tmp_path) == []


def test_a_device_that_is_always_full_is_looked_at_so_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(shortages, "held", lambda *_: looks.append(_) or {"seen": len(looks)})
    loss = Failing(1)

    def refill(record: Any) -> None:
        if isinstance(record, StepReport):  # each window fails once
            loss.left = 1

    torch.manual_seed(0)
    autoaccum.fit(
        nn.Linear(8, 1), (torch.randn(48, 8), torch.randn(48, 1)), effective_batch=4, micro_batch=[(2, 2)] * 12,
        loss_fn=loss, device="cpu", progress=False, run_dir=tmp_path, cache=False, callbacks=[refill], verify=False,
    )  # fmt: skip
    assert len(oom_files(tmp_path)) == len(looks) == MOST


def test_a_run_that_begins_anew_puts_them_away(tmp_path: Path) -> None:
    train(tmp_path, 6)
    (path,) = oom_files(tmp_path)
    train(tmp_path, resume=False)
    assert oom_files(tmp_path) == []
    assert (tmp_path / "before-1" / path.name).exists()


def within(limit: int, model: nn.Module, samples: Any, **options: Any) -> tuple[Any, Any]:
    """Train in a memory all of which may be used; return what came of it, and the device."""
    with simulated_memory(limit) as device:
        found = autoaccum.fit(
            model, samples, loss_fn=nn.functional.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            device="cpu", headroom=0.0, progress=False, cache=False, **options,
        )  # fmt: skip
    return found, device


def test_a_whole_window_is_tried_although_it_would_not_fit_beside_the_gradients_of_another_micro_batch() -> None:
    """A window that is run at once has no gradients while it is."""

    def train(limit: int, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(128, 64, generator=generator), torch.randn(128, 1, generator=generator)
        found, device = within(
            limit, model, samples, effective_batch=64, steps=12, verify=False, memory_saving="off", **options
        )
        return found, device

    whole = train(1 << 40, micro_batch=64)[1].peak
    found, device = train(whole + 1024)
    assert found.history[-1].micro_batches == (64,)
    assert device.peak <= whole + 1024
    assert not [event for event in found.events if isinstance(event, OutOfMemory)]


def test_nothing_fails_to_fit_for_the_sake_of_its_measurement() -> None:
    """On a CPU what is laid aside on the host takes of the same memory: first it gives way, then levels, then the run."""

    def train(limit: int, **options: Any) -> tuple[Any, Any, nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(32, 1))
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(16, 64, 32, generator=generator), torch.randn(16, 64, 1, generator=generator)
        found, device = within(limit, model, samples, effective_batch=4, steps=6, **options)
        return found, device, model

    _, plain, expected = train(1 << 40, micro_batch=1, verify=False, memory_saving="off")
    with pytest.warns(AutoaccumWarning, match="memory ran out in the attempt"):
        found, device, model = train(plain.peak)
    assert found.history[0].memory_saving == "off"
    assert {report.micro_batches for report in found.history} == {(1, 1, 1, 1)}
    assert device.peak <= plain.peak
    assert all(map(torch.equal, expected.parameters(), model.parameters()))


def test_what_was_found_to_fit_is_not_cut_smaller_for_a_measurement() -> None:
    """The second window is measured once more, and lays nothing aside, for it is known that there is no room for it."""

    def train(limit: int, **options: Any) -> tuple[Any, int, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32), nn.Linear(32, 1))
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(16, 8, 32, generator=generator), torch.randn(16, 8, 1, generator=generator)
        found, device = within(limit, model, samples, effective_batch=8, steps=5, memory_saving="off", **options)
        return found, device.peak, [report.micro_batches for report in found.history]

    peak = train(1 << 40, verify=False, micro_batch=2)[1]
    with pytest.warns(AutoaccumWarning, match="memory ran out in the attempt"):
        found, _, sizes = train(peak + 1024)
    assert {event.step for event in found.events if isinstance(event, OutOfMemory)} == {1}
    assert sizes[1:] == [(2, 2, 2, 2)] * 4
