"""What reaches TensorBoard's SummaryWriter; with the package itself, what can be read again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autoaccum.errors import MissingExtraError
from autoaccum.events import Finished, Notice, OutOfMemory, Replanned, Resumed, Validated
from autoaccum.reporting import TensorBoardReporter
from tests.reporting.synthetic import planned, report, started

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is asked of a writer, of which TensorBoard is no part."""
    made: Calls = []

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
            made.append(("open", log_dir, purge_step))

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: made.append((name, *arguments))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return made


def test_a_window_is_a_scalar_for_each_of_its_numbers(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    tell(started())
    tell(report(2, (3, 3, 2), grad_norm=0.5, seconds=0.5))
    assert calls[0] == ("open", "logs", None)
    assert {call[1]: call[2:] for call in calls[1:]} == {
        "loss/train": (1.0, 2),
        "lr": (0.1, 2),
        "batch/effective": (8, 2),
        "batch/micro": (3, 2),
        "samples_per_second": (16.0, 2),
        "memory/peak_bytes": (2 * 2**20, 2),
        "memory/limit_bytes": (2**30, 2),
        "gradient/norm": (0.5, 2),
    }
    assert {call[0] for call in calls[1:]} == {"add_scalar"}
    tell(report(3, noise_scale=7.0))
    assert ("add_scalar", "gradient/noise_scale", 7.0, 3) in calls


def test_outputs_that_are_means_are_scalars(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    tell(report(3, outputs={"accuracy": 0.75, "losses": torch.ones(2)}))
    assert ("add_scalar", "train/accuracy", 0.75, 3) in calls
    assert not [call for call in calls if "train/losses" in call]


def test_events(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    metrics = {"accuracy": 0.75, "top_5": 1.0}
    tell(Validated(step=2, epoch=0, loss=0.25, metrics=metrics, num_samples=5, micro_batch=3, seconds=1.0))
    tell(planned(4, 4))
    tell(OutOfMemory(step=3, phase="training", micro_batch=4))
    tell(Replanned(step=3, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory"))
    tell(Notice(cause="A", consequence="B", cure="C"))
    tell(Finished(step=3, reason="budget"))
    tell.close()
    assert calls[1:] == [
        ("add_scalar", "loss/validation", 0.25, 2),
        ("add_scalar", "validation/accuracy", 0.75, 2),
        ("add_scalar", "validation/top_5", 1.0, 2),
        ("add_text", "plans", "plan: 4 x 2 (r); memory: limit 1.00 GiB", 1),
        ("add_text", "plans", "step 3: out of memory: 4 x 2 -> 2 x 4", 3),
        ("add_text", "notices", "A. B. C."),
        ("flush",),
        ("close",),
    ]


def test_a_resume_purges_what_it_made_void(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    tell(Resumed(step=7, num_samples=56, checkpoint="c"))
    assert calls[:3] == [("open", "logs", None), ("close",), ("open", "logs", 8)]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"needs tensorboard, .* -m pip install tensorboard$") as raised:
        TensorBoardReporter(tmp_path)
    assert (raised.value.package, raised.value.extra) == ("tensorboard", "tensorboard")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_it_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell = TensorBoardReporter(tmp_path)
    for record in (report(1), report(2), Resumed(step=1, num_samples=8, checkpoint="c"), report(2, loss=7.0)):
        tell(record)
    tell.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss/train")] == [(1, 2.0), (2, 7.0)]
