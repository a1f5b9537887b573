"""Real limits on a real process: its resident set stays below ``memory_limit``, and a refused allocation loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autoaccum.planning.limits import CLEARLY_OVER
from tests.processes import in_turn

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_DATA"), in_turn]

EXAMPLE = Path(__file__).parent / "larger_gpt.py"
MIB = 2**20


def run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a Python process; returns its outcome and the most resident bytes seen from outside."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    outputs: list[str] = []
    reader = threading.Thread(target=lambda: outputs.extend(process.communicate()))
    reader.start()
    peak_bytes = 0
    while reader.is_alive():
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            pages = 0
        peak_bytes = max(peak_bytes, pages * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(0.002)
    return subprocess.CompletedProcess(process.args, process.returncode, *outputs), peak_bytes


def fit(limit_bytes: int, effective_batch: int, num_samples: int) -> tuple[subprocess.CompletedProcess[str], int]:
    arguments = ["fit", str(EXAMPLE), "--effective-batch", str(effective_batch), "--memory-limit", str(limit_bytes),
                 "--samples", str(num_samples), "--json"]  # fmt: skip
    # At its exit a PyTorch with CUDA reads 130 MiB of its libraries, which are no memory of the training.
    return run(["-c", f"import os; from autoaccum.cli.app import main; os._exit(main({arguments!r}))"])


@pytest.fixture(scope="module")
def needed_bytes() -> int:
    """What the example needs before its first sample, in the words of the error that says so."""
    outcome, _ = run(
        ["-c", f"""
import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})
import autoaccum, larger_gpt
try:
    autoaccum.fit(**larger_gpt.recipe(), effective_batch=256, memory_limit="100MiB", progress=False)
except autoaccum.AutoaccumError as error:
    print(error.needed_bytes)
"""]
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    return int(outcome.stdout)


@pytest.mark.parametrize(
    ("extra_mib", "effective_batch", "smallest", "largest"),
    [(42, 64, 1, 7), (130, 128, 8, 64), pytest.param(500, 128, 8, 128, marks=pytest.mark.slow)],
)
def test_resident_set_stays_below_the_limit(
    needed_bytes: int, extra_mib: int, effective_batch: int, smallest: int, largest: int
) -> None:
    limit_bytes = needed_bytes + extra_mib * MIB
    outcome, peak_bytes = fit(limit_bytes, effective_batch, 2 * effective_batch + 30)
    assert outcome.returncode == 0, outcome.stderr
    document: dict[str, Any] = json.loads(outcome.stdout)
    windows = [report["effective_batch"] for report in document["history"]]
    assert windows == [effective_batch, effective_batch, 30]
    assert all(sum(report["micro_batches"]) == report["effective_batch"] for report in document["history"])
    settled = max(document["history"][1]["micro_batches"])
    assert smallest <= settled <= largest
    # A run warns above this. A PyTorch with CUDA reads 20 MiB more of its libraries while it trains.
    assert peak_bytes < CLEARLY_OVER * limit_bytes
    assert max(report["peak_bytes"] for report in document["history"]) < CLEARLY_OVER * limit_bytes
    print(f"limit {limit_bytes / MIB:.0f} MiB: micro-batch {settled}, peak {peak_bytes / MIB:.0f} MiB")


CHILD = """
import re, resource, torch, autoaccum
from torch import nn
from autoaccum.events import OutOfMemory

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 3))
data = torch.randn(3000, 8), torch.randint(0, 3, (3000,))

def data_bytes():
    return int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def limit_to(extra):
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + extra, resource.RLIM_INFINITY))

def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

common = dict(training_step=step, device="cpu")
autoaccum.fit(model, data, effective_batch=64, steps=2, micro_batch=4, progress=False, **common)  # import what is lazy
seen = []
"""


def child(code: str) -> list[str]:
    outcome, _ = run(["-c", CHILD + code])
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.split("\n")


def test_fit_survives_an_allocator_that_really_fails() -> None:
    """2,000 samples in one micro-batch want 65 MB or more, of which the system refuses all beyond 40 MB."""
    lines = child("""
def recorded(model, batch):
    loss = step(model, batch)
    seen.append(len(batch[0]))
    return loss
limit_to(40 * 2**20)
result = autoaccum.fit(model, data, effective_batch=2000, micro_batch=2000, training_step=recorded, device="cpu", progress=False)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print([report.effective_batch for report in result.history], [sum(report.micro_batches) for report in result.history])
print(sum(isinstance(event, OutOfMemory) for event in result.events), sum(report.replays for report in result.history))
""")
    assert lines[0] == "[2000, 1000] [2000, 1000]"
    ooms, replays = map(int, lines[1].split())
    assert ooms == replays >= 1


def test_fit_finds_its_way_below_a_resource_limit() -> None:
    lines = child("""
limit_to(40 * 2**20)
result = autoaccum.fit(model, data, effective_batch=2000, progress=False, **common)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print([report.effective_batch for report in result.history], max(result.plan.sizes) < 1500)
""")
    assert lines[0] == "[2000, 1000] True"


def test_probe_survives_an_allocator_that_really_fails() -> None:
    """The limit falls after the probe has read it, so that what it expects to fit is refused."""
    lines = child("""
def lowering(model, batch):
    if not seen:
        limit_to(40 * 2**20)
    seen.append(len(batch[0]))
    return step(model, batch)
report = autoaccum.probe(model, data, training_step=lowering, device="cpu")
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(report.max_micro_batch in [t.micro_batch for t in report.trials if t.fits], sum(not t.fits for t in report.trials))
print(report.max_micro_batch)
print(autoaccum.probe(model, data, effective_batch=3000, device="cpu", training_step=step).max_micro_batch)
""")
    verified, misses = lines[0].split()
    assert verified == "True"
    assert int(misses) >= 1
    assert 10 < int(lines[1]) < 1500
    assert int(lines[2]) == 3000
