"""What the chosen plan loses against the best of all possible cuts, on time curves measured on this machine.

    python benchmarks/planner.py

Each model's forward and backward is timed at every micro-batch size up to ``SIZES``, several times. Then the policy of
``fit`` is run on these times as on a device, each reading being one of those that were taken, with memory for some
largest micro-batch; and the plan that it settles on is compared, by the medians, with the cheapest of all multisets of
sizes that sum to the effective batch (by dynamic programming), near-equal or not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.planning.attempts import Reading
from autoaccum.planning.tuner import Tuner

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CharGPT, loss_fn

SIZES = 96
EFFECTIVE_BATCHES = (32, 64, 97, 128, 250, 256, 1000)
LIMITS = (7, 24, 50, 64, 90, 96)
SEEDS = 5
FIXED, PER_SAMPLE = 10_000, 100
Curve = list[list[float]]


class Tiled(nn.Module):
    """Pads its batch to a multiple of ``tile`` samples, as compiled models are made to and kernels do by themselves."""

    def __init__(self, model: nn.Module, tile: int) -> None:
        super().__init__()
        self.model = model
        self.tile = tile

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = len(inputs)
        padded = torch.cat([inputs, inputs.new_zeros(-rows % self.tile, *inputs.shape[1:])])
        return self.model(padded)[:rows]


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def models() -> dict[str, Callable[[int], torch.Tensor]]:
    """(micro-batch) -> loss, by the shape of their curve."""
    torch.manual_seed(0)
    gpt, small, tiled = CharGPT(), mlp(32), Tiled(mlp(512), 32)
    ids = torch.randint(0, len(ALPHABET), (SIZES, 17))
    images, labels = torch.randn(SIZES, 64), torch.randint(0, 10, (SIZES,))
    return {
        "flat: character GPT": lambda size: loss_fn(gpt(ids[:size, :-1]), ids[:size, 1:]),
        "stepped: MLP padded to multiples of 32": lambda size: cross_entropy(tiled(images[:size]), labels[:size]),
        "saturating: small MLP": lambda size: cross_entropy(small(images[:size]), labels[:size]),
    }


def measure(loss_of: Callable[[int], torch.Tensor], repeats: int) -> Curve:
    """Seconds of each reading of each size, sizes in a new order each round; index 0 is empty."""
    curve: Curve = [[] for _ in range(SIZES + 1)]
    for size in (1, SIZES):
        loss_of(size).backward()
    for _ in range(repeats):
        for size in random.sample(range(1, SIZES + 1), SIZES):
            started = time.perf_counter()
            loss_of(size).backward()
            curve[size].append(time.perf_counter() - started)
    return curve


def cheapest(times: list[float], largest: int, num_samples: int) -> float:
    """Seconds of the cheapest multiset of sizes up to the largest that sums to the samples."""
    best = [0.0] * (num_samples + 1)
    for total in range(1, num_samples + 1):
        best[total] = min(best[total - size] + times[size] for size in range(1, min(largest, total) + 1))
    return best[num_samples]


def choose(curve: Curve, largest: int, num_samples: int, seed: int) -> tuple[tuple[int, ...], int]:
    """The plan that training settles on, and the windows that took."""
    draw = random.Random(seed)
    limit = FIXED + PER_SAMPLE * largest
    tuner = Tuner(ceiling=num_samples, limit_bytes=limit, headroom=0, search=True)
    for window in range(1, 100):
        sizes, total = [], 0.0
        attempt = tuner.window(num_samples)
        for piece in attempt:
            seconds = draw.choice(curve[piece.size])
            if piece.is_trial:
                attempt.fitted(Reading(piece, FIXED + PER_SAMPLE * piece.size, seconds))
            total += seconds
            sizes.append(piece.size)
        attempt.committed(tuple(sizes), total if attempt.is_timed else None)
        if tuner.settle(num_samples):
            return tuner.plan(num_samples), window
    raise RuntimeError("it did not settle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="readings of each size")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    random.seed(0)
    rows = []
    for name, loss_of in models().items():
        curve = measure(loss_of, arguments.repeats)
        times = [0.0, *map(statistics.median, curve[1:])]
        regrets, of_largest, windows = [], [], []
        for num_samples in EFFECTIVE_BATCHES:
            for largest in LIMITS:
                best = cheapest(times, min(largest, num_samples), num_samples)
                count = -(-num_samples // largest)
                fewest = [num_samples // count + (i < num_samples % count) for i in range(count)]
                of_largest.append(sum(times[size] for size in fewest) / best - 1)
                for seed in range(SEEDS):
                    plan, window = choose(curve, largest, num_samples, seed)
                    regrets.append(sum(times[size] for size in plan) / best - 1)
                    windows.append(window)
        quantiles = statistics.quantiles(regrets, n=20)
        spread = statistics.median(statistics.quantiles(c, n=4)[2] / statistics.median(c) - 1 for c in curve[1:])
        rows.append(
            [
                name,
                f"{times[1] * 1e3:.2f} / {times[SIZES] * 1e3:.2f} ms",
                f"{spread:.1%}",
                f"{statistics.mean(regrets):.1%}",
                f"{quantiles[-1]:.1%}",
                f"{max(regrets):.1%}",
                f"{statistics.mean(of_largest):.1%} / {max(of_largest):.1%}",
                statistics.median(windows),
            ]
        )
    write_table(
        "planner",
        "Regret of the plan that training settles on against the cheapest of all cuts: "
        f"{len(EFFECTIVE_BATCHES)} effective batches from {min(EFFECTIVE_BATCHES)} to {max(EFFECTIVE_BATCHES)}, memory "
        f"for {len(LIMITS)} largest micro-batches, {min(LIMITS)} to {max(LIMITS)}, {SEEDS} draws of the readings. "
        "Noise: how far the upper quartile of a size's readings is from its median. Fewest: the regret of taking "
        "the fewest micro-batches that fit.",
        ["curve", "seconds of 1 / 96", "noise", "mean", "95th percentile", "worst", "fewest: mean / worst", "windows"],
        rows,
        threads=arguments.threads,
    )


if __name__ == "__main__":
    main()
