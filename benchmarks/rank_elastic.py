"""Agents of an elastic run are killed and started again: does it go on with those that are left, sample for sample?

    python benchmarks/rank_elastic.py
    python benchmarks/rank_elastic.py --case 2

Each agent is a ``torchrun`` with one rank, on this machine in place of one of its own. The last agent is killed with
its rank in the midst of the run; the others go on from the checkpoint; the agent is started again, and the run has as
many ranks as before. In the end its weights are compared with those of one process that trained all of it, in
float64, and its records with the windows that were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum

CASES = {2: (1, 2), 4: (3, 4)}
"""(fewest agents, most agents), by how many there are at first."""
WINDOW, SAMPLES = 23, 101
"""Both are primes: shares differ, and windows of all sizes up to that are cut."""
PATIENCE = 240.0
"""Seconds for each of the things that are waited for."""


def train(folder: Path, steps: int, seconds: float, dropout: float) -> None:
    """Train as a rank of whatever has started this process, and write down each window, and what is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5)).double()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(SAMPLES, 6, generator=generator).double(), torch.randint(0, 5, (SAMPLES,), generator=generator)
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    told = os.open(folder / "told", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def tell(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            # In one write, so that lines of several processes do not mix.
            os.write(told, f"{rank} {size} {record.step} {os.getpid()}\n".encode())
            # So that there is time to kill, and to be started again.
            time.sleep(0 if (folder / "hurry").exists() else seconds)

    result = autoaccum.fit(
        model, data, effective_batch=WINDOW, micro_batch=4, steps=steps, loss_fn=cross_entropy, lr=0.01, device="cpu",
        run_dir=folder / "run", checkpoint_every=5, progress=False, cache=False, callbacks=[tell],
    )  # fmt: skip
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    samples = [(report.step, report.num_samples) for report in result.history]
    torch.save((weights, samples), folder / f"left-{rank}.pt")


class Run:
    """A run of several agents."""

    def __init__(self, folder: Path, size: int, steps: int) -> None:
        self.folder, self.size = folder, size
        self.agents: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.steps = steps

    def start_agent(self) -> None:
        fewest, most = CASES[self.size]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{fewest}:{most}"]
        command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        # The first has the store, without which all end. Soon, for torchrun waits half a minute for who may come.
        is_host = str(not self.agents).lower()
        command += [
            "--rdzv-conf",
            f"last_call_timeout=3,is_host={is_host}",
            "--rdzv-id",
            "elastic",
            "--max-restarts",
            "3",
        ]
        command += [__file__, "--task", str(self.folder), "--steps", str(self.steps)]
        output = (self.folder / f"agent-{len(self.agents)}").open("wb")
        # Of the store that torchrun shares by itself an agent that comes later is not told where it is (torch 2.13).
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    def kill_agent(self) -> None:
        """Kill the last agent, and its rank, as when its machine is gone."""
        agent = self.agents.pop()
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True)
        os.kill(agent.pid, signal.SIGKILL)
        for pid in children.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        agent.wait()

    def told(self) -> list[tuple[int, int, int, int]]:
        """Return (rank, ranks, step, process) of each window of each rank so far."""
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]

    def wait(self, until: Callable[[], Any], what: str) -> float:
        """Wait for something; return the seconds that it took."""
        started = time.monotonic()
        while not until():
            if time.monotonic() > started + PATIENCE:
                raise TimeoutError(f"waited {PATIENCE:.0f} s for {what}: see {self.folder}")
            time.sleep(0.02)
        return time.monotonic() - started

    def has_run(self, size: int, after: int, windows: int) -> Callable[[], bool]:
        """Return whether so many windows have been run by so many ranks since that many lines were told."""
        return lambda: len({step for _, of, step, _ in self.told()[after:] if of == size}) >= windows


def elastic(folder: Path, size: int, steps: int) -> dict[str, Any]:
    """Run with all agents, with one less, and with all again; return what came of it."""
    run = Run(folder, size, steps)
    try:
        for _ in range(size):
            run.start_agent()
        run.wait(run.has_run(size, 0, 7), f"{size} ranks")
        before = len(run.told())
        run.kill_agent()
        fewer = run.wait(run.has_run(size - 1, before, 7), f"{size - 1} ranks")
        after = len(run.told())
        run.start_agent()
        again = run.wait(run.has_run(size, after, 7), f"{size} ranks again")
        (folder / "hurry").touch()
        run.wait(lambda: all(agent.poll() is not None for agent in run.agents), "the end")
        codes = [agent.returncode for agent in run.agents]
    finally:
        for agent in run.agents:
            if agent.poll() is None:
                agent.terminate()  # it ends its rank
                agent.wait()
    told = run.told()
    weights, samples = torch.load(folder / "left-0.pt")
    phases: list[int] = []
    for _, of, *_ in told:
        if not phases or phases[-1] != of:
            phases.append(of)
    return {"codes": codes, "ranks": phases, "weights": weights, "samples": samples, "fewer": fewer, "again": again,
            "run again": len([1 for rank, *_ in told if rank == 0]) - steps}  # fmt: skip


def alone(folder: Path, steps: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return what one process leaves of the same run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, __file__, "--task", str(folder), "--steps", str(steps), "--seconds", "0"]
    subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, check=True)
    return torch.load(folder / "left-0.pt")  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", type=int, choices=list(CASES), action="append", help="ranks at first; all if left out"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--task", type=Path, help="be a rank of a run in that directory")
    parser.add_argument("--seconds", type=float, default=0.4, help="that a rank waits after each window")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--keep", help="where to leave what ranks have said")
    parser.add_argument("--json", action="store_true", help="print what came out, and write no table")
    options = parser.parse_args()
    if options.task is not None:
        warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
        torch.set_num_threads(1)
        train(options.task, options.steps, options.seconds, options.dropout)
        return
    rows, found = [], []
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as name:
        (place := Path(name) / "alone").mkdir()
        expected, windows = alone(place, options.steps)
        for size in options.case or CASES:
            (place := Path(name) / str(size)).mkdir()
            one = elastic(place, size, options.steps)
            off = float((one["weights"] - expected).norm() / expected.norm())
            is_alike = one["samples"] == windows
            ranks = " -> ".join(map(str, one["ranks"]))
            found.append({"ranks": one["ranks"], "codes": one["codes"], "off": off, "is alike": is_alike})
            figures = [f"{one['fewer']:.0f}", f"{one['again']:.0f}", str(one["run again"])]
            rows.append([ranks, *figures, f"{off:.1e}", "yes" if is_alike else "no"])
    if options.json:
        print(json.dumps(found))
        return
    write_table(
        "rank_elastic",
        f"Agents of `torchrun --nnodes MIN:MAX`, one rank each, of which the last is killed with its rank and started "
        f"again later. A run of {options.steps} windows of {WINDOW} samples, a checkpoint every 5. Seconds "
        f"count until 7 windows were run by so many ranks, and have in them torchrun's wait for an agent that is gone, "
        f"and for one that may come (3 s here). Compared with one process in float64.",
        ["ranks", "s until one less goes on", "s until all go on", "windows run again", "weights off by",
         "each window once, with its samples"],
        rows,
        threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
