"""What it costs to return something beside the loss: µs a micro-batch, beside the same run that only computes it.

    python benchmarks/outputs.py

All compute the same loss and the same accuracy; they differ in what they return. They alternate in one process; a
figure is the median over the rounds, and that beside "loss alone" the median of the rounds' differences. Their last
losses must be the same, to the bit, or nothing is written. The first windows, which are looked at and measured, are
left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum

MICRO_BATCH = 8
BEFORE = 110
"""Windows that are left out: the last one of them is the hundredth, which is looked at."""


def beside(returned: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Any, Any], Any]:
    """A training step that returns something of its accuracy and of the samples' losses."""

    def training_step(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        logits = model(inputs)
        losses = cross_entropy(logits, targets, reduction="none")
        right = (logits.detach().argmax(1) == targets).float().mean()
        outputs = returned(right, losses)
        return losses.mean() if outputs is None else (losses.mean(), outputs)

    return training_step


CONTESTANTS: dict[str, Callable[[Any, Any], Any]] = {
    "loss alone": beside(lambda right, losses: None),
    "no outputs": beside(lambda right, losses: {}),
    "a scalar": beside(lambda right, losses: {"accuracy": right}),
    "a scalar and its count": beside(lambda right, losses: {"accuracy": (right, MICRO_BATCH)}),
    "ten scalars": beside(lambda right, losses: {f"accuracy {number}": right for number in range(10)}),
    "a value for each sample": beside(lambda right, losses: {"losses": losses}),
}


def train(training_step: Callable[[Any, Any], Any], windows: int, pieces: int) -> tuple[float, float]:
    """(seconds after the first windows, last loss)"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    data = torch.randn(4096, 32), torch.randint(0, 10, (4096,))
    stamps: list[float] = []

    def stamp(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            stamps.append(time.perf_counter())

    result = autoaccum.fit(
        model, data, training_step=training_step, effective_batch=MICRO_BATCH * pieces, micro_batch=MICRO_BATCH,
        steps=BEFORE + windows, shuffle=False, device="cpu", progress=False, callbacks=[stamp],
    )  # fmt: skip
    return stamps[-1] - stamps[BEFORE - 1], result.history[-1].loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=1600, help="to time in each run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for pieces in (1, 8):
        windows = options.micro_batches // pieces
        for training_step in CONTESTANTS.values():
            train(training_step, 2, pieces)  # whatever is lazy
        times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        losses = set()
        for _ in range(options.rounds):
            for name, training_step in CONTESTANTS.items():
                seconds, loss = train(training_step, windows, pieces)
                times[name].append(seconds / (windows * pieces) * 1e6)
                losses.add(loss)
        if len(losses) > 1:
            raise SystemExit(f"the last losses are {sorted(losses)}: not the same training")
        for name, each in times.items():
            extra = statistics.median(one - alone for one, alone in zip(each, times["loss alone"], strict=True))
            shown = "" if name == "loss alone" else f"{extra:+.1f}"
            rows.append([pieces, name, f"{statistics.median(each):.1f}", shown])
    write_table(
        "outputs",
        f"A tiny MLP in micro-batches of {MICRO_BATCH} samples, the same computation in each; medians of "
        f"{options.rounds} rounds.",
        ["micro-batches a window", "returned", "µs a micro-batch", "beside the loss alone"],
        rows,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
