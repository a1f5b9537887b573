"""Ctrl-C and the signals of clusters: as a context, and through the command line to a run that another goes on from."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoaccum.cli import app as cli
from autoaccum.events import Finished, StepReport
from autoaccum.runs import checkpoint
from autoaccum.runs.records import HISTORY, read_records
from autoaccum.training.trainer import CLUSTERS, interrupt_calls
from tests.processes import in_turn


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_the_first_calls_and_the_second_stops() -> None:
    called: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with interrupt_calls(lambda: called.append(1)):
        send()
        assert called == [1]
        with pytest.raises(KeyboardInterrupt):
            send()
    assert called == [1]
    assert signal.getsignal(signal.SIGINT) is before


class Bar:
    def __init__(self) -> None:
        self.shown: list[bool] = []

    def ending(self, *, may_repeat: bool) -> None:
        self.shown.append(may_repeat)


def test_the_bar_says_at_once_that_it_was_heard() -> None:
    bar, called = Bar(), []
    with interrupt_calls(lambda: called.append(1), bar, clusters=True):  # type: ignore[arg-type]
        if CLUSTERS:
            send(CLUSTERS[0])
            assert bar.shown == [False]
        send()
        assert bar.shown[-1] is True
    assert len(called) == len(bar.shown)


def test_the_second_stops_even_where_the_first_was_ignored() -> None:
    """As a shell has it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_calls(lambda: None):
            send()
            with pytest.raises(KeyboardInterrupt):
                send()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def run() -> None:
        with interrupt_calls(lambda: None):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
class TestClusters:
    def test_their_signals_call_however_often_they_come(self) -> None:
        called: list[int] = []
        assert CLUSTERS == [signal.SIGTERM, signal.SIGUSR1]
        with interrupt_calls(lambda: called.append(1), clusters=True):
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                send(number)
            assert len(called) == 5
            with pytest.raises(KeyboardInterrupt):
                send()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_only_where_they_are_asked_for(self, number: int) -> None:
        heard: list[str] = []
        before = signal.signal(number, lambda *_: heard.append("theirs"))
        try:
            with interrupt_calls(lambda: heard.append("ours")):
                send(number)
            with interrupt_calls(lambda: heard.append("ours"), clusters=True):
                send(number)
            send(number)
        finally:
            signal.signal(number, before)
        assert heard == ["theirs", "ours", "theirs"]

    @pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
    def test_what_was_there_is_put_back_after_an_error_too(self, handler: signal.Handlers) -> None:
        numbers = [signal.SIGINT, *CLUSTERS]
        before = {number: signal.signal(number, handler) for number in numbers}
        try:
            with pytest.raises(RuntimeError), interrupt_calls(lambda: None, clusters=True):
                raise RuntimeError
            assert [signal.getsignal(number) for number in numbers] == [handler] * 3
        finally:
            for number, one in before.items():
                signal.signal(number, one)


RECIPE = """
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

FOLDER = Path(__file__).parent


def step(model, batch):
    (FOLDER / "inside").touch()
    end = time.monotonic() + float((FOLDER / "seconds").read_text())
    while time.monotonic() < end:
        time.sleep(0.01)
        (FOLDER / "beat").touch()
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def recipe():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    return {"model": model, "data": data, "training_step": step, "effective_batch": 8, "micro_batch": 4, "lr": 0.1,
            "device": "cpu", "cache": False, "progress": False}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and POSIX signals")
@pytest.mark.filterwarnings("ignore:The run in .* is finished")
@in_turn
class TestCommandLine:
    @pytest.fixture
    def recipe(self, tmp_path: Path) -> Path:
        (tmp_path / "recipe.py").write_text(RECIPE)
        (tmp_path / "seconds").write_text("0.01")
        return tmp_path / "recipe.py"

    @staticmethod
    def fit(recipe: Path, *options: object) -> int:
        """``autoaccum fit`` in a process of its own; its pid."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            code = 99
            try:
                code = cli.main(["fit", str(recipe), *map(str, options)])
            finally:
                os._exit(code)
        return pid

    @staticmethod
    def code(pid: int) -> int:
        """Its exit code, as a shell says it, once it has ended."""
        for _ in range(60_000):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("it goes on for ever")

    @staticmethod
    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    def wait_for_windows(self, run_dir: Path, count: int) -> None:
        self.wait(lambda: (run_dir / HISTORY).exists() and len(self.steps(run_dir)) >= count)

    @staticmethod
    def steps(run_dir: Path) -> list[int]:
        return [r.step for r in read_records(run_dir / HISTORY) if isinstance(r, StepReport)]

    @pytest.mark.parametrize(
        ("number", "options", "whole_group"),
        [
            (signal.SIGINT, (), False),
            (signal.SIGTERM, (), False),
            (signal.SIGUSR1, (), False),
            (signal.SIGTERM, ("--num-workers", 1), True),
            (signal.SIGUSR1, ("--num-workers", 1), True),
            (signal.SIGINT, ("--num-workers", 1), True),
        ],
    )
    def test_the_window_is_finished_and_written_and_the_next_start_goes_on(
        self, number: int, options: tuple[object, ...], whole_group: bool, recipe: Path, tmp_path: Path
    ) -> None:
        run_dir = tmp_path / "run"
        arguments = ("--run-dir", run_dir, "--epochs", 100, *options)
        pid = self.fit(recipe, *arguments)
        self.wait_for_windows(run_dir, 3)
        (os.killpg if whole_group else os.kill)(pid, number)
        assert self.code(pid) == 4
        steps = self.steps(run_dir)
        assert 3 <= len(steps) < 800
        *_, last = read_records(run_dir / HISTORY)
        assert last == Finished(step=len(steps), reason="interrupted")
        newest, _ = checkpoint.newest(run_dir / "checkpoints")
        assert newest is not None
        assert newest.step == len(steps), "nothing is lost"
        (tmp_path / "seconds").write_text("0")
        epochs = 1 + len(steps) // 8
        assert self.code(self.fit(recipe, "--run-dir", run_dir, "--epochs", epochs)) == 0, "done"
        assert self.steps(run_dir) == list(range(1, 8 * epochs + 1))
        assert self.code(self.fit(recipe, "--run-dir", run_dir, "--epochs", epochs)) == 0, "and still done"

    def test_without_a_run_dir_there_is_nothing_to_go_on_from(self, recipe: Path, tmp_path: Path) -> None:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)):
            (tmp_path / "inside").unlink(missing_ok=True)
            pid = self.fit(recipe, "--epochs", 1000, "--run-dir", "none")
            self.wait((tmp_path / "inside").exists)
            os.kill(pid, number)
            assert self.code(pid) == code

    def test_a_second_ctrl_c_stops_at_once(self, recipe: Path, tmp_path: Path) -> None:
        (tmp_path / "seconds").write_text("3000")
        run_dir = tmp_path / "run"
        pid = self.fit(recipe, "--run-dir", run_dir)
        self.wait((tmp_path / "inside").exists)
        os.kill(pid, signal.SIGTERM)  # counts for none
        os.kill(pid, signal.SIGINT)
        for _ in range(2):  # by the second beat it has surely been told
            (tmp_path / "beat").unlink(missing_ok=True)
            self.wait((tmp_path / "beat").exists)
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "the first waits for the window"
        os.kill(pid, signal.SIGINT)
        assert self.code(pid) == 130
        assert self.steps(run_dir) == []
        (tmp_path / "seconds").write_text("0")
        assert self.code(self.fit(recipe, "--run-dir", run_dir)) == 0, "the directory was given back"
