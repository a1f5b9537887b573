"""A page that goes on with its run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from autoaccum.cli.app import main
from autoaccum.events import Finished
from autoaccum.memory import clock
from autoaccum.memory.clock import ManualClock
from autoaccum.reporting.live import EVERY, follow
from tests.reporting.synthetic import report, write
from tests.sweeps.studies import storage, study, trial


class Writing:
    """Writes what takes so many seconds, and goes on for so many times."""

    def __init__(self, time: ManualClock, times: int, seconds: float = 0.0, interrupted: bool = False) -> None:
        self.time, self.times, self.seconds, self.interrupted = time, times, seconds, interrupted
        self.written: list[tuple[float, float | None]] = []
        self.begun: list[int] = []

    def __call__(self, every: float | None) -> int:
        self.written.append((self.time.now(), every))
        self.time.advance(self.seconds)
        if self.interrupted and len(self.written) == self.times:
            raise KeyboardInterrupt
        return len(self.written)

    def follow(self) -> int:
        with clock.using(self.time):
            return follow(self, lambda number: number < self.times, self.begun.append)


def test_it_is_written_until_the_end_and_then_once_for_good() -> None:
    writing = Writing(ManualClock(), times=3)
    assert writing.follow() == 4
    assert writing.written == [(0, EVERY), (EVERY, EVERY), (2 * EVERY, EVERY), (2 * EVERY, None)]
    assert writing.begun == [1], "told once, when there is something to open"


def test_a_page_that_takes_long_is_written_less_often() -> None:
    writing = Writing(ManualClock(), times=2, seconds=5.0)
    writing.follow()
    assert [at for at, _ in writing.written] == [0, 25, 30]


def test_an_interrupt_ends_it_with_a_page_that_is_not_loaded_again() -> None:
    writing = Writing(ManualClock(), times=2, interrupted=True)
    assert writing.follow() == 3
    assert [every for _, every in writing.written] == [EVERY, EVERY, None]


def test_the_command_follows_a_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write(tmp_path / "run", report(1))
    page = run_dir / "report.html"
    said: list[tuple[str, bool]] = []

    class Time(ManualClock):
        def sleep(self, seconds: float) -> None:
            said.append((capsys.readouterr().out, 'content="10"' in page.read_text()))
            write(run_dir, report(2), Finished(step=2, reason="budget"))

    with clock.using(Time()):
        assert main(["report", str(run_dir), "--follow"]) == 0
    assert said == [(f"{page}\n", True)]
    assert "refresh" not in page.read_text()
    assert "16 samples in 2 steps" in page.read_text()
    assert (run_dir / "report-loss.png").exists()
    assert capsys.readouterr().out == ""


def test_the_command_follows_a_sweep_until_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = study(trial(0.5), storage=storage(tmp_path), study_name="a")
    said: list[str] = []

    class Time(ManualClock):
        def sleep(self, seconds: float) -> None:
            said.append((tmp_path / "report.html").read_text())
            made.add_trial(trial(0.25))
            if len(said) == 2:
                raise KeyboardInterrupt

    with clock.using(Time()):
        assert main(["report", str(tmp_path), "--follow"]) == 0
    assert [text.count("1 ended") + 2 * text.count("2 ended") for text in said] == [1, 2]
    assert "3 ended" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
