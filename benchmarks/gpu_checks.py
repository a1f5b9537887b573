"""Checks of ``gpu.py``: each runs in a process of its own under a deadline, and what it finds is kept at once.

A state directory holds ``NAME.json`` for each check that has ended, however it ended, and ``NAME.log`` with its output.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The package and the tests' stand-in lie beside this folder, whether they are installed or not.
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

STAGE_SECONDS = 480
"""What the checks of one stage may take together, over all calls."""
PATIENCE = 3
"""How many times as long as it is thought to take a check may take."""
LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    figures: str
    aim: str
    verdict: str
    """"met", "missed", "failed: why" or "not run: why"."""


def row(figures: str, aim: str, met: bool) -> Row:
    return Row(figures=figures, aim=aim, verdict="met" if met else "missed")


def not_run(why: str, aim: str = "") -> Row:
    return Row(figures="", aim=aim, verdict=f"not run: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One process that measures something."""

    stage: str
    name: str
    run: Callable[[], Sequence[Row]]
    about: int
    """Seconds that it is thought to take."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What has to be set before torch is loaded."""


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process that leads a group; return whether it ended in time, and end all of its group."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:  # on Ctrl-C too; what it has started may outlive it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # A pipe would end the cell of a table.
    return " / ".join(line[:160] for line in lines[-LINES:]).replace("|", "¦") or "no output"


class Runner:
    """Runs checks that have not ended yet, and remembers those that have."""

    def __init__(self, checks: Sequence[Check], state: Path, command: Callable[[Check, Path], list[str]]) -> None:
        """``command`` starts a check, which writes its rows as JSON to the path."""
        self._checks, self._state, self._command = checks, state, command
        self._skipped: dict[str, str] = {}
        state.mkdir(parents=True, exist_ok=True)

    def run(self, again: str | None, stage: str | None, budget: float, after_each: Callable[[], None]) -> None:
        """Run what is wanted and fits; ``again`` is part of the names of checks whose results are given up first."""
        ends = time.monotonic() + budget
        wanted = [check for check in self._checks if stage in (None, check.stage)]
        asked = {check.name for check in wanted if again is not None and again in check.name}
        for check in wanted:
            if check.name in asked:
                self._file(check).unlink(missing_ok=True)
        for check in wanted:
            if self._found(check) is not None:
                continue
            left = {"the budget": ends - time.monotonic()}
            if check.name not in asked:
                left[f"the {STAGE_SECONDS} s of its stage"] = STAGE_SECONDS - self._spent(check.stage)
            tightest = min(left, key=left.__getitem__)
            if left[tightest] < check.about:
                room = max(0, left[tightest])
                self._skipped[check.name] = f"takes about {check.about} s, and {room:.0f} of {tightest} are left"
            else:
                self._run(check, min(PATIENCE * check.about, left[tightest]))
            after_each()

    def rows(self) -> list[list[object]]:
        """Return the table as it is known so far."""
        table: list[list[object]] = []
        for check in self._checks:
            found = self._found(check)
            rows = found["rows"] if found else [asdict(not_run(self._skipped.get(check.name, "not yet")))]
            table += [[check.stage, check.name, row["figures"], row["aim"], row["verdict"]] for row in rows]
        return table

    def _run(self, check: Check, seconds: float) -> None:
        print(f"{check.stage}: {check.name} (at most {seconds:.0f} s)", flush=True)
        log, into = self._file(check).with_suffix(".log"), self._file(check).with_suffix(".rows")
        into.unlink(missing_ok=True)
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(check, into),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **check.environment},
                start_new_session=True,
            )
            is_done = ended(process, seconds)
        if not is_done:
            verdict = f"failed: not done after {seconds:.0f} s; its last output: {last_lines(log)}"
        elif process.returncode < 0:
            verdict = f"failed: killed by {signal.Signals(-process.returncode).name}; {last_lines(log)}"
        else:
            verdict = f"failed: exit {process.returncode}: {last_lines(log)}"
        rows = [asdict(Row(figures="", aim="", verdict=verdict))]
        if is_done and process.returncode == 0 and into.exists():
            rows = json.loads(into.read_text())
        into.unlink(missing_ok=True)
        made = self._file(check).with_suffix(".tmp")
        made.write_text(json.dumps({"seconds": time.monotonic() - started, "rows": rows}))
        made.replace(self._file(check))  # at once: a call that is killed leaves all of it or nothing

    def _spent(self, stage: str) -> float:
        """Return the seconds that the stage has taken so far, in earlier calls too."""
        found = [self._found(check) for check in self._checks if check.stage == stage]
        return sum(one["seconds"] for one in found if one is not None)

    def _file(self, check: Check) -> Path:
        return self._state / f"{check.stage}-{re.sub(r'[^0-9A-Za-z]+', '-', check.name)}.json"

    def _found(self, check: Check) -> dict[str, Any] | None:
        path = self._file(check)
        return json.loads(path.read_text()) if path.exists() else None
