"""One writer a directory, in one process and in several, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from autoaccum import errors
from autoaccum.runs.checkpoint import Checkpoints, newest
from tests.processes import in_turn
from tests.runs.children import child


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@in_turn
def test_a_directory_has_one_writer(directory: Path) -> None:
    script = """
        writer = Checkpoints(directory)
        print("ready", flush=True)
        sys.stdin.read()
    """
    process = child(directory, script, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(errors.CheckpointLockedError, match=f"going on, in process {process.pid}") as caught:
            Checkpoints(directory)
        assert caught.value.pid == process.pid
        assert newest(directory) == (None, ()), "reading is free"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    Checkpoints(directory).close()  # the kernel has given it back


def test_a_directory_has_one_writer_in_a_process_too(directory: Path) -> None:
    first = Checkpoints(directory)
    with pytest.raises(errors.CheckpointLockedError) as caught:
        Checkpoints(directory.parent / "." / directory.name)
    assert caught.value.pid == os.getpid()
    first.close()
    first.close()
    Checkpoints(directory).close()


@in_turn
def test_a_worker_that_outlives_a_killed_run_does_not_hold_its_directory(directory: Path) -> None:
    script = """
        writer = Checkpoints(directory)
        if not os.fork():
            print(os.getpid(), flush=True)
            signal.pause()
        signal.pause()
    """
    process = child(directory, script)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is there
        Checkpoints(directory).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()
