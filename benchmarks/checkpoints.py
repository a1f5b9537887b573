"""What a checkpoint costs: how long it takes to be on the disk and to be read.

    python benchmarks/checkpoints.py

AdamW's state of a model of so many MiB of weights, which is three times that in all; medians over the rounds. The disk
is that of the temporary directory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from results import write_table
from torch import nn

from autoaccum.runs.checkpoint import Checkpoints, newest


def model_of(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of one MiB each."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(mebibytes)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[4, 64])
    options = parser.parse_args()
    rows = []
    for mebibytes in options.mebibytes:
        model, optimizer = model_of(mebibytes)
        seconds: dict[str, list[float]] = {name: [] for name in ("written", "found", "read")}
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            for step in range(options.rounds):
                started = time.perf_counter()
                checkpoints.save(
                    step=step,
                    weights=model.state_dict(),
                    state={"optimizer": optimizer.state_dict()},
                )
                seconds["written"].append(time.perf_counter() - started)
                started = time.perf_counter()
                found, _ = newest(Path(folder))
                seconds["found"].append(time.perf_counter() - started)
                assert found is not None
                found.load()
                seconds["read"].append(time.perf_counter() - started)
            checkpoints.close()
        median = {name: statistics.median(values) for name, values in seconds.items()}
        rows.append([f"{3 * mebibytes} MiB", *(f"{1e3 * value:.0f}" for value in median.values())])
    write_table(
        "checkpoints",
        f"Milliseconds, medians of {options.rounds} rounds. Training waits until a checkpoint is on the disk.",
        ["state", "written", "newest found, verified", "and read"],
        rows,
    )


if __name__ == "__main__":
    main()
