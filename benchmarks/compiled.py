"""What ``autoaccum`` has PyTorch compile: how often, for how many sizes, and what windows take then.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --only "GPT, wrapped"

Each case is a process of its own with an empty cache of inductor's. It trains two passes over 1,081 samples in windows
of 256, the last of which has 57, with ``micro_batch="auto"``; the events say what was compiled. Then windows of 256 are
timed in turn, and a figure is the median of the rounds: in the plan that was found; the same uncompiled; and in a loop
by hand at the better of two micro-batches, each of which is compiled by itself, as a constant.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import autoaccum
from autoaccum.events import Compiled

WINDOW, SAMPLES, EPOCHS = 256, 4 * 256 + 57, 2
BY_HAND = (64, 256)
ROUNDS = 7


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [h.unflatten(-1, (4, -1)).transpose(1, 2) for h in self.projections(self.before(x)).chunk(3, -1)]
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.blocks = nn.Sequential(Block(64), Block(64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids))).transpose(1, 2)


def gpt() -> tuple[nn.Module, Any]:
    ids = torch.randint(0, 64, (SAMPLES, 17))
    return GPT(), (ids[:, :-1].clone(), ids[:, 1:].clone())


def mlp() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, (torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,)))


def conv_net() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 10)), (
        torch.randn(SAMPLES, 1, 16, 16),
        torch.randint(0, 10, (SAMPLES,)),
    )


# Each returns the model and the loss as they are called; ``how`` is what torch.compile is told.


def wrapped(model: nn.Module, **how: Any) -> tuple[Any, Any]:
    return torch.compile(model, **how), cross_entropy


def in_place(model: nn.Module, **how: Any) -> tuple[Any, Any]:
    model.compile(**how)
    return model, cross_entropy


def parts(model: Any, **how: Any) -> tuple[Any, Any]:
    model.blocks = torch.compile(model.blocks, **how)
    return model, cross_entropy


def loss_alone(model: nn.Module, **how: Any) -> tuple[Any, Any]:
    return model, torch.compile(cross_entropy, **how)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], Callable[..., tuple[Any, Any]]]] = {
    "GPT, torch.compile(model)": (gpt, wrapped),
    "GPT, model.compile()": (gpt, in_place),
    "GPT, its blocks alone": (gpt, parts),
    "MLP, torch.compile(model)": (mlp, wrapped),
    "MLP, fit(compile=True)": (mlp, lambda model, **how: (model, cross_entropy)),
    "MLP, its loss alone": (mlp, loss_alone),
    "conv net with BatchNorm, torch.compile(model)": (conv_net, wrapped),
    "GPT, by an Accumulator": (gpt, wrapped),
}


def trained(name: str, model: Any, data: Any, loss_fn: Any) -> tuple[list[Any], list[Any]]:
    """Train the two passes; return the windows' sizes and the events."""
    if "Accumulator" in name:
        lengths: list[int] = []

        def counting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            lengths.append(len(targets))
            return loss_fn(outputs, targets)  # type: ignore[no-any-return]

        accumulator = autoaccum.Accumulator(model, torch.optim.AdamW(model.parameters()), loss_fn=counting)
        sizes = []
        for _ in range(EPOCHS):
            for start in range(0, SAMPLES, WINDOW):
                lengths.clear()
                accumulator.step(tuple(part[start : start + WINDOW] for part in data))
                # It keeps no reports. The window is what came first; what it is measured by comes after that.
                ends = list(itertools.accumulate(lengths))
                sizes.append(tuple(lengths[: 1 + ends.index(min(WINDOW, SAMPLES - start))]))
        return sizes, list(accumulator.events)
    result = autoaccum.fit(
        model,
        data,
        effective_batch=WINDOW,
        loss_fn=loss_fn,
        epochs=EPOCHS,
        compile="compile=True" in name,
        cache=False,
        progress=False,
    )
    return [report.micro_batches for report in result.history], list(result.events)


def window_of(model: Any, loss_fn: Any, data: Any, sizes: tuple[int, ...]) -> float:
    """Return the seconds of a window in these sizes, without an optimizer's step, which all have alike."""
    started, position = time.perf_counter(), 0
    for size in sizes:
        inputs, targets = (part[position : position + size].clone() for part in data)
        (loss_fn(model(inputs), targets) * (size / WINDOW)).backward()
        position += size
    return time.perf_counter() - started


def measured(name: str) -> dict[str, Any]:
    """Run a case in this process."""
    warnings.simplefilter("ignore")
    make, compiled_by = CASES[name]
    torch.manual_seed(0)
    bare, data = make()
    plain, hand = copy.deepcopy(bare), copy.deepcopy(bare)
    model, loss_fn = compiled_by(bare)
    sizes, events = trained(name, model, data, loss_fn)
    told = [event for event in events if isinstance(event, Compiled)]
    plan = [window for window in sizes if sum(window) == WINDOW][-1]
    if "compile=True" in name:
        model = torch.compile(model)
        compiled_by = wrapped
    by_hand, loss_by_hand = compiled_by(hand, dynamic=False)
    cuts = {size: (size,) * (WINDOW // size) for size in BY_HAND}
    for cut in cuts.values():  # compiled now
        window_of(by_hand, loss_by_hand, data, cut)
    best = min(cuts, key=lambda size: min(window_of(by_hand, loss_by_hand, data, cuts[size]) for _ in range(3)))
    runs = {
        "ours": (model, loss_fn, plan),
        "eager": (plain, cross_entropy, plan),
        "by hand": (by_hand, loss_by_hand, cuts[best]),
    }
    times: dict[str, list[float]] = {run: [] for run in runs}
    for turn in range(ROUNDS + 1):
        for run, (called, loss, cut) in runs.items():
            seconds = window_of(called, loss, data, cut)
            if turn:  # the first makes ready
                times[run].append(seconds)
    return {
        "sizes": sorted({size for window in sizes for size in window}),
        "compilations": sum(event.compilations for event in told),
        "later": sum(event.compilations for event in told if event.step > 1),
        "seconds": sum(event.seconds for event in told),
        "best": best,
        **{run: statistics.median(found) for run, found in times.items()},
    }


def page(rows: list[list[object]]) -> None:
    """Write the table as far as it is known, for a run takes minutes."""
    write_table(
        "compiled",
        f"Two passes over {SAMPLES} samples in windows of {WINDOW}, by the inductor of the CPU. Compilations are those "
        f"that `Compiled` events tell of; a window's time is without the optimizer's step. By hand: the better of "
        f"micro-batches of {', '.join(map(str, BY_HAND))}, in brackets, each compiled as a constant; medians of "
        f"{ROUNDS} rounds in turn, on a machine that other work shared, which the "
        "times show. Ours is the plan of the last full window, a search that is not over yet included.",
        [
            "what is compiled",
            "sizes",
            "compilations",
            "after the first window",
            "seconds",
            "ms a window",
            "beside eager",
            "beside by hand",
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES)
    name = parser.parse_args().only
    if name is not None:
        print(json.dumps(measured(name)))
        return
    rows: list[list[object]] = []
    for name in CASES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--only", name]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        ours = found["ours"]
        rows.append(
            [
                name,
                ", ".join(map(str, found["sizes"])),
                found["compilations"],
                found["later"],
                f"{found['seconds']:.1f}",
                f"{ours * 1e3:.1f}",
                f"{ours / found['eager']:.2f}",
                f"{ours / found['by hand']:.2f} ({found['best']})",
            ]
        )
        page(rows)


if __name__ == "__main__":
    main()
