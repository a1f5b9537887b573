"""What verification costs: the first windows, the windows after these, and ``check``, next to the same without it.

    python benchmarks/verified.py [--rounds 5]

A *first windows* figure is the time of the first three windows of a new run, next to a run with ``verify=False``. A
*later windows* figure is the median time of windows 3 to 40, next to those of such a run. A *check* figure is the time
of one ``check``, in steps of the full batch that it is given. Runs take turns in one process; a figure is the median
over the rounds.

The detector computes dense targets for each image (Tian et al. 2019, FCOS, sections 3.1 and 3.2): assignment, focal
loss, box overlap weighted by centreness, and centreness, each divided by counts of the batch. The Gaussian process has
inducing points and a bound of the likelihood (Hensman et al. 2015).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from joined import Gpt, convolutions, images, step_loss, texts
from results import write_table
from torch import nn
from torch.nn import functional as F

import autoaccum

CUTS = 4
FIRST, LATER = 3, 40
SIDE, LEVELS = 64, (8, 16, 32)


class Detector(nn.Module):
    """Three levels of a pyramid, each with scores of two classes, distances to four sides, and centreness."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.GELU(), nn.Conv2d(16, 16, 3, 2, 1), nn.GELU())
        self.down = nn.ModuleList(nn.Conv2d(16, 16, 3, 2, 1) for _ in LEVELS[1:])
        self.head = nn.Conv2d(16, 2 + 4 + 1, 3, padding=1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        levels = [self.stem(pictures)]
        for down in self.down:
            levels.append(down(levels[-1].relu()))
        return torch.cat([self.head(level).flatten(2) for level in levels], 2).transpose(1, 2)


def locations() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centre of each place of the outputs, (n, 2), and its stride, (n,)."""
    found, strides = [], []
    for stride in LEVELS:
        at = torch.arange(stride // 2, SIDE, stride).float()
        found.append(torch.stack(torch.meshgrid(at, at, indexing="xy"), -1).flatten(0, 1))
        strides.append(torch.full((len(found[-1]),), float(stride)))
    return torch.cat(found), torch.cat(strides)


def detection_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    outputs, (at, stride) = model(batch["pictures"]), locations()
    scores, overlaps, weights, centred = [], [], [], []
    for output, boxes, kinds in zip(outputs, batch["boxes"], batch["kinds"], strict=True):
        wanted = torch.zeros(len(at), 2)
        for box, kind in zip(boxes, kinds, strict=True):  # one after the other, as published code does
            if kind < 0:  # padding
                continue
            sides = torch.cat([at - box[:2], box[2:] - at], 1)
            hit = (sides.min(1).values > 0) & (sides.max(1).values <= 4 * stride)
            if not hit.any():
                continue
            wanted[hit, kind] = 1.0
            told, right = output[hit, 2:6].exp() * stride[hit, None], sides[hit]
            inside = torch.minimum(told, right)
            both = (inside[:, 0] + inside[:, 2]) * (inside[:, 1] + inside[:, 3])
            areas = [(s[:, 0] + s[:, 2]) * (s[:, 1] + s[:, 3]) for s in (told, right)]
            across = right[:, [0, 2]].min(1).values / right[:, [0, 2]].max(1).values
            down = right[:, [1, 3]].min(1).values / right[:, [1, 3]].max(1).values
            weights.append((across * down).sqrt())
            overlaps.append((1 - both / (areas[0] + areas[1] - both)) * weights[-1])
            centred.append(F.binary_cross_entropy_with_logits(output[hit, 6], weights[-1], reduction="none"))
        chance = output[:, :2].sigmoid()
        of_right = torch.where(wanted > 0, chance, 1 - chance)
        scores.append((-0.25 * (1 - of_right) ** 2 * of_right.clamp(min=1e-6).log()).sum())
    positives = max(1, sum(len(each) for each in centred))
    if not centred:
        return torch.stack(scores).sum() / positives + 0 * outputs.sum()
    overlap = torch.cat(overlaps).sum() / torch.cat(weights).sum().clamp(min=1e-6)
    return torch.stack(scores).sum() / positives + overlap + torch.cat(centred).sum() / positives


def pictures() -> dict[str, torch.Tensor]:
    corner = torch.randint(0, SIDE // 2, (16, 12, 2)).float()
    boxes = torch.cat([corner, corner + torch.randint(8, SIDE // 2, (16, 12, 2))], 2)
    kinds = torch.randint(0, 2, (16, 12)).masked_fill(torch.rand(16, 12) < 0.3, -1)
    return {"pictures": torch.randn(16, 3, SIDE, SIDE), "boxes": boxes, "kinds": kinds}


class Process(nn.Module):
    """A Gaussian process with 32 inducing points over 4 inputs; its forward returns the negative bound."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.mean = nn.Parameter(torch.randn(32, 4)), nn.Parameter(torch.zeros(32))
        self.root, self.noise = nn.Parameter(torch.eye(32)), nn.Parameter(torch.zeros(()))

    def kernel(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (-0.5 * (first[:, None] - second[None]).square().sum(2)).exp()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        root = torch.linalg.cholesky(self.kernel(self.points, self.points) + 1e-3 * torch.eye(32))
        across = torch.linalg.solve_triangular(root, self.kernel(self.points, inputs), upper=False)
        own = self.root.tril()
        spread = 1 - across.square().sum(0) + (own.T @ across).square().sum(0)
        misses = (targets - across.T @ self.mean).square() + spread
        divergence = 0.5 * (own.square().sum() + self.mean.square().sum() - 32) - own.diagonal().abs().log().sum()
        return {"loss": 0.5 * (misses / self.noise.exp() + self.noise).mean() + divergence / 1_000}


def measurements() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(64, 4)
    return inputs, inputs.sin().sum(1)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "GPT, 64 x 32 tokens": (Gpt, texts, step_loss),
    "conv net, 128 images": (convolutions, images, step_loss),
    "tiny MLP, 64 samples": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
        lambda: (torch.randn(64, 8), torch.randint(0, 4, (64,))),
        step_loss,
    ),
    "detector, 16 images": (Detector, pictures, detection_loss),
    "Gaussian process, 64 samples": (Process, measurements, None),
}


def timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


class Run:
    """A run of some windows, with or without verification."""

    def __init__(self, task: str, *, verify: bool) -> None:
        torch.manual_seed(0)
        make, data, training_step = TASKS[task]
        model, self.batch = make(), data()
        size = len(next(iter(self.batch.values())) if isinstance(self.batch, dict) else self.batch[0])
        step = {} if training_step is None else {"training_step": training_step}
        # Both join or weigh alike from the start, so that verification alone is what differs.
        self.accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 1e-3), micro_batch=size // CUTS, verify=verify, **step
        )
        self.seconds: list[float] = []

    def step(self) -> None:
        self.seconds.append(timed(lambda: self.accumulator.step(self.batch)))

    @property
    def is_joined(self) -> bool:
        return any(type(event).__name__ == "Joined" for event in self.accumulator.events)


def check_in_steps(task: str) -> float:
    """Return how many steps of the full batch one ``check`` of it takes."""
    torch.manual_seed(0)
    make, data, training_step = TASKS[task]
    model, batch = make(), data()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*batch)["loss"] if training_step is None else training_step(model, batch)
        loss.backward()
        optimizer.step()

    options = {} if training_step is None else {"training_step": training_step}
    step()
    steps = statistics.median(timed(step) for _ in range(10))
    return timed(lambda: autoaccum.check(model, batch, device="cpu", **options)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[list[object]] = []
    for task in TASKS:
        first, later, checks, rule = [], [], [], "weighted"
        for _ in range(rounds):
            runs = Run(task, verify=True), Run(task, verify=False)
            for _ in range(LATER):
                for run in runs:
                    run.step()
            rule = "joined" if runs[0].is_joined else "weighted"
            first.append(sum(runs[0].seconds[:FIRST]) / sum(runs[1].seconds[:FIRST]))
            later.append(statistics.median(runs[0].seconds[FIRST:]) / statistics.median(runs[1].seconds[FIRST:]))
            checks.append(check_in_steps(task))
        figures = [statistics.median(each) for each in (first, later, checks)]
        rows.append([task, rule, f"{figures[0]:.1f}", f"{figures[1]:.2f}", f"{figures[2]:.0f}"])
        print(rows[-1], flush=True)
    text = (
        f"Batches that are split into {CUTS} micro-batches, medians of {rounds} rounds that took turns. First windows: "
        f"the time of the first {FIRST} of a new run, next to the same with verify=False. Later windows: the median of "
        f"windows {FIRST + 1} to {LATER}, next to those of such a run, which is weighted. Check: the time of one, in "
        "steps of the full batch."
    )
    write_table("verified", text, ["task", "rule", "first windows", "later windows", "check"], rows, threads=1)


if __name__ == "__main__":
    main()
