"""The same twenty trials by ``autoaccum.sweep`` and in the obvious way, in a memory in which no effective batch fits.

    python benchmarks/sweep.py

The obvious way is Optuna and a loop by hand: each trial begins with the effective batch as its micro-batch, and when
memory runs out it halves that and starts again. Both go through the same grid of learning rates and effective batches,
with as many samples, the same weights and one validation; they take turns, and the cache of past runs is empty each
time. What the simulation of a device's memory costs is in both.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from itertools import product
from typing import Any

import optuna
import torch
from optuna.pruners import NopPruner
from optuna.samplers import GridSampler
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.testing import simulated_memory

GRID = {"lr": [3e-4, 1e-3, 3e-3, 1e-2], "effective_batch": [256, 512, 768, 1024, 1536]}
WIDTH, SAMPLES, SEED = 256, 24576, 0
ROOM = 128
"""Samples whose activations fit beside the model, its gradients and AdamW's state."""


def data() -> tuple[Any, Any]:
    """Training and validation: a rule that takes some learning."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3072 + 512, 64, generator=generator)
    targets = (inputs[:, :32].square().sum(1) > inputs[:, 32:].square().sum(1)).long()
    return (inputs[:3072], targets[:3072]), (inputs[3072:], targets[3072:])


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), *layers, nn.Linear(WIDTH, 2))


def limit_bytes() -> int:
    parameters = sum(p.nbytes for p in make_model().parameters())
    return 4 * parameters + ROOM * 14 * WIDTH * 4


def by_sweep() -> dict[str, Any]:
    train, held_out = data()

    def recipe() -> dict[str, Any]:
        return {"model": make_model(), "data": train, "validation_data": held_out, "loss_fn": cross_entropy}

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOACCUM_CACHE_DIR"] = f"{folder}/cache"
        started = time.perf_counter()
        with simulated_memory(limit_bytes()):
            study = autoaccum.sweep(
                recipe,
                lr=(min(GRID["lr"]), max(GRID["lr"])),
                effective_batch=GRID["effective_batch"],
                num_trials=20,
                samples=SAMPLES,
                validate_every=SAMPLES,
                sampler=lambda seed: GridSampler(GRID),
                pruner=NopPruner(),
                directory=f"{folder}/sweep",
                progress=False,
                device="cpu",
            )
        seconds = time.perf_counter() - started
    attributes = [trial.user_attrs for trial in study.trials]
    return {
        "seconds": seconds,
        "finished": sum(trial.state.name == "COMPLETE" for trial in study.trials),
        "ooms": sum(attrs["ooms"] for attrs in attributes),
        "wasted": sum(attrs["wasted_samples"] for attrs in attributes),
        "values": {(t.params["lr"], t.params["effective_batch"]): t.value for t in study.trials},
    }


def by_hand() -> dict[str, Any]:
    train, held_out = data()
    found: dict[str, Any] = {"ooms": 0, "wasted": 0}

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", min(GRID["lr"]), max(GRID["lr"]), log=True)
        effective_batch = trial.suggest_categorical("effective_batch", GRID["effective_batch"])
        micro_batch = effective_batch
        gc.collect()  # what the trial before has left would be in this one's memory
        while True:
            progress = [0]
            try:
                return attempt(lr, effective_batch, micro_batch, progress)
            except torch.OutOfMemoryError:
                found["ooms"] += 1
                found["wasted"] += progress[0]
            micro_batch //= 2  # and everything from the beginning

    def attempt(lr: float, effective_batch: int, micro_batch: int, progress: list[int]) -> float:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        (inputs, targets), (test_inputs, test_targets) = train, held_out
        order = torch.Generator().manual_seed(SEED)
        while progress[0] < SAMPLES:
            for window in torch.randperm(len(inputs), generator=order).split(effective_batch):
                window = window[: SAMPLES - progress[0]]
                if not len(window):
                    break
                optimizer.zero_grad()
                for rows in window.split(micro_batch):
                    loss = cross_entropy(model(inputs[rows]), targets[rows])
                    (loss * len(rows) / len(window)).backward()
                optimizer.step()
                progress[0] += len(window)
        model.eval()
        with torch.no_grad():
            losses = [
                cross_entropy(model(x), y, reduction="sum").item()
                for x, y in zip(test_inputs.split(micro_batch), test_targets.split(micro_batch), strict=True)
            ]
        return sum(losses) / len(test_inputs)

    started = time.perf_counter()
    study = optuna.create_study(sampler=GridSampler(GRID))
    with simulated_memory(limit_bytes()):
        study.optimize(objective, n_trials=20)
    found["seconds"] = time.perf_counter() - started
    found["finished"] = sum(trial.state.name == "COMPLETE" for trial in study.trials)
    found["values"] = {(t.params["lr"], t.params["effective_batch"]): t.value for t in study.trials}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    runs: dict[str, list[dict[str, Any]]] = {"autoaccum.sweep": [], "Optuna, halved by hand": []}
    for _ in range(options.rounds):
        runs["autoaccum.sweep"].append(by_sweep())
        runs["Optuna, halved by hand"].append(by_hand())
    first = {name: done[0]["values"] for name, done in runs.items()}
    ours, theirs = first.values()
    assert ours.keys() == theirs.keys() == set(product(*GRID.values()))
    seconds = {name: statistics.median(run["seconds"] for run in done) for name, done in runs.items()}
    hand = seconds["Optuna, halved by hand"]
    write_table(
        "sweep",
        f"Twenty trials of {SAMPLES} samples, effective batches of {', '.join(map(str, GRID['effective_batch']))}, in "
        f"memory for about {ROOM} samples at once; medians of {options.rounds} rounds.",
        ["way", "seconds", "ratio", "finished", "out of memory", "samples computed in vain, at most"],
        [
            [
                name,
                f"{seconds[name]:.1f}",
                f"{seconds[name] / hand:.2f}",
                f"{done[0]['finished']} of 20",
                statistics.median(run["ooms"] for run in done),
                statistics.median(run["wasted"] for run in done),
            ]
            for name, done in runs.items()
        ],
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
