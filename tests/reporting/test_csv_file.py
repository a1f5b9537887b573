"""The rows of a CSV file: what they hold, and that a run which goes on has none of them twice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from autoaccum.errors import ArgumentError
from autoaccum.events import Finished, Notice, OutOfMemory, Resumed, Validated
from autoaccum.reporting import CSVReporter
from tests.reporting.following import Broken, train
from tests.reporting.synthetic import report, started

NOTICE = Notice(cause="A", consequence="B", cure="C")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, *records: Any) -> list[dict[str, str]]:
    tell = CSVReporter(path)
    for record in records:
        tell(record)
    tell.close()
    return rows(path)


def resumed(step: int) -> Resumed:
    return Resumed(step=step, num_samples=8 * step, checkpoint="c")


def test_a_row_for_each_record(tmp_path: Path) -> None:
    validated = Validated(step=2, epoch=0, loss=0.25, metrics={"near": 0.5}, num_samples=5, micro_batch=3, seconds=1.0)
    short = OutOfMemory(step=3, phase="training", micro_batch=4)
    done = Finished(step=3, reason="budget")
    path = tmp_path / "new" / "run.csv"
    found = write(path, started(), report(2, (3, 2), grad_norm=0.5), validated, short, NOTICE, done)
    names = [(row["record"], row["step"]) for row in found]
    assert names == [("StepReport", "2"), ("Validated", "2"), ("OutOfMemory", "3"), ("Notice", ""), ("Finished", "3")]
    window, validation, ran_out, notice, _ = found
    filled = {name: value for name, value in window.items() if value}
    assert filled == {
        "record": "StepReport", "step": "2", "epoch": "0", "num_samples": "16", "loss": "1.0", "lr": "0.1",
        "grad_norm": "0.5", "effective_batch": "5", "micro_batch": "3", "accumulation_steps": "2", "replays": "0",
        "seconds": "0.1", "samples_per_second": "50.0", "peak_bytes": str(2 * 2**20), "limit_bytes": str(2**30),
    }  # fmt: skip
    assert (validation["validation/loss"], validation["validation/near"], validation["loss"]) == ("0.25", "0.5", "")
    assert ran_out["micro_batch"] == "4"
    assert notice["text"] == "A. B. C."


def test_a_name_that_comes_later_is_a_column_of_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    found = write(path, report(1), report(2, outputs={"accuracy": 0.75}), report(3))
    assert [row["train/accuracy"] for row in found] == ["", "0.75", ""]
    assert [row["step"] for row in found] == ["1", "2", "3"]
    assert [file.name for file in tmp_path.iterdir()] == ["run.csv"]


def test_a_run_that_goes_on_replaces_what_it_trains_again(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write(path, started(), report(1, outputs={"a": 0.5}), NOTICE, report(2), report(3, loss=7.0))
    with path.open("a") as file:
        file.write("StepReport,4,0")  # which a kill has torn off
    found = write(path, started(), resumed(2), NOTICE, report(3), Finished(step=3, reason="budget"))
    assert [(row["record"], row["step"]) for row in found] == [
        ("StepReport", "1"), ("Notice", ""), ("StepReport", "2"), ("Resumed", "2"), ("StepReport", "3"),
        ("Finished", "3"),
    ]  # fmt: skip
    assert [row["loss"] for row in found if row["step"] in ("1", "3")] == ["2.0", str(2 / 3), ""]
    assert found[0]["train/a"] == "0.5"
    found = write(path, started(), resumed(3), report(4))
    assert [row["record"] for row in found].count("Finished") == 0, "that end was none"


def test_a_finished_run_that_is_started_again_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write(path, started(), report(1), Finished(step=1, reason="budget"))
    before = path.read_text()
    write(path, started(), resumed(1), NOTICE, Finished(step=1, reason="budget"))
    assert path.read_text() == before


def test_another_run_puts_the_file_away(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    for step in (1, 2, 3):
        assert [row["step"] for row in write(path, started(), report(step))] == [str(step)]
    assert [row["step"] for row in rows(tmp_path / "run.before-1.csv")] == ["1"]
    assert [row["step"] for row in rows(tmp_path / "run.before-2.csv")] == ["2"]


def test_a_file_of_somebody_else_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("name,age\nx,3\n")
    with pytest.raises(ArgumentError, match="expected a new file, or one that a CSVReporter has written"):
        CSVReporter(path)
    assert path.read_text() == "name,age\nx,3\n"


def test_a_run_that_failed_and_went_on_has_the_rows_of_one_that_did_not(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        train(tmp_path / "a", CSVReporter(tmp_path / "a.csv"), ends=3)
    train(tmp_path / "a", CSVReporter(tmp_path / "a.csv"))
    train(tmp_path / "b", CSVReporter(tmp_path / "b.csv"))
    timed = ("seconds", "samples_per_second", "peak_bytes", "limit_bytes")

    def trained(name: str) -> list[Any]:
        found = [row for row in rows(tmp_path / name) if row["record"] in ("StepReport", "Validated")]
        return [{key: value for key, value in row.items() if key not in timed} for row in found]

    assert trained("a.csv") == trained("b.csv")
    assert [row["step"] for row in trained("a.csv")] == ["1", "2", "2", "3", "4", "4", "5", "6", "6"]
    assert trained("a.csv")[0]["train/half"] == "0.5"
