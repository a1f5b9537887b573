"""What joined micro-batches cost: time and memory next to the full batch, and next to a hand-written weighted loop.

    python benchmarks/joined.py [--rounds 30]

All train the same model on the same batch with the same loss, a mean, so that weighting is exact as well. Steps take
turns in one process; a figure is the median over the rounds, as a ratio to the hand-written loop of 8 micro-batches.
Memory is the most that tensors take in one step, gradients too, besides the model and the batch. The language model
has 32,000 words; its chunked loss is PyTorch's ``linear_cross_entropy`` of 128 tokens at once.
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
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.testing import simulated_memory

PARTS = 8
WARM_UP = 12
"""Steps before the first that is timed: the first ones measure and set up."""


class Body(nn.Module):
    """A transformer of three layers, which ends in hidden states."""

    def __init__(self, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, 64), nn.Parameter(torch.randn(length, 64) / 8)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(tokens) + self.place)


class Gpt(nn.Module):
    def __init__(self, words: int = 200, length: int = 32) -> None:
        super().__init__()
        self.body, self.head = Body(words, length), nn.Linear(64, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.GELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def texts(count: int = 64, length: int = 32, words: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, words, (count, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


VOCABULARY = "language model of 32,000 words, 32 x 64 tokens"
TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT, 64 x 32 tokens": (Gpt, texts),
    "conv net, 128 images": (convolutions, images),
    VOCABULARY: (lambda: Gpt(32_000, 64), lambda: texts(32, 64, 32_000)),
}


def step_loss(model: Callable[[Any], Any], batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def chunked_loss(model: Any, batch: Any) -> torch.Tensor:
    # Left to itself it takes four times as long here, in chunks of its own choice.
    hidden, options = model.body(batch[0]).flatten(0, 1), nn.LinearCrossEntropyOptions(batch_chunk_size=128)
    return linear_cross_entropy(hidden, model.head.weight, batch[1].flatten(), options=options)


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


def joined_by_hand(model: nn.Module, batch: Any) -> Callable[[], float]:
    """Return the least that a joined step may cost: it puts nothing back and serves this one model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> float:
        optimizer.zero_grad()
        parts = batch[0].chunk(PARTS)
        with torch.no_grad():
            found = [model(part) for part in parts[:-1]]
        last = model(parts[-1])
        outputs = torch.cat([*found, last.detach()]).requires_grad_()
        loss = step_loss(lambda _: outputs, batch)
        loss.backward()
        assert outputs.grad is not None
        *gradients, of_last = outputs.grad.chunk(PARTS)
        last.backward(of_last)
        for part, gradient in zip(parts, gradients, strict=False):
            model(part).backward(gradient)
        optimizer.step()
        return float(loss)

    return step


def checkpointed_by_hand(model: nn.Module, batch: Any) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> float:
        optimizer.zero_grad()
        outputs = [checkpoint(model, part, use_reentrant=False) for part in batch[0].chunk(PARTS)]
        loss = step_loss(lambda _: torch.cat(outputs), batch)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def by_accumulator(model: nn.Module, batch: Any, accumulate: str, step: Any = step_loss, **sizes: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sizes = {name: len(batch[0]) * parts // PARTS for name, parts in (sizes or {"micro_batch": 1}).items()}
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, accumulate=accumulate, **sizes)
    return lambda: float(accumulator.step(batch))


WAYS: dict[str, Callable[[nn.Module, Any], Callable[[], float]]] = {
    "hand-written loop": by_hand,
    "joined, written by hand": joined_by_hand,
    "PyTorch's checkpoint of each part": checkpointed_by_hand,
    "weighted": lambda model, batch: by_accumulator(model, batch, "weighted"),
    "joined": lambda model, batch: by_accumulator(model, batch, "joined"),
    # The last micro-batch, whose graph is kept, is as large as memory allows: here six of eight parts.
    "joined, 6 graphs of 8 fit": lambda model, batch: by_accumulator(model, batch, "joined", max_micro_batch=6),
    "joined, chunked loss": lambda model, batch: by_accumulator(model, batch, "joined", chunked_loss),
    "full batch": lambda model, batch: by_accumulator(model, batch, "auto", micro_batch=PARTS),
}


def ways_of(task: str) -> list[str]:
    return [way for way in WAYS if task == VOCABULARY or way != "joined, chunked loss"]


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
        steps, seconds = {}, {way: list[float]() for way in ways_of(name)}
        for way in ways_of(name):
            torch.manual_seed(0)
            model, batch = make(), data()
            steps[way] = WAYS[way](model, batch)
        losses = {way: [step() for _ in range(WARM_UP)] for way, step in steps.items()}
        for way, found in losses.items():
            assert abs(found[-1] - losses["hand-written loop"][-1]) < 1e-3, (way, found)
        for _ in range(rounds if name != VOCABULARY else min(rounds, 5)):
            for way, step in steps.items():
                began = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - began)
        plain = statistics.median(seconds["hand-written loop"])
        memory = {way: peak(make, data, way) for way in ways_of(name)}
        for way in ways_of(name):
            median = statistics.median(seconds[way])
            share = memory[way] / memory["full batch"]
            rows.append(
                [
                    name,
                    way,
                    f"{median * 1e3:.1f} ms",
                    f"{median / plain:.2f}",
                    format_bytes(memory[way]),
                    f"{share:.2f}",
                ]
            )
    text = (
        f"Medians of {rounds} steps that took turns (5 of the language model's), as ratios to the hand-written loop of "
        f"{PARTS} micro-batches; the most that tensors take in a step, gradients too, besides the model and the batch, "
        "as a share of the full batch's. Joined steps compute one forward more than weighted ones, of all but the last "
        "micro-batch, and hold the model's outputs."
    )
    header = ["task", "way", "a step", "time", "memory", "of the full batch"]
    write_table("joined", text, header, rows, threads=1)


if __name__ == "__main__":
    main()
