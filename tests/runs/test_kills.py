"""SIGKILL at random moments, and the kernel's own: started again, a run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from autoaccum.events import Finished, Replanned, Resumed, StepReport
from autoaccum.runs.records import HISTORY, read_records
from tests.processes import in_turn

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and control groups"), in_turn]

ROOT = Path(__file__).parents[2]
MIB = 2**20


def test_three_kills_at_random_moments() -> None:
    """Of a run with dropout, BatchNorm, momentum, a scheduler, a worker, a batch schedule and validation."""
    outcome = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "3", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["kills"] == 3
    assert found["starts"] == found["runs"] + 3
    assert found["identical"] == found["runs"]


TRAIN = """
import sys
import torch
import autoaccum

torch.set_num_threads(1)
torch.manual_seed(0)
MIB_PER_SAMPLE = 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.wide = torch.nn.Parameter(torch.ones(MIB_PER_SAMPLE * 2**18 // 2))

    def forward(self, inputs):
        return self.net(inputs) + (inputs[:, :1] * self.wide).tanh().mean(dim=1, keepdim=True)


print("ready", flush=True)
sys.stdin.readline()  # until it is in its group
autoaccum.fit(
    Model(), (torch.randn(400, 8), torch.randint(0, 3, (400,))), loss_fn=torch.nn.functional.cross_entropy,
    effective_batch="8, 4:64", micro_batch=64, steps=7, lr=0.01, device="cpu", progress=False, cache=False,
    run_dir=sys.argv[1], checkpoint_every=1,
)
"""


def write(path: Path, text: object) -> None:
    with open(path, "w") as file:  # not Path.write_text, which would make the file
        file.write(str(text))


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """A memory control group of our own, and the name of its limit."""
    mount = Path("/sys/fs/cgroup")
    name = f"autoaccum-test-{os.getpid()}"
    why = []
    for folder, limit in ((mount / "memory" / name, "memory.limit_in_bytes"), (mount / name, "memory.max")):
        try:
            folder.mkdir()
        except OSError as error:
            why.append(f"{folder}: {error.strerror}")
            continue
        if (folder / limit).exists():
            yield folder, limit
            break
        why.append(f"{folder} has no {limit}")
        folder.rmdir()
    else:
        pytest.skip(f"no memory control group of our own: {'; '.join(why)}")
    for _ in range(100):  # until the last process has left
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


def test_a_kill_by_the_kernel_in_mid_run_is_survived(group: tuple[Path, str], tmp_path: Path) -> None:
    folder, limit = group
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAIN)
    codes = []
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()
        # What it has already is charged to the group that it came from. A micro-batch of 64 samples takes 0.5 GiB.
        write(folder / limit, 320 * MIB)
        write(folder / "cgroup.procs", process.pid)
        process.communicate("go\n", timeout=600)
        codes.append(process.returncode)
        if process.returncode != -signal.SIGKILL:
            break
    assert codes[-1] == 0
    assert len(codes) >= 2
    assert set(codes[:-1]) == {-signal.SIGKILL}
    records = list(read_records(run_dir / HISTORY))
    assert [r.step for r in records if isinstance(r, Resumed)] == [4] * (len(codes) - 1)
    replans = [r for r in records if isinstance(r, Replanned) and "killed" in r.reason]
    assert [max(r.new) < max(r.old) for r in replans] == [True] * (len(codes) - 1)
    assert [r.effective_batch for r in records if isinstance(r, StepReport)] == [8, 8, 8, 8, 64, 64, 64]
    assert isinstance(records[-1], Finished)
    assert records[-1].reason == "budget"
