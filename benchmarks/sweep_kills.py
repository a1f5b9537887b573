"""A sweep is killed with SIGKILL at random moments and started again until it ends: is it the one never killed?

    python benchmarks/sweep_kills.py

The command ``autoaccum sweep`` on a small recipe with dropout, a checkpoint after every window: alone, with two
processes of which the first is killed, and with two of which the other is killed, and the first a little later. What a
killed process has left runs on beside the next. Each is forked from this one, which has imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import psutil
import torch
import torch._dynamo  # which the first optimizer imports otherwise, in each process
from kills import forked
from optuna.trial import TrialState
from results import write_table
from torch import nn

from autoaccum import sweeps  # noqa: F401  which the command imports otherwise
from autoaccum.cli import app as cli
from autoaccum.events import Finished, StepReport
from autoaccum.runs.records import HISTORY, read_records
from autoaccum.sweeps.studies import load_study

TRIALS, SAMPLES, SIDE = 16, 128, 24
LONGEST = {1: 1.0, 2: 4.0}
"""Seconds that a sweep of so many processes lives at most before it is killed; the shortest die before a trial."""
COMMAND = (
    *("sweep", f"{__file__}:recipe", "--trials", str(TRIALS), "--lr", "1e-3:1e-1", "--effective-batch", "16,32"),
    *("--samples", str(SAMPLES), "--sampler", "random", "--pruner", "none", "--micro-batch", "8", "--device", "cpu"),
    *("--checkpoint-every", "1", "--study-name", "killed", "--no-cache", "--no-progress"),
)
Values = list[tuple[dict[str, Any], list[float]]]
"""What was drawn for each trial, and what came out."""


def recipe() -> dict[str, Any]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES + 32, 1, SIDE, SIDE, generator=generator)
    targets = torch.randint(0, 3, (len(inputs),), generator=generator)
    body = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return {
        "model": nn.Sequential(*body, nn.Dropout(0.2), nn.Linear(32, 3)),
        "data": (inputs[:SAMPLES], targets[:SAMPLES]),
        "validation_data": (inputs[SAMPLES:], targets[SAMPLES:]),
        "loss_fn": nn.functional.cross_entropy,
    }


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Of all sweeps that were killed in one way."""

    jobs: int
    others: bool
    """Whether it is another process than the first that is killed, and the first after it."""
    kills: int = 0
    starts: int = 0
    seconds: float = 0.0
    whole_seconds: float = 0.0
    """Of as many sweeps that were never killed."""
    sweeps: int = 0
    wrong: list[str] = field(default_factory=list)
    """All that was not as in the sweep that was never killed."""
    windows_again: int = 0
    """That were trained more than once."""


