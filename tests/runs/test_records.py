"""history.jsonl: what is written is read again, whatever became of the process that wrote it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Compiled, Finished, Joined, Notice, Record, Replanned, Resumed, Saved, StepReport
from autoaccum.memory.clock import ManualClock, using
from autoaccum.reporting import RecordWriter, environment, load_run, read_records, write_json
from autoaccum.runs.records import FIELDS
from tests.models import classes, mlp
from tests.reporting.synthetic import planned, report, shared, started, verified

EVERY: tuple[Record, ...] = (
    started(None),
    planned(3, 3, 2, predicted_bytes=77),
    report(1, (3, 3, 2), grad_norm=1.5),
    Replanned(step=2, old=(3, 3, 2), new=(2, 2, 2, 2), reason="out of memory"),
    autoaccum.events.OutOfMemory(step=2, phase="training", micro_batch=3),
    autoaccum.events.Validated(step=2, epoch=0, loss=0.1 + 0.2, num_samples=5, micro_batch=3, seconds=1e-9),
    autoaccum.events.Validated(
        step=2,
        epoch=0,
        loss=0.5,
        metrics={"accuracy": 0.1 + 0.2, "hits": math.inf},
        num_samples=5,
        micro_batch=3,
        seconds=1.0,
    ),
    autoaccum.events.StepSkipped(step=3, reason='a "quoted"\nreason, 2 lines é'),
    Notice(cause="nan", consequence="inf", cure="\x00"),
    verified(3e-7),
    verified(math.inf, tensor="net.0.weight"),
    Saved(step=3, path="a/b", seconds=0.25),
    shared(),
    Resumed(step=3, num_samples=24, checkpoint="a/b"),
    Finished(step=3, reason="budget"),
    autoaccum.events.Waiting(step=2, phase="training", micro_batch=1, needed_bytes=3, limit_bytes=2, seconds=60.0),
    autoaccum.events.MemorySaving(step=2, old="off", new="checkpoint, every Block", reason="r", blocks=4),
    autoaccum.events.Recomputed(step=3, saving="checkpoint, every Block", blocks=12),
    Compiled(step=1, micro_batch=16, compilations=2, seconds=1.5),
    Joined(
        step=1,
        reason="samples meet",
        error=1e-7,
        tolerance=2e-5,
        tensor=None,
        samples=7,
        held=0.5,
        opened=("head", "b"),
        seconds=0.1,
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.jsonl"


def record(path: Path, *records: Record) -> None:
    writer = RecordWriter(path)
    for one in records:
        writer(one)
    writer.close()


def test_every_type_of_record_comes_back_as_it_was(path: Path) -> None:
    assert {type(one) for one in EVERY} == set(get_args(Record))
    record(path, *EVERY)
    assert tuple(read_records(path)) == EVERY
    assert len(path.read_bytes().splitlines()) == len(EVERY), "a line each, whatever they hold"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not(loss: float, path: Path) -> None:
    record(path, report(1, loss=loss, gradient_squared=loss))
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["loss"] == str(loss)
    (read,) = read_records(path)
    assert isinstance(read, StepReport)
    assert str(read.loss) == str(read.gradient_squared) == str(loss)
    assert read.noise_scale is None
    column = load_run(path.parent).windows["loss"]
    assert str(column[0]) == str(loss)


def test_a_line_has_its_type_its_time_and_the_fields(path: Path) -> None:
    with using(ManualClock(stamp=1234.5)):
        record(path, Finished(step=3, reason="budget"))
    assert path.read_text() == '{"type":"Finished","time":1234.5,"step":3,"reason":"budget","stopped_by":""}\n'


def test_each_record_can_be_read_as_soon_as_it_is_taken(path: Path) -> None:
    writer = RecordWriter(path)
    assert list(read_records(path)) == []
    for count, one in enumerate(EVERY, start=1):
        writer(one)
        assert len(list(read_records(path))) == count
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer(EVERY[0])


def test_a_writer_appends_to_what_is_there(path: Path) -> None:
    record(path, *EVERY[:3])
    record(path, *EVERY[3:])
    assert tuple(read_records(path)) == EVERY


@pytest.mark.parametrize("kept", [1, 10, -1])
def test_a_line_that_was_torn_off_takes_no_other_with_it(kept: int, path: Path) -> None:
    record(path, report(1), report(2))
    first, torn = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + torn[:kept])
    before = read_records(path)
    assert len(list(before)) == (2 if kept == -1 else 1), "a record that lacks only the end of its line is whole"
    record(path, report(3))
    after = read_records(path)
    assert [one.step for one in after] == ([1, 2, 3] if kept == -1 else [1, 3])  # type: ignore[union-attr]
    assert after.garbled == (0 if kept == -1 else 1)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\x00\x00",
        b"\xff\xfe",
        b"1",
        b"null",
        b"[]",
        b"{}",
        b'{"type": "Finished", "time": 1.0, "step": 3',
        b'{"type": "Finished", "time": 1.0, "step": 3}',
        b'{"type": "StepReport", "time": 1.0, "step": 3}',
        b'{"type": "Finished", "time": 1.0, "step": 3, "reason": "r"},{}',
    ],
)
def test_a_garbled_line_is_left_out_and_counted(line: bytes, path: Path) -> None:
    record(path, report(1), report(2))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + second)
    records = read_records(path)
    assert list(records) == [report(1), report(2)]
    assert (records.garbled, records.unknown) == (1, 0)
    run = load_run(path.parent)
    assert run.windows["step"].tolist() == [1, 2]
    assert run.garbled == 1


def test_outputs_come_back_as_they_were(path: Path) -> None:
    outputs: dict[str, Any] = {
        "mean": 0.25,
        "none": math.nan,
        "losses": torch.tensor([0.1, math.inf, math.nan]),
        "wide": torch.tensor([[0.1], [0.2]], dtype=torch.float64),
        "half": torch.tensor([1.5]).bfloat16(),
        "ids": torch.tensor([3, 1], dtype=torch.int16),
        "right": torch.tensor([True, False]),
    }
    record(path, report(1, outputs=outputs), report(2))
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert first["outputs"]["mean"] == 0.25
    assert first["outputs"]["none"] == "nan"
    assert first["outputs"]["losses"] == [torch.tensor(0.1).item(), "inf", "nan"]
    assert first["outputs"]["wide"] == [[0.1], [0.2]]
    assert first["outputs"]["right"] == [True, False]
    assert "outputs" not in second, "most runs have none"
    read = read_records(path)
    with_outputs, without = read
    assert isinstance(with_outputs, StepReport)
    assert repr(with_outputs.outputs) == repr(outputs), "values, shapes and dtypes"
    assert without == report(2)
    assert read.garbled == 0


def test_what_a_newer_version_wrote_is_left_out(path: Path) -> None:
    record(path, report(1))
    line = json.loads(path.read_text())
    newer = [{**line, "colour": "red"}, {"type": "Painted", "time": 2.0, "colour": "red"}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in newer))
    records = read_records(path)
    assert list(records) == [report(1)]
    assert (records.garbled, records.unknown) == (0, 1)
    assert load_run(path.parent).garbled == 0


def test_what_an_older_version_did_not_write_has_its_default(path: Path) -> None:
    record(path, report(1))
    line = json.loads(path.read_text())
    for field in ("noise_scale", "gradient_squared", "gradient_variance"):
        del line[field]
    path.write_text(json.dumps(line))
    assert list(read_records(path)) == [report(1)]


def test_a_file_that_is_not_there_is_said_at_once(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_records(path)


def test_types_of_fields() -> None:
    assert FIELDS["Resumed"] == {"step": int, "num_samples": int, "checkpoint": str}


def test_a_run_is_recorded_as_it_was(path: Path) -> None:
    """Every window and every event of a real one, in order."""
    seen: list[Record] = []
    writer = RecordWriter(path)
    result = autoaccum.fit(
        mlp(),
        classes(20),
        effective_batch=8,
        loss_fn=cross_entropy,
        validation_data=classes(5),
        clip_norm=1.0,
        noise_scale=True,
        epochs=2,
        callbacks=[writer, seen.append],
        device="cpu",
        progress=False,
    )
    writer.close()
    read = list(read_records(path))
    assert read == seen
    assert [one for one in read if isinstance(one, StepReport)] == list(result.history)
    run = load_run(path.parent)
    assert run.windows["loss"].tolist() == [one.loss for one in result.history]
    assert run.windows["micro_batch"].tolist() == [max(one.micro_batches) for one in result.history]
    assert run.finished == "budget"


def test_a_json_file_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "config.json"
    write_json(path, {"lr": math.inf, "data": [1, None], "name": "é"})
    assert json.loads(path.read_text()) == {"lr": "inf", "data": [1, None], "name": "é"}
    with pytest.raises(TypeError):
        write_json(path, {"model": object()})

    def fails(*paths: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="no room"):
        write_json(path, {})
    assert json.loads(path.read_text())["name"] == "é"
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_the_environment_names_neither_machine_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "a-host-of-mine")
    found = environment()
    on = ["autoaccum", "python", "torch", "numpy", "os", "cpu_count", "device", "cuda"]
    assert list(found) == [*on, "command", "commit", "started"]
    assert found["autoaccum"] == autoaccum.__version__
    assert "a-host-of-mine" not in json.dumps(found)
