"""The same twenty trials by ``autoaccum.sweep`` and in the obvious way, in a memory in which no effective batch fits.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --quick      # fewer samples, one round

The obvious way is Optuna and a loop by hand: each trial begins with the effective batch as its micro-batch, and when
memory runs out it halves that and starts again. Both go through the same grid of learning rates and effective batches,
with as many samples, the same weights and one validation; they take turns, each in a process of its own, and the cache
of past runs is empty each time. Two limits: a simulated device memory, and RLIMIT_DATA, below which PyTorch's own
allocator fails.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import optuna
import torch
from optuna.samplers import GridSampler
from peers import Device
from results import write_table
from time_to_train import MIB, limited
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.memory.oom import is_out_of_memory

GRID = {"lr": [3e-4, 1e-3, 3e-3, 1e-2], "effective_batch": [64, 96, 128, 192, 256]}
SIDE, CHANNELS, SAMPLES, QUICK, SEED = 48, 32, 1536, 256, 0
ROOM = 48
"""Samples in a micro-batch that just fits."""
Data = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def data() -> tuple[Data, Data]:
    """Training and validation: which quarter of the picture is the brightest."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 4, (768 + 128,), generator=generator)
    inputs = torch.randn(len(targets), 1, SIDE, SIDE, generator=generator)
    half = SIDE // 2
    for picture, target in zip(inputs, targets.tolist(), strict=True):
        picture[:, target // 2 * half :, target % 2 * half :][:, :half, :half] += 0.2
    return (inputs[:768], targets[:768]), (inputs[768:], targets[768:])


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    blocks = [layer for _ in range(2) for layer in (nn.Conv2d(CHANNELS, CHANNELS, 1), nn.GELU())]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, 4)]
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.GELU(), *blocks, *head)


