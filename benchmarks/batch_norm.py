"""What ``batch_norm`` costs: a window cut into micro-batches, by whose statistics BatchNorm normalises.

    python benchmarks/batch_norm.py
    python benchmarks/batch_norm.py --rounds 9

Convolutional nets with 1, 3 and 5 layers of BatchNorm train on the same windows, cut into four micro-batches, or whole;
all of one net take turns in one process. A figure is the median over the rounds of a window's time, its ratio that of
the rounds' ratios to ``"micro"``, which is PyTorch's own. The first windows, of which something is measured, are left
out. ``accumulate="joined"`` is compared with whole windows too: the largest difference of any weight or running
statistic after all of them, in 64 bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum

WINDOW, MICRO_BATCH = 64, 16
BEFORE, WINDOWS = 3, 6
LAYERS = (1, 3, 5)
WAYS: dict[str, dict[str, Any]] = {
    "micro": {"batch_norm": "micro", "micro_batch": MICRO_BATCH},
    "frozen": {"batch_norm": "frozen", "micro_batch": MICRO_BATCH},
    "ghost:16": {"batch_norm": "ghost:16", "micro_batch": MICRO_BATCH},
    "ghost:4": {"batch_norm": "ghost:4", "micro_batch": MICRO_BATCH},
    "joined": {"accumulate": "joined", "micro_batch": MICRO_BATCH},
    "the whole window": {"batch_norm": "micro", "micro_batch": WINDOW},
}


def net(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for index in range(layers):
        blocks += [nn.Conv2d(32 if index else 3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * WINDOW, 3, 16, 16, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 10, (4 * WINDOW,), generator=generator)


def trained(layers: int, dtype: torch.dtype, **options: Any) -> tuple[float, nn.Module]:
    """Return the seconds of a window, and the net."""
    model, stamps = net(layers).to(dtype), []

    def stamped(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
        return optimizer

    autoaccum.fit(
        model, images(dtype), effective_batch=WINDOW, steps=BEFORE + WINDOWS, loss_fn=cross_entropy, shuffle=False,
        optimizer=stamped, device="cpu", progress=False, cache=False, verify=False, **options,
    )  # fmt: skip
    return (stamps[-1] - stamps[BEFORE - 1]) / WINDOWS, model


def off(layers: int) -> float:
    """Return by how much ``accumulate="joined"`` is off whole windows, in 64 bits."""
    states = [trained(layers, torch.float64, **WAYS[way])[1].state_dict() for way in ("joined", "the whole window")]
    return max(float((value - states[1][name]).abs().max()) for name, value in states[0].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for layers in LAYERS:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:  # who is later may find another machine
                times[way].append(trained(layers, torch.float32, **WAYS[way])[0])
        difference = off(layers)
        for way, seconds in times.items():
            ratio = statistics.median(own / plain for own, plain in zip(seconds, times["micro"], strict=True))
            exact = f"{difference:.1e}" if way == "joined" else ""
            rows.append([str(layers), way, f"{statistics.median(seconds) * 1e3:.1f}", f"{ratio:.2f}", exact])
    write_table(
        "batch_norm",
        f"Convolutional nets with so many BatchNorm layers, windows of {WINDOW} images of 16 x 16 pixels in "
        f"micro-batches of {MICRO_BATCH}; medians of {rounds} rounds, the ratio that of the rounds' ratios to `micro`.",
        ["layers", "batch_norm", "ms a window", "ratio to micro", "off the whole window, in 64 bits"],
        rows,
        threads=1,
    )


if __name__ == "__main__":
    main()
