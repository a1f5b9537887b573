"""The stages of ``run_all.py``: each is one benchmark, a process of its own, with the tables that it writes.

A state directory holds ``NAME.json`` for each stage that has ended well and ``NAME.log`` with its output, so that a
call goes on where the last one was stopped.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks import ROOT, ended, last_lines

DEADLINE = 4 * 3600
"""Seconds after which a stage is given up, so that one that hangs does not keep the others from being run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One script of this folder."""

    name: str
    """Of the script, without its ending."""
    tables: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    """Its arguments in a quick run; None where it has no quick form and is left out."""
    peers: tuple[str, ...] = ()
    """Distributions that take part where they are installed."""


OPTIMIZERS = (
    "bitsandbytes", "heavyball", "prodigyopt", "pytorch_optimizer", "schedulefree", "timm", "torchao",
)  # fmt: skip
TRAINERS = ("accelerate", "lightning", "transformers")
WRITE = ("--write",)
ONE_ROUND = ("--rounds", "1")
FEW_ENDS = ("--kills", "2", "--sharded-kills", "1")

STAGES = [
    # What the scoreboard has lines of, in its order.
    Stage(name="exactness", tables=("exactness",), quick=(), peers=TRAINERS),
    Stage(name="readme_figure", tables=("readme_figure",), quick=("--quick",), peers=("transformers",)),
    Stage(name="verification", tables=("verification",), arguments=WRITE, quick=("--quick", "--only", "mean", *WRITE)),
    Stage(name="compositions", tables=("compositions",), arguments=WRITE, quick=("--count", "50", *WRITE)),
    Stage(name="kills", tables=("kills",), quick=("--kills", "3")),
    Stage(name="search", tables=("search",), quick=("--quick",), peers=TRAINERS),
    Stage(name="time_to_train", tables=("time_to_train",), quick=("--quick",), peers=TRAINERS),
    Stage(name="cold_start", tables=("cold_start", "cold_start_cpu")),
    Stage(name="lengths", tables=("lengths",), quick=ONE_ROUND),
    Stage(name="overhead", tables=("overhead",), quick=ONE_ROUND),
    Stage(name="pressure", tables=("pressure",)),
    Stage(
        name="window_losses",
        tables=("window_losses", "window_losses_memory"),
        quick=("--rounds", "3", "--only", "times"),
        peers=("sentence-transformers",),
    ),
    Stage(name="joined", tables=("joined",), quick=("--rounds", "2")),
    Stage(name="verified", tables=("verified",), quick=ONE_ROUND),
    Stage(name="ranks", tables=("ranks", "ranks_told", "ranks_model", "ranks_balance"), quick=ONE_ROUND),
    Stage(name="rank_ends", tables=("rank_ends",), quick=(*FEW_ENDS, "--starting", "1", "--restarts", "1")),
    Stage(name="rank_elastic", tables=("rank_elastic",)),
    Stage(name="sweep", tables=("sweep",), quick=("--quick",), peers=("optuna",)),
    Stage(name="sweep_kills", tables=("sweep_kills",), quick=("--kills", "1")),
    Stage(name="gpu", tables=("gpu",), peers=TRAINERS),
    # The others.
    Stage(name="checkpoints", tables=("checkpoints",), quick=ONE_ROUND),
    Stage(name="compiled", tables=("compiled",)),
    Stage(name="estimates", tables=("estimates", "estimates_resident"), quick=("--quick",), peers=("transformers",)),
    Stage(name="first_jump", tables=("first_jump",), quick=("--quick",), peers=("transformers",)),
    Stage(name="fuzz_arguments", tables=("fuzz_arguments",), quick=("--calls", "100")),
    Stage(
        name="loaders",
        tables=("loaders",),
        quick=("tensordict",),
        peers=(
            "datasets",
            "h5py",
            "litdata",
            "monai",
            "mosaicml-streaming",
            "tensordict",
            "torchdata",
            "webdataset",
            "zarr",
        ),
    ),
    Stage(name="long_run", tables=("long_run",)),
    Stage(name="measurements", tables=("measurements",), arguments=WRITE, quick=(*ONE_ROUND, *WRITE)),
    Stage(name="memory", tables=("memory",)),
    Stage(name="noise", tables=("noise",)),
    Stage(name="optimizers", tables=("optimizers",), quick=("torch",), peers=OPTIMIZERS),
    Stage(name="outputs", tables=("outputs",), quick=ONE_ROUND),
    Stage(name="planner", tables=("planner",), quick=("--repeats", "3")),
    Stage(name="records", tables=("records",), quick=("--windows", "10000")),
]


def installed(peers: Sequence[str]) -> dict[str, str]:
    """Return the version of each peer, "not installed" of those that are missing."""
    found = {}
    for peer in peers:
        try:
            found[peer] = importlib.metadata.version(peer)
        except importlib.metadata.PackageNotFoundError:
            found[peer] = "not installed"
    return found


class Runner:
    """Runs stages that have not ended well yet, and remembers what became of each."""

    def __init__(self, state: Path, results: Path, record: Path, command: Callable[[Stage], list[str]]) -> None:
        """``record`` is the JSON file beside the tables in which all stages ever run have an entry."""
        self._state, self._results, self._record, self._command = state, results, record, command
        for directory in (state, results):
            directory.mkdir(parents=True, exist_ok=True)

    def run(self, stages: Sequence[Stage], again: str | None, after_each: Callable[[], None]) -> bool:
        """Run those of the stages that are not done; return whether all are then.

        ``again`` is part of the names of stages that are run even if they are done.
        """
        if again is not None:
            for stage in stages:
                if again in stage.name:
                    self._file(stage).unlink(missing_ok=True)
        for stage in stages:
            if not self._file(stage).exists():
                print(f"{stage.name}: {self._expected(stage)}", flush=True)
                self._run(stage)
                after_each()
        return all(self._file(stage).exists() for stage in stages)

    def _run(self, stage: Stage) -> None:
        log = self._file(stage).with_suffix(".log")
        started, began = time.monotonic(), time.time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(stage),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "AUTOACCUM_RESULTS": str(self._results),
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
                },
                start_new_session=True,
            )
            is_over = ended(process, DEADLINE)
        tables = [path for name in stage.tables for path in self._results.glob(f"{name}*.md")]
        if not is_over:
            outcome = f"not done after {DEADLINE} s: {last_lines(log)}"
        elif process.returncode:
            outcome = f"exit {process.returncode}: {last_lines(log)}"
        # A file system's clock may be a little behind.
        elif not any(path.stat().st_mtime > began - 1 for path in tables):
            outcome = f"wrote no table: {last_lines(log)}"
        else:
            outcome = "done"
        entry = {
            "date": str(datetime.date.today()),
            "seconds": round(time.monotonic() - started),
            "outcome": outcome,
            "peers": installed(stage.peers),
        }
        print(f"  {outcome}, {entry['seconds']} s", flush=True)
        _write(self._record, {**records(self._record), stage.name: entry})
        if outcome == "done":  # else the next call tries again
            _write(self._file(stage), entry)

    def _expected(self, stage: Stage) -> str:
        last = records(self._record).get(stage.name)
        return "not timed yet" if last is None else f"took {last['seconds']} s on {last['date']}"

    def _file(self, stage: Stage) -> Path:
        return self._state / f"{stage.name}.json"


def records(path: Path) -> dict[str, dict[str, Any]]:
    """Return what became of each stage when it was last run, by name."""
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, document: dict[str, Any]) -> None:
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    made.replace(path)  # at once: a call that is killed leaves the old one or the new one


def script(stage: Stage, *, quick: bool) -> list[str]:
    """Return the command of a stage."""
    return [
        sys.executable,
        str(Path(__file__).parent / f"{stage.name}.py"),
        *((quick and stage.quick) or stage.arguments),
    ]
