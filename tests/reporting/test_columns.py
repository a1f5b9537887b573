"""A run as columns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from autoaccum.errors import NoHistoryError
from autoaccum.events import Finished, Notice, OutOfMemory, Replanned, Resumed, StepReport
from autoaccum.reporting import load_run, write_json
from tests.reporting.synthetic import planned, report, started, write


def test_windows_are_columns(tmp_path: Path) -> None:
    write(tmp_path, started(), report(1, (3, 3, 2), noise_scale=7.5), report(2, (5,), grad_norm=0.5, num_samples=13))
    run = load_run(tmp_path)
    columns = {name: column.tolist() for name, column in run.windows.items()}
    assert columns["step"] == [1, 2]
    assert columns["micro_batch"] == [3, 5]
    assert columns["accumulation_steps"] == [3, 1]
    assert columns["time"] == [1_700_000_001.0, 1_700_000_002.0]
    assert math.isnan(columns["grad_norm"][0])
    assert columns["grad_norm"][1] == 0.5
    assert columns["noise_scale"][0] == 7.5
    assert run.windows["step"].dtype == np.int64
    assert run.windows["loss"].dtype == np.float64
    assert run.last_time == 1_700_000_002.0
    others = ("micro_batches", "outputs", "memory_saving")  # which are no numbers
    expected = {field for field in StepReport.__dataclass_fields__ if field not in others}
    assert set(columns) == expected | {"time", "micro_batch", "accumulation_steps"}


def test_events_are_columns_of_their_type(tmp_path: Path) -> None:
    again = Replanned(step=2, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory")
    write(tmp_path, started(), report(1), again, planned(2, 2, step=2), again)
    events = load_run(tmp_path).events
    assert events["Replanned"]["old"].tolist() == [(4, 4), (4, 4)]
    assert events["Replanned"]["reason"].tolist() == ["out of memory"] * 2
    assert events["Planned"]["predicted_bytes"].tolist() == [None]
    assert events["Started"]["num_samples"].tolist() == [20]
    assert events["OutOfMemory"]["step"].tolist() == []


def test_samples_at_a_step(tmp_path: Path) -> None:
    write(tmp_path, *(report(step) for step in (1, 2, 3)))
    assert load_run(tmp_path).samples_at(np.array([0, 1, 3, 4])).tolist() == [0, 8, 24, 24]


def test_what_a_resume_made_void_is_gone(tmp_path: Path) -> None:
    """The windows after the checkpoint, and what happened in them; what is not of a step stays."""
    notice = Notice(cause="a", consequence="b", cure="c")
    write(
        tmp_path,
        started(),
        *(report(step, loss=1.0) for step in range(1, 6)),
        notice,
        OutOfMemory(step=3, phase="training", micro_batch=4),
        OutOfMemory(step=4, phase="training", micro_batch=4),
        started(),
        Resumed(step=3, num_samples=24, checkpoint="c"),
        *(report(step, loss=2.0) for step in (4, 5, 6)),
        started(),
        Resumed(step=5, num_samples=40, checkpoint="c"),
        report(6, loss=3.0),
        started(),
        Resumed(step=4, num_samples=32, checkpoint="b"),
        report(5, loss=4.0),
    )
    run = load_run(tmp_path)
    assert run.windows["step"].tolist() == [1, 2, 3, 4, 5]
    assert run.windows["loss"].tolist() == [1, 1, 1, 2, 4]
    assert run.events["OutOfMemory"]["step"].tolist() == [3]
    assert run.events["Resumed"]["step"].tolist() == [3, 5, 4]
    assert len(run.events["Started"]["time"]) == 4
    assert len(run.events["Notice"]["time"]) == 1


def test_a_run_from_the_beginning_makes_void_what_was_there(tmp_path: Path) -> None:
    """Of what has a step nothing is left, those before its first window included."""
    failed = OutOfMemory(step=1, phase="training", micro_batch=4)
    old = (started(), failed, *(report(step) for step in (1, 2, 3)), Finished(step=3, reason="budget"))
    write(tmp_path, *old, started(7), planned(4, step=0), failed, report(1))
    run = load_run(tmp_path)
    assert run.windows["step"].tolist() == [1]
    assert run.finished is None
    assert run.events["Started"]["num_samples"].tolist() == [20, 7]
    counts = {name: len(columns["time"]) for name, columns in run.events.items() if len(columns["time"])}
    assert counts == {"Started": 2, "Planned": 1, "OutOfMemory": 1}


def test_a_run_is_finished_until_it_goes_on(tmp_path: Path) -> None:
    assert load_run(write(tmp_path, started(), report(1), Finished(step=1, reason="interrupted"))).finished == (
        "interrupted"
    )
    assert load_run(write(tmp_path, started(), Resumed(step=1, num_samples=8, checkpoint="c"))).finished is None
    assert load_run(write(tmp_path, report(2), Finished(step=2, reason="stopped"))).finished == "stopped"


def test_outputs_are_columns_of_their_own(tmp_path: Path) -> None:
    outputs: list[dict[str, object]] = [
        {},
        {"loss": 0.5, "rows": torch.ones(3)},
        {"loss": math.nan, "a/b": 1.0},
        {"a/b": -math.inf},
        {"a/b": 7.0},
    ]
    reports = [report(step, outputs=given) for step, given in enumerate(outputs, start=1)]
    write(tmp_path, *reports, Resumed(step=4, num_samples=32, checkpoint="c"), report(5, outputs={"a/b": 8.0}))
    run = load_run(tmp_path)
    assert {name: [str(value) for value in column] for name, column in run.outputs.items()} == {
        "loss": ["nan", "0.5", "nan", "nan", "nan"],
        "a/b": ["nan", "nan", "1.0", "-inf", "8.0"],
    }
    assert run.windows["loss"].tolist() == [2 / step for step in range(1, 6)], "the loss is another one"
    assert run.garbled == 0


def test_an_empty_history_is_a_run_without_a_window(tmp_path: Path) -> None:
    run = load_run(write(tmp_path))
    assert len(run) == 0
    assert run.last_time is None
    assert run.finished is None
    assert run.windows["loss"].shape == (0,)
    assert run.samples_at(np.array([0, 5])).tolist() == [0, 0]


def test_a_value_that_is_no_number_costs_its_window_alone(tmp_path: Path) -> None:
    write(tmp_path, report(1), report(2), report(3))
    path = tmp_path / "history.jsonl"
    path.write_text(path.read_text().replace('"loss":1.0', '"loss":"red"'))
    run = load_run(tmp_path)
    assert run.windows["step"].tolist() == [1, 3]
    assert run.garbled == 1


DEEP = "[" * 100_000


def test_a_configuration_without_end_is_none(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    (tmp_path / "config.json").write_text(DEEP)
    assert load_run(tmp_path).config == {"error": "config.json is not JSON"}


@pytest.mark.parametrize("name", [".", "missing", "file"])
def test_a_directory_without_a_history(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoHistoryError, match=r"run_dir=.*a directory that holds history\.jsonl\. Pass the run_dir"):
        load_run(tmp_path / name)


def test_configuration_and_environment_lie_beside_it(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    assert (load_run(tmp_path).config, load_run(tmp_path).environment) == ({}, {})
    write_json(tmp_path / "config.json", {"lr": 0.1})
    (tmp_path / "environment.json").write_text("{")
    run = load_run(tmp_path)
    assert run.config == {"lr": 0.1}
    assert run.environment == {"error": "environment.json is not JSON"}
