"""A run is killed with SIGKILL at random moments and started again until it ends: is it the run that was never killed?

    python benchmarks/kills.py

Dropout, BatchNorm, momentum, a scheduler, a worker, a batch schedule and validation; a checkpoint after every window,
so that many kills come while one is being written. Each process is forked from this one, which has imported everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports otherwise, in each process
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

import autoaccum
from autoaccum.events import StepReport, Validated
from autoaccum.runs.records import HISTORY, read_records

SAMPLES, EPOCHS = 500, 5
SCHEDULE = "8, 20:13, 60:20"
LONGEST = 1.5
"""Seconds that a process lives at most before it is killed; the shortest die before their first window."""


class Samples(Dataset[Any]):
    """With augmentation."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 32, generator=generator)
        self.targets = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(32), self.targets[index]


def model() -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(*first, nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 3))


def train(run_dir: Path | None) -> str:
    """To the end; a digest of all that it comes to: weights, buffers, momentum, losses, rates, random states."""
    result = autoaccum.fit(
        model(),
        Samples(),
        loss_fn=cross_entropy,
        effective_batch=SCHEDULE,
        micro_batch=6,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lr_scheduler=lambda optimizer, steps: OneCycleLR(optimizer, 0.2, steps),
        epochs=EPOCHS,
        num_workers=1,
        validation_data=Samples(),
        validate_every=200,
        device="cpu",
        progress=False,
        cache=False,
        run_dir=run_dir,
        checkpoint_every=None if run_dir is None else 1,
    )
    digest = hashlib.sha256()
    momenta = [state["momentum_buffer"] for state in result.optimizer.state.values()]
    for tensor in (*result.model.state_dict().values(), *momenta, torch.get_rng_state()):
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    windows = [(r.step, r.epoch, r.num_samples, r.micro_batches, r.loss, r.lr) for r in result.history]
    validated = [(e.step, e.loss) for e in result.events if isinstance(e, Validated)]
    digest.update(repr((windows, validated, random.getstate())).encode())
    return digest.hexdigest()


@contextmanager
def forked(work: Any) -> Iterator[int]:
    """A process that does it, and then is gone."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    yield pid


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Of all the runs that it took."""

    kills: int = 0
    during_writes: int = 0
    """After which something unfinished lay beside the checkpoints."""
    starts: int = 0
    runs: int = 0
    identical: int = 0
    """Runs that ended as the one that was never killed."""
    windows_again: int = 0
    """That were trained more than once."""
    seconds: float = 0.0
    whole_seconds: list[float] = field(default_factory=list)
    """Of runs that were never killed."""


def run_with_kills(directory: Path, expected: str, kills: int, outcome: Outcome, generator: random.Random) -> None:
    """One run, killed so many times unless it ends before."""
    outcome.runs += 1
    found = directory / "digest"

    def work() -> None:
        found.write_text(train(directory))

    started = time.perf_counter()
    groups = []
    while not found.exists():
        outcome.starts += 1
        with forked(work) as pid:
            groups.append(pid)
            end = time.perf_counter() + (generator.uniform(0, LONGEST) if kills else 600)
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.perf_counter() < end:
                time.sleep(0.002)
            if ended[0] == 0:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                assert os.WIFSIGNALED(status), status
                kills -= 1
                outcome.kills += 1
                outcome.during_writes += any((directory / "checkpoints").glob(".step-*.partial"))
            elif ended[1]:
                raise RuntimeError(f"a process of the run in {directory} failed: {ended[1]}")
    # A loader's worker ends when its parent does, but for one that was forked so shortly before the kill that it has
    # never seen it: that one waits for ever, and with it whoever reads what this process prints to its end.
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    outcome.seconds += time.perf_counter() - started
    outcome.identical += found.read_text() == expected
    steps = [record.step for record in read_records(directory / HISTORY) if isinstance(record, StepReport)]
    outcome.windows_again += len(steps) - len(set(steps))


def whole(directory: Path) -> tuple[str, float]:
    """A run that is never killed: its digest and seconds."""
    started = time.perf_counter()
    outcome = Outcome()
    run_with_kills(directory, "", 0, outcome, random.Random(0))
    return (directory / "digest").read_text(), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true", help="print what came out, and write no table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
    outcome, generator = Outcome(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "whole").mkdir()
        expected, seconds = whole(Path(name) / "whole")
        while outcome.kills < options.kills:
            place = Path(name) / str(outcome.runs)
            place.mkdir()
            run_with_kills(place, expected, options.kills - outcome.kills, outcome, generator)
            outcome.whole_seconds.append(seconds)
    lost = (outcome.seconds - sum(outcome.whole_seconds)) / outcome.kills
    document = {
        "kills": outcome.kills,
        "while a checkpoint was being written": outcome.during_writes,
        "starts": outcome.starts,
        "runs": outcome.runs,
        "bit-identical to the run never killed": f"{outcome.identical} of {outcome.runs}",
        "windows trained again per kill": round(outcome.windows_again / outcome.kills, 2),
        "seconds lost per kill": round(lost, 2),
    }
    if options.json:
        print(json.dumps({**document, "identical": outcome.identical}))
    else:
        text = (
            f"Runs of {EPOCHS} epochs of {SAMPLES} samples (dropout, BatchNorm, momentum, OneCycleLR, one worker, the "
            f"schedule `{SCHEDULE}`, validation), which take {statistics.mean(outcome.whole_seconds):.1f} s with a "
            f"checkpoint after every window. Each process is killed with SIGKILL after 0 to {LONGEST} s, and the run "
            f"started again, until it ends. Lost are the seconds beyond those of the run never killed: to start, and "
            f"to train again what no checkpoint held; Python and PyTorch are imported before."
        )
        write_table("kills", text, ["", ""], list(document.items()))
    return 0 if outcome.identical == outcome.runs else 1


if __name__ == "__main__":
    sys.exit(main())
