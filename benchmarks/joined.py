"""What joined micro-batches cost: time and memory next to the full batch, and next to a hand-written weighted loop.

    python benchmarks/joined.py [--rounds 30]

All train the same model on the same batch with the same loss, a mean, so that weighting is exact as well. Steps take
turns in one process; a figure is the median over the rounds, as a ratio to the hand-written loop of 8 micro-batches.
Memory is the most that tensors take in one step, gradients too, besides the model and the batch.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.testing import simulated_memory

PARTS = 8
WARM_UP = 12
"""Steps before the first that is timed: the first ones measure and set up."""


class Gpt(nn.Module):
    """A transformer of three layers over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(200, 64), nn.Parameter(torch.randn(32, 64) / 8)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens) + self.place))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.GELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 200, (64, 33))
    return tokens[:, :-1], tokens[:, 1:]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT, 64 x 32 tokens": (Gpt, texts),
    "conv net, 128 images": (convolutions, images),
}


def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def by_hand(model: nn.Module, batch: Any) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(tensor.chunk(PARTS) for tensor in batch), strict=True):
            loss = step_loss(model, part) / PARTS
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def by_accumulator(model: nn.Module, batch: Any, parts: int, accumulate: str) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    accumulator = autoaccum.Accumulator(
        model, optimizer, training_step=step_loss, micro_batch=len(batch[0]) // parts, accumulate=accumulate
    )
    return lambda: float(accumulator.step(batch))


WAYS: dict[str, Callable[[nn.Module, Any], Callable[[], float]]] = {
    "hand-written loop": by_hand,
    "weighted": lambda model, batch: by_accumulator(model, batch, PARTS, "weighted"),
    "joined": lambda model, batch: by_accumulator(model, batch, PARTS, "joined"),
    "full batch": lambda model, batch: by_accumulator(model, batch, 1, "auto"),
}


class Highest(TorchDispatchMode):
    """The most that is in use after any operation; a run resets the device's own peak within a step."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device, self.used = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.used = max(self.used, self._device.used)
        return found


def peak(make: Callable[[], nn.Module], data: Callable[[], Any], way: str) -> int:
    """Return the most bytes that a late step takes besides the model and the batch."""
    with simulated_memory(2**40) as device:
        torch.manual_seed(0)
        model, batch = make(), data()
        before = device.used
        step = WAYS[way](model, batch)
        for _ in range(4):
            step()
        gc.collect()
        with Highest(device) as highest:
            step()
        return highest.used - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for name, (make, data) in TASKS.items():
        steps, seconds = {}, {way: list[float]() for way in WAYS}
        for way, build in WAYS.items():
            torch.manual_seed(0)
            model, batch = make(), data()
            steps[way] = build(model, batch)
        losses = {way: [step() for _ in range(WARM_UP)] for way, step in steps.items()}
        for way, found in losses.items():
            assert abs(found[-1] - losses["hand-written loop"][-1]) < 1e-3, (way, found)
        for _ in range(rounds):
            for way, step in steps.items():
                began = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - began)
        plain = statistics.median(seconds["hand-written loop"])
        memory = {way: peak(make, data, way) for way in WAYS}
        for way in WAYS:
            median = statistics.median(seconds[way])
            parts = 1 if way == "full batch" else PARTS
            share = memory[way] / memory["full batch"]
            rows.append(
                [name, way, parts, f"{median * 1e3:.1f} ms", f"{median / plain:.2f}", format_bytes(memory[way]),
                 f"{share:.2f}"]
            )  # fmt: skip
    text = (
        f"Medians of {rounds} steps that took turns, as ratios to the hand-written loop; the most that tensors take in "
        "a step, gradients too, besides the model and the batch, as a share of the full batch's. Joined steps compute "
        "one forward more than weighted ones, of all micro-batches but the last, and hold the model's outputs."
    )
    header = ["task", "way", "micro-batches", "a step", "time", "memory", "of the full batch"]
    write_table("joined", text, header, rows, threads=1)


if __name__ == "__main__":
    main()
