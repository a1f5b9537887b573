"""What reaches Weights & Biases: the real library, offline, and a stand-in for what it does online."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoaccum.errors import MissingExtraError
from autoaccum.events import Finished, Notice, OutOfMemory, Resumed, Validated
from autoaccum.reporting import WandbReporter
from tests.reporting.following import Broken, no_network, train
from tests.reporting.synthetic import planned, report, started

__all__ = ["no_network"]
BLOCK, HEADER = 32768, 7
"""Of the file that an offline run writes: a log of LevelDB's format."""


def logged(path: Path) -> Iterator[bytes]:
    """The records of such a file."""
    data, place, found = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # the rest of a block is empty
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + HEADER])
        found += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole one, or the last part of one
            yield found
            found = b""


def rows_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of an offline run's history, and the exit code of its end."""
    from wandb.proto import wandb_internal_pb2

    # A process of W&B's own writes the file, later, and the end of it after all else.
    record = wandb_internal_pb2.Record()
    while record.WhichOneof("record_type") != "exit":
        time.sleep(0.05)
        found = list(logged(path))
        record.ParseFromString(found[-1] if found else b"")
    rows, code = [], record.exit.exit_code
    for data in found:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows, code


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.machine_clock
def test_a_run_that_failed_goes_on_as_the_same_run(
    tmp_path: Path, no_network: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir, options = tmp_path / "run", {"dir": str(tmp_path), "project": "tests"}
    with pytest.raises(Broken):
        train(run_dir, WandbReporter(**options), ends=3)
    train(run_dir, WandbReporter(**options))
    # Of two parts that begin in the same second the later one has a number behind.
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "two parts of the same run"
    (first, failed), (second, done) = map(rows_of, files)
    assert (failed, done) == (1, 0)
    # Window 3 was trained twice, and is there twice, with the same values.
    losses = [(row["step"], row["loss"]) for row in [*first, *second] if "loss" in row]
    whole = [(report.step, report.loss) for report in train(None).history]
    assert losses == [*whole[:3], *whole[2:]]
    window = next(row for row in first if "loss" in row)
    assert {"grad_norm", "lr", "peak_bytes", "replays", "train/half", "micro_batch"} <= window.keys()
    assert [row["step"] for row in [*first, *second] if "validation/near" in row] == [2, 4, 6]
    assert any(row.get("event", "").startswith("step 2: resumed from ") for row in second)
    assert no_network == []


class Online:
    """As much of wandb as a reporter uses."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.options: dict[str, Any] = {}
        self.axes: list[tuple[str, str]] = []
        self.codes: list[int] = []
        self.config = SimpleNamespace(update=lambda facts, allow_val_change: self.options.update(facts))

    def init(self, **options: Any) -> Online:
        self.options = options
        self.id = options["id"]
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logs.append((values.pop("step"), values))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Online:
    found = Online()
    monkeypatch.setitem(sys.modules, "wandb", found)  # type: ignore[arg-type]
    return found


def test_what_is_of_a_step_is_logged_over_that_step(wandb: Online) -> None:
    tell = WandbReporter(project="p")
    validated = Validated(step=1, epoch=0, loss=0.25, metrics={"near": 0.5}, num_samples=5, micro_batch=3, seconds=1.0)
    ran_out, notice = OutOfMemory(step=2, phase="training", micro_batch=4), Notice(cause="A", consequence="B", cure="C")
    done = Finished(step=2, reason="interrupted")
    for record in (started(), planned(4, 4), report(1), validated, ran_out, notice, report(2), done):
        tell(record)
    assert wandb.axes == [("*", "step")]
    assert wandb.options["project"] == "p"
    assert wandb.options["autoaccum"] == {"device": "cpu", "num_steps": None, "num_samples": 20, "limit_bytes": 2**30}
    assert [(step, sorted(values)[:1]) for step, values in wandb.logs if "event" not in values] == [
        (1, ["accumulation_steps"]), (1, ["validation/loss"]), (2, ["accumulation_steps"])
    ]  # fmt: skip
    assert [(step, values["event"]) for step, values in wandb.logs if "event" in values] == [
        (1, "plan: 4 x 2 (r); memory: limit 1.00 GiB"), (2, "OutOfMemory"), (2, "A. B. C."), (2, "Finished"),
    ]  # fmt: skip
    assert wandb.codes == [0]


def test_the_id_is_kept_in_checkpoints_and_is_that_of_a_resumed_run(wandb: Online) -> None:
    first, second = WandbReporter(), WandbReporter()
    for record in (started(), report(1)):
        first(record)
    second.load_state_dict(first.state_dict())
    first.failed(RuntimeError())
    known = wandb.id
    for record in (started(), Resumed(step=1, num_samples=8, checkpoint="c"), report(2)):
        second(record)
    assert wandb.id == known != ""
    assert [step for step, _ in wandb.logs] == [1, 1, 2]
    second.close()
    assert wandb.codes == [1, 0]
    for record in (started(), report(1)):
        second(record)
    assert wandb.id != known, "another run, from its beginning"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"needs wandb, .* -m pip install wandb$") as raised:
        WandbReporter()
    assert (raised.value.package, raised.value.extra) == ("wandb", "wandb")
