"""Memory halves in the midst of a run, and comes back: what is lost, and how soon all is as before.

    python benchmarks/pressure.py

In a simulated device memory, where an operation past the limit raises, and on the resident set of a real process, where
``memory_limit`` is a function. Needs matplotlib for the picture (the extra ``plot``).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from results import RESULTS, write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import StopTraining
from autoaccum.events import OutOfMemory, Replanned, StepReport
from autoaccum.testing import simulated_memory

EFFECTIVE_BATCH = 2048
FALLS, RETURNS, WINDOWS = 60, 120, 200
LIMIT = 48 * 2**20
JITTERED = 10_000
WIDTH = 4096
RESIDENT = 176 * 2**20
"""Beyond what the process holds before: headroom is a fraction of all of it, so it has to be more than simulated."""


class Net(nn.Module):
    """One wide hidden layer whose weight is a product, made anew in each forward: so larger micro-batches are faster.

    ``at`` is called in the midst of each forward.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.randn(WIDTH, rank) / rank)
        self.right = nn.Parameter(torch.randn(rank, 64) / 8)
        self.last = nn.Linear(WIDTH, 10)
        self.at: Callable[[], None] = lambda: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(inputs @ (self.left @ self.right).T)
        self.at()
        return self.last(hidden)


@dataclass
class Run:
    name: str
    history: list[StepReport]
    events: list[Any]
    limits: list[int]

    @property
    def micro_batches(self) -> list[int]:
        return [max(report.micro_batches) for report in self.history]

    def row(self) -> list[object]:
        before = self.micro_batches[FALLS - 1]
        rate = statistics.median(report.seconds for report in self.history[FALLS // 2 : FALLS])
        back = next((i for i in range(RETURNS, WINDOWS) if self.micro_batches[i] >= 0.9 * before), None)
        lost = WINDOWS - sum(sum(report.micro_batches) == EFFECTIVE_BATCH for report in self.history)
        seconds = None if back is None else sum(report.seconds for report in self.history[RETURNS:back])
        over = sum(
            report.peak_bytes > limit
            for i, (report, limit) in enumerate(zip(self.history, self.limits, strict=True))
            if i not in (FALLS, FALLS + 1)  # it fell in the midst of the one, and peaks are since the last reading
        )
        return [
            self.name,
            before,
            min(self.micro_batches[FALLS + 1 : RETURNS]),
            self.micro_batches[-1],
            lost,
            sum(isinstance(event, OutOfMemory) for event in self.events),
            over,
            sum(isinstance(event, Replanned) for event in self.events),
            "never"
            if back is None
            else f"{back - RETURNS} windows, {seconds:.2f} s ({seconds / rate:.1f} at full speed)",
        ]


def run(
    name: str,
    memory: AbstractContextManager[Any],
    limit_now: list[int],
    falls_by: int,
    rank: int,
    mid_window: bool,
    **options: Any,
) -> Run:
    model = Net(rank)
    torch.manual_seed(1)
    data = torch.randn(16 * EFFECTIVE_BATCH, 64), torch.randint(0, 10, (16 * EFFECTIVE_BATCH,))
    limits: list[int] = []
    full = limit_now[0]

    with memory as device:

        def set_limit(value: int) -> None:
            limit_now[0] = value
            if device is not None:
                device.limit = value

        def fall() -> None:
            set_limit(full - falls_by)
            model.at = lambda: None

        def follow(record: object) -> None:
            if not isinstance(record, StepReport):
                return
            limits.append(limit_now[0])
            if record.step == FALLS:
                if mid_window:
                    model.at = fall
                else:
                    fall()
            if record.step == RETURNS:
                set_limit(full)
            if record.step == WINDOWS:
                raise StopTraining

        result = autoaccum.fit(
            model,
            data,
            effective_batch=EFFECTIVE_BATCH,
            epochs=10**6,
            loss_fn=cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            device="cpu",
            callbacks=[follow],
            progress=False,
            cache=False,
            **options,
        )
    return Run(name, list(result.history), list(result.events), limits)


def jitter(windows: int, headroom: float) -> tuple[int, int, int]:
    """Re-plans, out-of-memory errors and lost samples of a run whose limit is another one before each window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4))
    data = torch.randn(6400, 16), torch.randint(0, 4, (6400,))
    draw_limit = random.Random(0)
    limit = 800 * 2**10
    with simulated_memory(limit) as device:

        def move(record: object) -> None:
            if isinstance(record, StepReport):
                device.limit = int(limit * draw_limit.uniform(0.95, 1.05))

        result = autoaccum.fit(
            model,
            data,
            effective_batch=64,
            steps=windows,
            headroom=headroom,
            loss_fn=cross_entropy,
            device="cpu",
            callbacks=[move],
            progress=False,
            cache=False,
        )
    replans, ooms = (sum(isinstance(e, kind) for e in result.events) for kind in (Replanned, OutOfMemory))
    return replans, ooms, 64 * windows - result.num_samples


def draw(runs: list[Run]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(runs), 1, figsize=(8, 2.2 * len(runs)), sharex=True)
    for panel, one in zip(panels, runs, strict=True):
        steps = [report.step for report in one.history]
        panel.step(steps, one.micro_batches, where="mid", color="tab:blue")
        panel.set_ylabel("micro-batch")
        panel.set_ylim(0)
        panel.set_title(one.name, loc="left", fontsize="medium")
        memory = panel.twinx()
        memory.step(steps, [limit / 2**20 for limit in one.limits], where="mid", color="tab:red", linestyle=":")
        memory.step(steps, [report.peak_bytes / 2**20 for report in one.history], where="mid", color="tab:gray", lw=0.7)
        memory.set_ylim(0)
        memory.set_ylabel("limit, peak (MiB)")
        for event in one.events:
            if isinstance(event, OutOfMemory):
                panel.axvline(event.step, color="black", linewidth=0.8, linestyle="--")
    panels[-1].set_xlabel("window")
    figure.tight_layout()
    figure.savefig(RESULTS / "pressure.png", dpi=110)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    simulated = {"falls_by": LIMIT // 2, "rank": 256}
    runs = [
        run("simulated: falls between windows", simulated_memory(LIMIT), [LIMIT], mid_window=False, **simulated),
        run(
            "simulated: falls in the midst of a window", simulated_memory(LIMIT), [LIMIT], mid_window=True, **simulated
        ),
    ]
    resident = [psutil.Process().memory_info().rss + RESIDENT]
    real = run(
        "resident set: memory_limit falls",
        nullcontext(),
        resident,
        falls_by=72 * 2**20,
        rank=2048,
        mid_window=False,
        memory_limit=lambda: resident[0],
    )
    runs.append(real)
    draw(runs)
    jittered = "; ".join(
        f"headroom {headroom}: {replans} re-plans, {ooms} out-of-memory errors, {lost} samples lost"
        for headroom in (0.05, 0.0)
        for replans, ooms, lost in [jitter(JITTERED, headroom)]
    )
    write_table(
        "pressure",
        f"Windows of {EFFECTIVE_BATCH} samples under {LIMIT // 2**20} MiB, of which half are gone from window {FALLS} "
        f"to {RETURNS}, {WINDOWS} in all (of the real process {RESIDENT // 2**20} MiB beyond what it holds before, of "
        "which 72 are gone). Lost: windows without all of their samples. Over: those whose peak was above "
        "the limit of the time, but for the one in whose midst it fell. Back: until the micro-batch is 90 % of what it "
        "was, and how many windows would have been run in that time at full speed.\n\n"
        f"{JITTERED:,} windows under a limit that is drawn anew before each, within 5 % of what it was at first: "
        f"{jittered}."
        "\n\n![micro-batches](pressure.png)",
        [
            "memory",
            "before",
            "while half is gone",
            "at the end",
            "lost",
            "out of memory",
            "over",
            "re-plans",
            "back after",
        ],
        [one.row() for one in runs],
        threads=1,
    )


if __name__ == "__main__":
    main()
