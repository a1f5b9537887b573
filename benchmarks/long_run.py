"""Runs a tiny model for 200,000 windows, with and without a run directory, and watches what the process holds.

Resident memory, open descriptors, threads and the objects that Python knows of, at intervals. Without a run directory
the reports of all windows are kept, for ``FitResult.history``; with one they are read from its file when looked at.

    nice -n 10 python benchmarks/long_run.py [--windows 200000]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.events import StepReport

PARTS = 8
"""Looks at the process, evenly spread over its windows."""


def look() -> dict[str, int]:
    """Return what the process holds."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }


def run(windows: int, run_dir: str | None) -> list[dict[str, int]]:
    """Train for so many windows; return what was held at each look."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs, targets = torch.randn(1000, 4), torch.randn(1000, 1)
    found: list[dict[str, int]] = []
    # From 1 % on: by then the plan is settled, and what is loaded when it is first used is there.
    looks = {windows // 100, *(windows * part // PARTS for part in range(1, PARTS + 1))}

    def watch(record: Any) -> None:
        if isinstance(record, StepReport) and record.step in looks:
            found.append({"window": record.step, **look()})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autoaccum.fit(
            nn.Linear(4, 1), (inputs, targets), effective_batch=10, micro_batch=10, loss_fn=mse_loss, steps=windows,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01), callbacks=[watch], run_dir=run_dir, device="cpu",
            progress=False, cache=False,
        )  # fmt: skip
    return found


def main() -> None:
    """Run the benchmark, each run in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=200_000)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        print(json.dumps(run(given.windows, given.run_dir)))
        return
    rows: list[list[object]] = []
    sentences = []
    # Both at once, for what is looked at does not depend on how fast they are.
    with tempfile.TemporaryDirectory() as place:
        children = {}
        for name, more in (("without a run_dir", []), ("with a run_dir", ["--run-dir", place])):
            command = [sys.executable, __file__, "--work", "--windows", str(given.windows), *more]
            children[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        outputs = {name: child.communicate()[0] for name, child in children.items()}
    for name, output in outputs.items():
        found = json.loads(output)
        for at in found:
            rows.append([name, f"{at['window']:,}", f"{at['resident'] / 2**20:.1f} MiB", *(at[key] for key in ("descriptors", "threads")), f"{at['objects']:,}"])  # noqa: E501  # fmt: skip
        first, last = found[0], found[-1]
        windows = last["window"] - first["window"]
        grown, objects = last["resident"] - first["resident"], last["objects"] - first["objects"]
        sentences.append(
            f"{name.capitalize()} a window leaves {grown / windows:.1f} bytes of resident memory and "
            f"{objects / windows:.3f} objects."
        )
    text = (
        f"{given.windows:,} windows of a tiny model in one process. What a window leaves without a run_dir is its "
        f"report, which `FitResult.history` keeps. {' '.join(sentences)}"
    )
    write_table("long_run", text, ["", "window", "resident", "descriptors", "threads", "objects"], rows, threads=1)


if __name__ == "__main__":
    main()
