"""Is a batch that follows the gradient's noise worth it? The character GPT, to the same validation loss, three ways.

    python examples/noise_scale.py       # about five minutes on one core of an AMD EPYC; writes noise_scale.png

A small batch needs few samples and many steps, a large one few steps and many samples. The noise scale says how large
a batch may be before its samples are wasted: it is small at first and grows while the loss falls.

The fixed batches have the learning rates that served them best of three each (2, 4, 8e-3 and 4, 8, 16e-3); the noise
scale's is that of the small batch, times the root of how much larger its own is. Seconds are those of training alone.
Each run is of one seed, so that small differences say nothing.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from char_gpt import CharGPT, loss_fn, recipe

import autoaccum
from autoaccum import schedules
from autoaccum.events import Record, StepReport, Validated

TARGET = 1.5
"""Nats per character on held-out text."""
SMALL, LARGE = 16, 256


@dataclass
class Run:
    """A way to choose the effective batch, and what came of it."""

    name: str
    arguments: dict[str, Any]
    reports: list[StepReport] = field(default_factory=list)
    losses: list[tuple[StepReport, float]] = field(default_factory=list)
    """Of validations, each with the last step before it."""

    def __call__(self, record: Record) -> None:
        """Take what the run tells, and end it at the target."""
        if isinstance(record, StepReport):
            self.reports.append(record)
        elif isinstance(record, Validated):
            self.losses.append((self.reports[-1], record.loss))
            if record.loss <= TARGET:
                raise autoaccum.StopTraining

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.reports)


RUNS = [
    Run(f"fixed, {SMALL}", {"effective_batch": SMALL, "lr": 4e-3}),
    Run(f"fixed, {LARGE}", {"effective_batch": LARGE, "lr": 8e-3}),
    Run(
        f"noise scale, {SMALL} to {LARGE}",
        {
            "effective_batch": schedules.NoiseScale(SMALL, LARGE),
            "lr": 4e-3,
            "lr_scaling": "sqrt",
            "base_batch": SMALL,
        },
    ),
]


def train(run: Run) -> None:
    made = recipe()
    torch.manual_seed(0)
    autoaccum.fit(
        CharGPT(),
        made["data"],
        loss_fn=loss_fn,
        clip_norm=1.0,
        samples=100_000,
        validation_data=made["validation_data"],
        validate_every=512,
        noise_scale=True,
        callbacks=[run],
        **run.arguments,
    )


def table(runs: list[Run]) -> str:
    lines = ["| effective batch | optimizer steps | samples | seconds | loss |", "| --- | --- | --- | --- | --- |"]
    for run in runs:
        last, loss = run.losses[-1]
        lines.append(f"| {run.name} | {last.step:,} | {last.num_samples:,} | {run.seconds:.0f} | {loss:.3f} |")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (by_samples, by_steps, batches) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for run in runs:
        losses = [loss for _, loss in run.losses]
        by_samples.plot([report.num_samples for report, _ in run.losses], losses, label=run.name)
        by_steps.plot([report.step for report, _ in run.losses], losses)
    for axes, unit in ((by_samples, "samples"), (by_steps, "optimizer steps")):
        axes.axhline(TARGET, color="grey", linewidth=0.8)
        axes.set(xlabel=unit, ylabel="validation loss, nats per character")
    by_steps.set_xscale("log")
    by_samples.legend()
    reports = runs[-1].reports
    samples = [report.num_samples for report in reports]
    scales = [report.noise_scale or 0.0 for report in reports]
    batches.plot(samples, scales, color="C3", label="noise scale, smoothed")
    batches.step(samples, [report.effective_batch for report in reports], color="C2", label="effective batch")
    batches.set(xlabel="samples", ylabel="samples", ylim=(0, 1.5 * max(r.effective_batch for r in reports)))
    batches.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    for run in RUNS:
        print(f"effective batch: {run.name}", file=sys.stderr)
        train(run)
    print(table(RUNS))
    draw(RUNS, Path("noise_scale.png"))
