"""The scoreboard: its figures are those of the tables, and stages are run once."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script, as those beside it do."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def scoreboard(benchmark: Any) -> Any:
    return benchmark("scoreboard")


def test_what_is_written_is_what_the_tables_say(scoreboard: Any) -> None:
    said = "python benchmarks/scoreboard.py --write"
    assert (RESULTS / "SCOREBOARD.md").read_text() == scoreboard.page(RESULTS), said


def test_every_committed_table_is_that_of_a_stage(benchmark: Any) -> None:
    stages = benchmark("run_all_stages").STAGES
    written = {name for stage in stages for name in stage.tables}
    assert {path.stem for path in RESULTS.glob("*.md")} <= written | {"README", "SCOREBOARD"}
    assert all((BENCHMARKS / f"{stage.name}.py").exists() for stage in stages)
    assert {part.table for part in benchmark("scoreboard_lines").PARTS} <= written


def test_areas_are_those_that_claims_are_made_of(benchmark: Any) -> None:
    areas = [part.area for part in benchmark("scoreboard_lines").PARTS]
    assert list(dict.fromkeys(areas)) == [
        "exactness",
        "verification",
        "replay",
        "search",
        "time to train",
        "overhead",
        "pressure",
        "window losses",
        "ranks",
        "sweeps",
        "GPU",
    ]


MACHINE = "Measured on 2026-01-02: A(R) Chip, 4 cores (1 threads), 8 GiB, {device}, Linux, Python 3.11.7, torch 2.13.0."


def table(directory: Path, name: str, header: str, *rows: str, device: str = "no GPU") -> Path:
    path = directory / f"{name}.md"
    cells = [header, "|".join([" --- "] * (header.count("|") + 1)), *rows]
    lines = "\n".join(f"|{line}|" for line in cells)
    path.write_text(f"# {name}\n\nWhat it is.\n\n{lines}\n\n{MACHINE.format(device=device)}\n")
    return path


EXACTNESS = "loss | autoaccum | autoaccum float32 | by steps | Accelerate | Lightning"


def test_lines_of_exactness(scoreboard: Any, tmp_path: Path) -> None:
    table(
        tmp_path,
        "exactness",
        EXACTNESS,
        "a | 2e-16 | 1e-07 | 1e-16, last window lost | 1e-16 | 0.67",
        "b | 3e-16, no step | 2e-07 | 0.5 | 1e-16, steps on nothing | crashes: KeyError",
        "c | 4e-12 | 3e-05 | 2e-16 |  | 1e-16",
        "autocast |  | 4e-03 |  |  | ",
    )
    ours, float32, tutorials, autocast = [line for _, line, of in scoreboard.lines(tmp_path) if of is not None]
    assert ours.ours == "2 of 3, worst 4e-12"
    assert ours.beside == "Accelerate: 1 of 2, worst 1e-16; Lightning: 1 of 3, worst 0.67"
    assert float32.ours == "2 of 3, worst 3e-05"
    assert tutorials.beside == "by steps: 1 of 3, worst 0.5"
    assert autocast.ours == "4e-03"


LOGGED = "transformers | optimizer | trainer | split | logged loss | gradient norm, step 1"


def test_lines_of_the_logged_loss_are_of_the_first_version(scoreboard: Any, tmp_path: Path) -> None:
    table(
        tmp_path,
        "readme_figure",
        LOGGED,
        "5.23.0 | SGD | Trainer | 16 x 4 | 3.9 | 4.0",
        "5.23.0 | SGD | AutoAccumTrainer | 16 x 4 | 1.0 | 1.1",
        "5.24.0 | SGD | Trainer | 16 x 4 | 5.9 | 6.0",
        "5.24.0 | SGD | AutoAccumTrainer | 16 x 4 | 2.0 | 2.1",
    )
    [line] = [line for _, line, of in scoreboard.lines(tmp_path) if of is not None]
    assert line.what == "the loss that a Trainer logs at 16 x 4, divided by that of the full batch, SGD"
    assert (line.ours, line.beside) == ("1.0", "Transformers 5.23.0: 3.9, gradient norm 4.0")


TIMES = "model | limit | contestant | seconds | to by hand | effective"


def test_lines_of_time_to_train(scoreboard: Any, tmp_path: Path) -> None:
    table(
        tmp_path,
        "time_to_train",
        TIMES,
        "GPT | 1 MiB | by hand, best of all | 9.0 | 1.000 | 256",
        "GPT | 1 MiB | autoaccum fit | 9.0 | 1.004 | 256",
        "GPT | 1 MiB | Lightning power | 9.0 | 1.249 | 190",
        "GPT | 2 MiB | by hand, best of all | 9.0 | 1.000 | 256",
        "GPT | 2 MiB | autoaccum fit | 9.0 | 0.951 | 256",
        "GPT | 2 MiB | Lightning power | failed: no |  | ",
        "GPT | 2 MiB | Accelerate | 9.0 | 1.5 | 256",
    )
    first, one, two = [line for _, line, of in scoreboard.lines(tmp_path) if of and of.name == "time_to_train"]
    assert first.ours == "0.95 to 1.00"
    assert first.beside == "peers 1.25 to 1.50; 1 of 3 failed, 1 had another effective batch than was asked for"
    assert (one.ours, one.beside) == ("1.004", "Lightning power: 1.249")
    assert (two.ours, two.beside) == ("0.951", "Lightning power: failed; Accelerate: 1.5")


CHECKS = "stage | check | figures | aim | verdict"


@pytest.mark.parametrize("device", ["Stand-in", "H200"])
def test_the_stand_in_is_no_gpu(scoreboard: Any, tmp_path: Path, device: str) -> None:
    table(tmp_path, "gpu", CHECKS, "a | x | 1 | 2 | met", "a | y | 3 | 2 | missed", device=device)
    first, missed = [line for area, line, _ in scoreboard.lines(tmp_path) if area == "GPU"]
    counts = "1 met, 1 missed, 0 failed, 0 not run"
    assert first.ours == (
        f"not on a GPU as a whole; on the stand-in, which is no GPU: {counts}"
        if device == "Stand-in"
        else f"on H200: {counts}"
    )
    assert (missed.what, missed.ours) == ("missed: y", "3")


def test_what_was_not_measured_says_so_and_what_was_has_its_day_and_machine(scoreboard: Any, tmp_path: Path) -> None:
    table(tmp_path, "overhead", "model | loop | µs a window | beside by hand | ratio", "MLP | fit | 5 | +1 | 1.25")
    page = scoreboard.page(tmp_path)
    assert "| **overhead** | a window by `fit`, beside a loop by hand | MLP 1.25 (+1 µs a window) |" in page
    assert "[2026-01-02, A Chip, 4 cores](overhead.md)" in page
    assert "| **search** | the largest micro-batch that fits | not measured |  |  |" in page
    assert "cold_start_cpu: not measured" in page


class Stages:
    """A runner of stages that are programs, and which of them were started."""

    def __init__(self, benchmark: Any, place: Path, **programs: str) -> None:
        self._module = benchmark("run_all_stages")
        self.started: list[str] = []
        self.record = place / "results" / "stages.json"
        self._programs = programs
        self._stages = [
            self._module.Stage(name=name, tables=(name,), peers=("torch", "no-such-peer")) for name in programs
        ]
        self._runner = self._module.Runner(place / "state", place / "results", self.record, self._command)

    def _command(self, stage: Any) -> list[str]:
        self.started.append(stage.name)
        return [sys.executable, "-c", self._programs[stage.name]]

    def run(self, again: str | None = None) -> bool:
        return bool(self._runner.run(self._stages, again, lambda: None))


def writes(name: str) -> str:
    return f"import os, pathlib; pathlib.Path(os.environ['AUTOACCUM_RESULTS'], '{name}.md').write_text('| a |')"


def test_a_stage_that_is_done_is_not_run_again_unless_asked(benchmark: Any, tmp_path: Path) -> None:
    stages = Stages(benchmark, tmp_path, one=writes("one"), two=writes("two_quick"))
    assert stages.run()
    assert stages.run()
    assert stages.started == ["one", "two"]
    assert Stages(benchmark, tmp_path, one=writes("one")).run()
    stages.run(again="tw")
    assert stages.started == ["one", "two", "two"]
    entry = json.loads(stages.record.read_text())["one"]
    assert entry["outcome"] == "done"
    assert entry["seconds"] >= 0
    assert set(entry["peers"]) == {"torch", "no-such-peer"}
    assert entry["peers"]["no-such-peer"] == "not installed"


def test_a_stage_that_fails_says_how_and_is_run_by_the_next_call(benchmark: Any, tmp_path: Path) -> None:
    programs = {"fails": "raise SystemExit('no | such thing')", "idles": "print('nothing')", "works": writes("works")}
    stages = Stages(benchmark, tmp_path, **programs)
    assert not stages.run()
    outcomes = {name: entry["outcome"] for name, entry in json.loads(stages.record.read_text()).items()}
    assert outcomes == {"fails": "exit 1: no ¦ such thing", "idles": "wrote no table: nothing", "works": "done"}
    stages.run()
    assert stages.started == ["fails", "idles", "works", "fails", "idles"]


def test_a_stage_that_does_not_end_is_given_up(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark("run_all_stages"), "DEADLINE", 0)
    stages = Stages(benchmark, tmp_path, waits="import signal; signal.pause()")
    assert not stages.run()
    assert json.loads(stages.record.read_text())["waits"]["outcome"].startswith("not done after 0 s: ")


def test_the_time_of_a_stage_and_its_peers_are_told(benchmark: Any, scoreboard: Any, tmp_path: Path) -> None:
    entry = {
        "date": "2026-01-03",
        "seconds": 7,
        "outcome": "done",
        "peers": {"accelerate": "1.0", "x": "not installed"},
    }
    failed = {"date": "2026-01-03", "seconds": 5, "outcome": "exit 1: no", "peers": {}}
    (tmp_path / scoreboard.RECORD).write_text(json.dumps({"search": entry, "kills": failed}))
    page = scoreboard.page(tmp_path)
    assert "| `search.py` | search: not measured | 7 s on 2026-01-03 | accelerate 1.0, x not installed |" in page
    assert "| `kills.py` | kills: not measured | 5 s on 2026-01-03, exit 1: no |  |" in page
    assert f"2 of {len(benchmark('run_all_stages').STAGES)} stages were timed, 12 s together" in page
