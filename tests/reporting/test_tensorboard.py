"""What reaches TensorBoard's SummaryWriter; with the package itself, what can be read again."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autoaccum.errors import MissingExtraError
from autoaccum.events import Finished, Notice, Replanned, Resumed, Validated
from autoaccum.reporting import TensorBoardReporter
from autoaccum.reporting.following import numbers_of
from tests.reporting.synthetic import report, started

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
    shown = report(2, (3, 3, 2), grad_norm=0.5, seconds=0.5, outputs={"accuracy": 0.75, "losses": torch.ones(2)})
    tell(shown)
    assert calls[0] == ("open", os.path.abspath("logs"), None)
    assert {call[1]: call[2:] for call in calls[1:]} == {name: (value, 2) for name, value in numbers_of(shown).items()}
    assert {call[0] for call in calls[1:]} == {"add_scalar"}


def test_events(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    metrics = {"accuracy": 0.75, "top_5": 1.0}
    tell(Validated(step=2, epoch=0, loss=0.25, metrics=metrics, num_samples=5, micro_batch=3, seconds=1.0))
    tell(Replanned(step=3, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory"))
    tell(Notice(cause="A", consequence="B", cure="C"))
    tell(Finished(step=3, reason="budget"))
    assert calls[1:] == [
        ("add_scalar", "validation/loss", 0.25, 2),
        ("add_scalar", "validation/accuracy", 0.75, 2),
        ("add_scalar", "validation/top_5", 1.0, 2),
        ("add_text", "events", "step 3: out of memory: 4 x 2 -> 2 x 4", 3),
        ("add_text", "events", "A. B. C.", 3),
        ("add_text", "events", "Finished", 3),
        ("close",),
    ]


def test_a_resume_purges_what_it_made_void(calls: Calls) -> None:
    tell = TensorBoardReporter("logs")
    tell(Resumed(step=7, num_samples=56, checkpoint="c"))
    tell(report(8))
    assert calls[0] == ("open", os.path.abspath("logs"), 8)


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
    resumed = Resumed(step=1, num_samples=8, checkpoint="c")
    for record in (report(1), report(2), started(), resumed, report(2, loss=7.0)):
        tell(record)
    tell.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss")] == [(1, 2.0), (2, 7.0)]