def train(model: nn.Module, lr: float, effective_batch: int, micro_batch: int, samples: int, seen: list[int]) -> None:
    """The loop by hand; ``seen`` counts its samples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    (inputs, targets), _ = data()
    order = torch.Generator().manual_seed(SEED)
    while seen[0] < samples:
        for window in torch.randperm(len(inputs), generator=order).split(effective_batch):
            window = window[: samples - seen[0]]
            if not len(window):
                break
            optimizer.zero_grad()
            for rows in window.split(micro_batch):
                loss = cross_entropy(model(inputs[rows]), targets[rows])
                (loss * len(rows) / len(window)).backward()
            optimizer.step()
            seen[0] += len(window)


def loss_of(model: nn.Module, micro_batch: int) -> float:
    """On the validation data."""
    _, (inputs, targets) = data()
    model.eval()
    with torch.no_grad():
        losses = [
            cross_entropy(model(x), y, reduction="sum").item()
            for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
        ]
    return sum(losses) / len(inputs)


def by_sweep(samples: int) -> dict[str, Any]:
    training, held_out = data()

    def recipe() -> dict[str, Any]:
        return {"model": make_model(), "data": training, "validation_data": held_out, "loss_fn": cross_entropy}

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOACCUM_CACHE_DIR"] = f"{folder}/cache"
        study = autoaccum.sweep(
            recipe,
            **GRID,
            num_trials=20,
            samples=samples,
            validate_every=samples,
            sampler=lambda seed: GridSampler(GRID),
            pruner="none",
            directory=f"{folder}/sweep",
            progress=False,
            device="cpu",
        )
    attributes = [trial.user_attrs for trial in study.trials]
    return {
        **outcomes(study),
        "ooms": sum(found["ooms"] for found in attributes),
        "wasted": sum(found["wasted_samples"] for found in attributes),
        "micro_batches": sorted({max(found["micro_batches"]) for found in attributes}),
    }


def by_hand(samples: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ooms": 0, "wasted": 0}
    fitting = set()

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_categorical("lr", GRID["lr"])
        micro_batch = effective_batch = trial.suggest_categorical("effective_batch", GRID["effective_batch"])
        while True:
            gc.collect()  # what an attempt before has left would be in this one's memory
            seen, model = [0], make_model()
            try:
                train(model, lr, effective_batch, micro_batch, samples, seen)
                fitting.add(micro_batch)
                return loss_of(model, micro_batch)
            except Exception as error:
                if not is_out_of_memory(error) or micro_batch == 1:  # what is left of the heap may not do for one
                    raise
            found["ooms"] += 1
            found["wasted"] += seen[0]
            micro_batch //= 2  # and everything from the beginning

    study = optuna.create_study(sampler=GridSampler(GRID))
    study.optimize(objective, n_trials=20, catch=(RuntimeError,))
    return {**found, **outcomes(study), "micro_batches": sorted(fitting)}


def outcomes(study: optuna.Study) -> dict[str, Any]:
    return {"finished": sum(trial.state.name == "COMPLETE" for trial in study.trials)}


HAND = "Optuna, halved by hand"
WAYS = {"autoaccum.sweep": by_sweep, HAND: by_hand}


def limit_bytes_of(kind: str) -> int:
    """What ``ROOM`` samples take at once; of a real limit, with some for the heap, and without the data."""
    with Device() as device:
        train(make_model(), 1e-3, 2 * ROOM, ROOM, 2 * ROOM, [0])
    there = sum(part.nbytes for pair in data() for part in pair)
    return device.peak if kind == "simulated" else device.peak - there + 32 * MIB


def child(spec: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(spec["threads"])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    autoaccum.fit(
        nn.Linear(1, 1),
        (torch.zeros(2, 1), torch.zeros(2, 1)),
        effective_batch=2,
        loss_fn=nn.functional.mse_loss,
        device="cpu",
        cache=False,
        progress=False,
    )  # imports what is lazy
    data()
    with limited(spec["kind"], spec["limit_bytes"]):
        started = time.perf_counter()
        found = WAYS[spec["way"]](spec["samples"])
        return {**found, "seconds": time.perf_counter() - started}


def in_a_process_of_its_own(spec: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
    command = [sys.executable, __file__, "--child", json.dumps(spec)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    result: dict[str, Any] = json.loads(process.stdout)
    print(f"{spec['kind']}, {spec['way']}: {result['seconds']:.1f} s", file=sys.stderr)
    return result


def row_of(kind: str, way: str, done: list[dict[str, Any]], hand: list[dict[str, Any]]) -> list[object]:
    whole = [pair for pair in zip(done, hand, strict=True) if all(run["finished"] == 20 for run in pair)]
    ratios = [run["seconds"] / other["seconds"] for run, other in whole]
    return [
        kind,
        way,
        f"{statistics.median(run['seconds'] for run in done):.1f}",
        f"{statistics.median(ratios):.2f} ({len(ratios)})" if ratios else "",
        ", ".join(str(run["finished"]) for run in done),
        statistics.median(run["ooms"] for run in done),
        statistics.median(run["wasted"] for run in done),
        ", ".join(map(str, sorted({size for run in done for size in run["micro_batches"]}))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    torch.set_num_threads(options.threads)
    rounds, samples = (1, QUICK) if options.quick else (options.rounds, SAMPLES)
    rows = []
    for kind in ("simulated", "RLIMIT_DATA"):
        spec = {"kind": kind, "limit_bytes": limit_bytes_of(kind), "threads": options.threads, "samples": samples}
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, done in runs.items():
                done.append(in_a_process_of_its_own({**spec, "way": way}))
        rows += [row_of(kind, way, done, runs[HAND]) for way, done in runs.items()]
    write_table(
        "sweep",
        f"Twenty trials of {samples} samples, effective batches of {', '.join(map(str, GRID['effective_batch']))}, in "
        f"memory for {ROOM} samples at once; medians of {rounds} rounds. The ratio is that of the rounds in which both "
        "finished all twenty; how many these were stands behind it. Allocations that fail below a real limit leave the "
        "heap in pieces, and the loop by hand may end with trials for which not one sample fits.",
        [
            "limit",
            "way",
            "seconds",
            "ratio (rounds)",
            "finished in each round",
            "out of memory",
            "computed in vain, at most",
            "micro-batches",
        ],
        rows,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
