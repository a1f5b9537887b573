"""Runs chosen tests in a child process, for ``mutants.py``, and knows by coverage which test runs which line."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")  # as tests/machine.py
import coverage
import hypothesis
import psutil
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401  (what is loaded here does not have to be loaded for each mutant)

ROOT = Path(__file__).resolve().parent.parent
MEMORY, OWN_ERROR = 6 * 2**30, 99
IDLE = 180.0
"""Seconds without any work after which a test is taken to hang; others may wait for processes that they start."""
COLLECTED = 1200
"""Seconds of processor time that the everyday tests of one file may take under coverage."""


class Chosen:
    """Has pytest run these tests in this order, writes down which fails, and in ``state`` what those that pass run."""

    def __init__(self, tests: Sequence[str] | None, failed: int, state: Path | None) -> None:
        self._order, self._failed = None if tests is None else {test: i for i, test in enumerate(tests)}, failed
        self._state, self._seconds, self._failing = state, {}, set[str]()
        if state is not None:
            self._coverage = coverage.Coverage(state.with_suffix(".coverage"), source=["autoaccum"], config_file=False)
            self._coverage.start()

    def pytest_collection(self) -> None:
        own = hypothesis.settings(database=None, derandomize=True, phases=hypothesis.settings.default.phases[:3])
        hypothesis.settings.register_profile("mutants", own)
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (order := self._order) is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._state is None:
            return (yield)
        self._coverage.switch_context(item.nodeid)
        began = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = sum(os.times()[:4]) - began
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._failed, f"{report.nodeid}\n".encode())
        if not report.passed:
            self._failing.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        if self._state is not None:
            self._coverage.stop()
            self._coverage.save()
            passed = {test: round(s, 3) for test, s in self._seconds.items() if test not in self._failing}
            self._state.write_text(json.dumps(passed))


def outcome_of(
    tree: Path, tests: Sequence[str] | None, files: Sequence[str], marks: str, limit: float, state: Path | None = None
) -> tuple[str, list[str]]:
    """Return what came of the tests in a child process, and those that failed."""
    with tempfile.TemporaryFile("w+") as failed:
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
                os.chdir(tree)
                for number in (1, 2):
                    os.dup2(os.open(tree.parent / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
                sys.path[:0], os.environ["PYTHONPATH"] = [str(tree)], str(tree)
                options = ["-n0", "-q", "-pno:cacheprovider", "-ofaulthandler_timeout=0", "-m", marks, *files]
                options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is loaded before
                options += ["-x"] if state is None and tests is not None else []
                os._exit(pytest.main(options, plugins=[Chosen(tests, failed.fileno(), state)]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(OWN_ERROR)
        (done, status), used, since = (0, 0), 0.0, time.monotonic()
        while not done:
            time.sleep(0.05)
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                process = psutil.Process(pid)
                if (now := sum(process.cpu_times()[:4])) > used:  # however busy the machine is
                    used, since = now, time.monotonic()
                if time.monotonic() - since > IDLE or process.memory_info().rss > MEMORY:
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what tests have started and a mutant has not ended
        failed.seek(0)
        names = failed.read().splitlines()
    code = os.waitstatus_to_exitcode(status)
    if code == OWN_ERROR:
        raise RuntimeError((tree.parent / "log").read_text()[-3000:])
    if code in (0, 5) and not names:
        return "survived", []
    return "killed", names or [signal.Signals(-code).name if code < 0 else f"pytest's exit code {code}"]


class Covered:
    """Which everyday tests run a line, and how many seconds each takes."""

    def __init__(self, state: Path, tree: Path) -> None:
        self._state, self._tree, self._lines = state / "coverage", tree, {}
        self._state.mkdir(exist_ok=True)
        self.seconds: dict[str, float] = {}
        self.files: list[str] = []
        every = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "autoaccum").glob("[a-z]*/")]
        self.every = sorted(path.relative_to(ROOT).as_posix() for path in every)
        for file in self.every:
            self._load(file)

    def _load(self, file: str) -> None:
        if (kept := self._of(file)).exists() and file not in self.files:
            self.seconds |= json.loads(kept.read_text())
            self.files.append(file)
            self._lines.clear()

    def _of(self, file: str) -> Path:
        return self._state / f"{file.replace('/', '.')}.json"

    def run(self, file: str) -> None:
        """Run the everyday tests of a file, where that was not done."""
        if file in self.every and not self._of(file).exists():
            marks = "not slow and not integrations"
            outcome = outcome_of(self._tree, None, [file], marks, COLLECTED, self._of(file))
            print(file, outcome, flush=True)
            if not self._of(file).exists():
                self._of(file).write_text("{}")
        self._load(file)

    def tests(self, module: str, lines: range) -> set[str]:
        if module not in self._lines:
            found = collections.defaultdict(set)
            for file in self.files:
                data = coverage.CoverageData(str(self._of(file).with_suffix(".coverage")))
                data.read()
                for name in data.measured_files():
                    if name.endswith(module):
                        for line, contexts in data.contexts_by_lineno(name).items():
                            found[line] |= {context for context in contexts if context in self.seconds}
            self._lines[module] = found
        return {test for line, tests in self._lines[module].items() if line in lines for test in tests}

    def fitting(self, tests: set[str], seconds: float) -> list[str]:
        """Return the cheapest that take no longer than this together, and one at least."""
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > seconds:
                break
            chosen.append(test)
        return chosen