def sweep_with_kills(directory: Path, kills: int, outcome: Outcome, generator: random.Random) -> set[psutil.Process]:
    """One sweep, killed so many times unless it ends before; the processes that the kills have left."""
    command = [*COMMAND, "--directory", str(directory)]
    left: set[psutil.Process] = set()

    def work() -> None:
        with open(directory.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if code := cli.main(command):
            os._exit(code)

    started, is_over = time.perf_counter(), False
    while not is_over:
        outcome.starts += 1
        with forked(work) as pid, forked(work) if outcome.jobs > 1 else nullcontext() as other:
            end = generator.uniform(0, LONGEST[outcome.jobs]) if kills else 600.0
            is_over = _ends(pid, end)
            if other is not None:
                left.add(psutil.Process(other))
            if not is_over and other is not None and outcome.others:
                os.kill(other, signal.SIGKILL)
                kills -= 1
                outcome.kills += 1
                is_over = _ends(pid, generator.uniform(0, 1))
            if not is_over:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                assert os.WIFSIGNALED(status), status
                kills -= 1
                outcome.kills += 1
                kills = max(kills, 0)
    outcome.seconds += time.perf_counter() - started
    return left


def _ends(pid: int, seconds: float) -> bool:
    """Whether it does, in that time.

    Raises:
        RuntimeError: with an error.
    """
    end = time.perf_counter() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.perf_counter() < end:
        time.sleep(0.002)
    if ended[1]:
        raise RuntimeError(f"the command ended with {os.waitstatus_to_exitcode(ended[1])}")
    return ended[0] != 0


def values_of(directory: Path) -> Values:
    study, _ = load_study(str(directory))
    return [(trial.params, trial.values) for trial in study.trials]


def compare(directory: Path, expected: Values, outcome: Outcome) -> None:
    """What was lost, doubled or changed."""
    study, _ = load_study(str(directory))
    states = Counter(trial.state for trial in study.trials)
    if states != {TrialState.COMPLETE: TRIALS}:
        outcome.wrong.append(f"trials: {dict(states)}")
    if values_of(directory) != expected:
        outcome.wrong.append("values")
    for trial in study.trials:
        records = list(read_records(directory / f"trial-{trial.number:04d}" / HISTORY))
        windows = {record.step: record for record in records if isinstance(record, StepReport)}
        outcome.windows_again += sum(isinstance(record, StepReport) for record in records) - len(windows)
        samples = [windows[step].num_samples for step in sorted(windows)]
        batches = [windows[step].effective_batch for step in sorted(windows)]
        once = [sum(batches[: count + 1]) for count in range(len(batches))]
        ends = [record.reason for record in records if isinstance(record, Finished)]
        if samples != once or samples[-1] != SAMPLES or ends[-1:] != ["budget"]:
            outcome.wrong.append(f"history of trial {trial.number}")
        if trial.user_attrs["num_samples"] != SAMPLES or max(trial.intermediate_values) != SAMPLES:
            outcome.wrong.append(f"samples of trial {trial.number}")


def measure(place: Path, jobs: int, others: bool, kills: int, expected: Values, generator: random.Random) -> Outcome:
    """Killed so many times, in as many sweeps as that takes."""
    whole = Outcome(jobs=jobs, others=False)
    sweep_with_kills(place / "whole", 0, whole, generator)
    outcome = Outcome(jobs=jobs, others=others)
    if values_of(place / "whole") != expected:
        outcome.wrong.append("values of the sweep that was not killed")
    while outcome.kills < kills:
        directory = place / str(outcome.sweeps)
        left = sweep_with_kills(directory, kills - outcome.kills, outcome, generator)
        _, alive = psutil.wait_procs(left, timeout=10)
        if alive:
            outcome.wrong.append(f"{len(alive)} processes left")
            for process in alive:
                process.kill()
        compare(directory, expected, outcome)
        outcome.sweeps += 1
        outcome.whole_seconds += whole.seconds
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true", help="print what came out, and write no table")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    ways = {
        "alone": (1, False),
        "two, the first is killed": (2, False),
        "two, the other is killed, then the first": (2, True),
    }
    found = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        never = Outcome(jobs=1, others=False)
        sweep_with_kills(place / "never", 0, never, generator)
        expected = values_of(place / "never")
        for number, (way, (jobs, others)) in enumerate(ways.items()):
            (place / str(number)).mkdir()
            found[way] = measure(place / str(number), jobs, others, options.kills, expected, generator)
    columns: dict[str, Any] = {
        "processes": list(ways),
        "kills": [outcome.kills for outcome in found.values()],
        "starts": [outcome.starts for outcome in found.values()],
        "sweeps": [outcome.sweeps for outcome in found.values()],
        "lost, doubled or changed": ["; ".join(outcome.wrong) or "none" for outcome in found.values()],
        "windows trained again per kill": [round(o.windows_again / o.kills, 2) for o in found.values()],
        "seconds of a sweep never killed": [round(o.whole_seconds / o.sweeps, 1) for o in found.values()],
        "seconds lost per kill": [round((o.seconds - o.whole_seconds) / o.kills, 2) for o in found.values()],
    }
    if options.json:
        print(json.dumps(columns))
    else:
        text = (
            f"Sweeps of {TRIALS} trials of {SAMPLES} samples, with dropout and a checkpoint after every window, in "
            f"SQLite. A sweep alone is killed with SIGKILL after 0 to {LONGEST[1]} s, two processes after 0 to "
            f"{LONGEST[2]} s, the first of them up to a second after the other, and started again at once, until it "
            f"ends. Compared are the states, parameters and values of all trials, to the bit, with those of a sweep "
            f"that was never killed, and the samples in their records. Lost are the seconds beyond the sweep never "
            f"killed: to start, and to train again what no checkpoint held. Python and PyTorch are imported before."
        )
        write_table("sweep_kills", text, list(columns), list(zip(*columns.values(), strict=True)))
    return 1 if any(outcome.wrong for outcome in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
