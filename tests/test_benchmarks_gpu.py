"""The machinery of ``benchmarks/gpu.py``, on made-up checks: what has ended stays, and nothing that fails ends the rest."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu_checks
from benchmarks.gpu_checks import Check, Row, Runner, ended, last_lines, not_run, row

GOOD = "import sys, json, pathlib; pathlib.Path(sys.argv[1]).write_text(json.dumps({rows}))"
A_ROW = {"figures": "2 of 2", "aim": "2", "verdict": "met"}
AMPLE = 600
"""Seconds: nothing here waits for a deadline."""


def nothing() -> list[Row]:
    raise AssertionError("a check runs in a process of its own")


class Checks:
    """A runner of checks that are programs, and which of them were started."""

    def __init__(self, state: Path, programs: dict[str, str], about: int = 1, **environments: dict[str, str]) -> None:
        self.started: list[str] = []
        self.programs = programs
        checks = [
            Check(stage=name[0], name=name, run=nothing, about=about, environment=environments.get(name, {}))
            for name in programs
        ]
        self.runner = Runner(checks, state, self._command)
        self.tables: list[list[list[object]]] = []

    def _command(self, check: Check, into: Path) -> list[str]:
        self.started.append(check.name)
        return [sys.executable, "-c", self.programs[check.name], str(into)]

    def run(self, again: str | None = None, stage: str | None = None, budget: float = AMPLE) -> list[list[object]]:
        self.runner.run(again, stage, budget, lambda: self.tables.append(self.runner.rows()))
        return self.runner.rows()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "PATIENCE", AMPLE)
    monkeypatch.setattr(gpu_checks, "STAGE_SECONDS", 100 * AMPLE)


def good(*rows: dict[str, str]) -> str:
    return GOOD.format(rows=json.dumps(list(rows) or [A_ROW]))


def test_what_has_ended_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    programs = {"a1": good(), "a2": "raise SystemExit('no such device')", "b1": good(A_ROW, A_ROW)}
    first = Checks(tmp_path, programs)
    table = first.run()
    assert first.started == ["a1", "a2", "b1"]
    assert [cells[:2] for cells in table] == [["a", "a1"], ["a", "a2"], ["b", "b1"], ["b", "b1"]]
    second = Checks(tmp_path, programs)
    assert second.run() == table
    assert second.started == []
    second.run(again="a2")
    assert second.started == ["a2"]


def test_a_check_that_fails_is_recorded_with_its_last_lines_and_the_others_go_on(tmp_path: Path) -> None:
    programs = {
        "a1": "print('one'); print('two | three', flush=True); raise SystemExit('four')",
        "a2": "import os, signal; print('begun', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
        "a3": good() + "; raise SystemExit('and then')",
        "a4": good(),
    }
    verdicts = [str(cells[-1]) for cells in Checks(tmp_path, programs).run()]
    assert verdicts[0] == "failed: exit 1: one / two ¦ three / four"
    assert verdicts[1].startswith("failed: killed by SIGSEGV; begun")
    assert verdicts[2] == "failed: exit 1: and then"
    assert verdicts[3] == "met"


def test_the_table_is_whole_after_each_check(tmp_path: Path) -> None:
    checks = Checks(tmp_path, {"a1": good(), "b1": good()})
    checks.run()
    assert [[cells[-1] for cells in table] for table in checks.tables] == [["met", "not run: not yet"], ["met", "met"]]


def test_one_stage_leaves_the_others(tmp_path: Path) -> None:
    checks = Checks(tmp_path, {"a1": good(), "b1": good()})
    assert [cells[-1] for cells in checks.run(stage="b")] == ["not run: not yet", "met"]
    assert checks.started == ["b1"]


def test_what_no_longer_fits_says_so_and_is_run_by_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(tmp_path, {"a1": good()}, about=50)
    assert checks.run(budget=0)[0][-1] == "not run: takes about 50 s, and 0 of the budget are left"
    monkeypatch.setattr(gpu_checks, "STAGE_SECONDS", 40)
    assert checks.run()[0][-1] == "not run: takes about 50 s, and 40 of the 40 s of its stage are left"
    assert checks.started == []
    monkeypatch.setattr(gpu_checks, "STAGE_SECONDS", AMPLE)
    assert checks.run()[0][-1] == "met"


def test_a_stage_counts_what_its_checks_took_in_earlier_calls(tmp_path: Path) -> None:
    programs = {"a1": good(), "a2": good(), "b1": good()}
    Checks(tmp_path, {"a1": good()}).run()
    [kept] = tmp_path.glob("*.json")
    kept.write_text(json.dumps({"seconds": 100 * AMPLE, "rows": [A_ROW]}))
    verdicts = [str(cells[-1]) for cells in Checks(tmp_path, programs).run()]
    assert re.fullmatch(r"not run: takes about 1 s, and 0 of the \d+ s of its stage are left", verdicts[1])
    assert [verdicts[0], verdicts[2]] == ["met", "met"]


def test_what_is_asked_for_again_is_run_whatever_its_stage_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(tmp_path, {"a1": good(), "a2": good()})
    monkeypatch.setattr(gpu_checks, "STAGE_SECONDS", 0)
    assert checks.run(again="a1")[0][-1] == "met"
    assert checks.started == ["a1"]


def test_a_check_has_its_environment_before_it_begins(tmp_path: Path) -> None:
    said = GOOD.format(rows="[{'figures': os.environ['OF_A1'], 'aim': '', 'verdict': 'met'}]").replace(
        "sys,", "sys, os,"
    )
    assert Checks(tmp_path, {"a1": said}, a1={"OF_A1": "here"}).run()[0][2] == "here"
    assert "OF_A1" not in os.environ


def test_one_that_overruns_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import subprocess, sys; pauses = 'import signal; signal.pause()'; "
        "child = subprocess.Popen([sys.executable, '-c', pauses]); "
        "print('waits for', child.pid, flush=True); child.wait()"
    )
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, start_new_session=True)
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    child = int(log.read_text().split()[-1])
    assert not ended(process, 0)
    assert process.returncode == -9
    for _ in range(1_000):  # seconds, of which none is needed
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("what the check has started is left over")
    assert last_lines(log) == f"waits for {child}"


def test_one_that_overruns_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "PATIENCE", 0)
    table = Checks(tmp_path, {"a1": "__import__('time').sleep(600)"}).run()
    assert str(table[0][-1]).startswith("failed: not done after 0 s; its last output: ")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(gpu_checks.__file__).parent)
    return importlib.import_module("gpu")


def test_the_checks_of_a_stage_fit_into_it(script: Any) -> None:
    checks = script.checks()
    assert {check.stage for check in checks} == set("abcde")
    for stage in "abcde":
        assert sum(check.about for check in checks if check.stage == stage) <= 480
    assert len({check.name for check in checks}) == len(checks)


def test_without_a_device_and_a_compiler_it_says_what_is_missing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(script.standin, "missing", lambda: "a compiler is missing")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert script.main() == 1
    assert capsys.readouterr().err == "There is no accelerator, and a compiler is missing.\n"


def test_rows_say_whether_they_are_met() -> None:
    assert [row("3", "2", met).verdict for met in (True, False)] == ["met", "missed"]
    assert not_run("needs CUDA", "2") == Row(figures="", aim="2", verdict="not run: needs CUDA")
