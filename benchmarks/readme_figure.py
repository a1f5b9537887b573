"""Draw the figure of the README from two runs: the loss that trainers log, and a memory limit that falls in mid-step.

    python benchmarks/readme_figure.py
    python benchmarks/readme_figure.py --also PYTHON    # adds rows for the transformers of another environment
    python benchmarks/readme_figure.py --quick          # fewer steps

Writes docs/readme.svg for light pages, docs/readme-dark.svg for dark ones, and the table. Needs the extras
``integrations`` and ``plot``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import COMMITTED, RESULTS, write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import OutOfMemory, StepReport
from autoaccum.memory.simulated import MemorySimulation
from autoaccum.testing import manual_clock

PICTURES = Path(__file__).parent.parent / "docs" if RESULTS == COMMITTED else RESULTS

BATCH, MICRO_BATCH = 64, 16
"""Samples per step, and per micro-batch when the step is split."""
STEPS, QUICK_STEPS = 60, 6
WORDS, LENGTH = 64, 16
LEARNING_RATE = {"adamw_torch": 1e-3, "sgd": 0.05}
CLIP_NORM = 1.0
"""The default ``max_grad_norm`` of TrainingArguments."""
AGREES = 1e-4
"""Largest difference from the loss of the full batch that counts as the same curve."""

EFFECTIVE_BATCH = 512
LIMIT = 24 * 2**20
WIDTH, RANK, FEATURES, CLASSES = 2048, 128, 32, 10
RATE = 0.01
SECONDS_PER_MICRO_BATCH, SECONDS_PER_SAMPLE = 0.01, 0.0001
"""Of the simulated clock. autoaccum times sizes, and the picture must not depend on how busy the machine is."""


# The loss that trainers log.


@dataclass(frozen=True)
class Logged:
    """The losses and gradient norms that a trainer logged, and its parameters at the end."""

    losses: list[float]
    gradient_norms: list[float]
    parameters: torch.Tensor

    def clipped(self) -> int:
        """Return the number of steps whose gradient norm was above the clipping threshold."""
        return sum(norm > CLIP_NORM for norm in self.gradient_norms)

    def summary(self, full: Logged, start: torch.Tensor) -> dict[str, float]:
        """Return the figures of the table, compared with the run of full batches."""
        ratios = [own / other for own, other in zip(self.losses, full.losses, strict=True)]
        return {
            "first": self.losses[0],
            "last": self.losses[-1],
            "ratio": statistics.mean(ratios),
            "norm": self.gradient_norms[0] / full.gradient_norms[0],
            "clipped": self.clipped(),
            "parameters": float((self.parameters - full.parameters).norm() / (full.parameters - start).norm()),
        }


def samples(count: int) -> list[dict[str, Any]]:
    """Return sequences of random words: each class draws three of four words from its own half of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 2, (count,), generator=generator)
    is_own = torch.rand(count, LENGTH, generator=generator) < 0.75
    half = torch.where(is_own, classes[:, None], 1 - classes[:, None])
    words = torch.randint(0, WORDS // 2, (count, LENGTH), generator=generator) + half * (WORDS // 2)
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(words, classes, strict=True)]


def classifier() -> nn.Module:
    """Return a small BERT with two classes and no dropout, whose random numbers would depend on the split."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def log(trainer: Callable[..., Any], steps: int, optimizer: str, batch: int, **options: Any) -> Logged:
    """Train the classifier with ``batch`` samples per forward and BATCH per step, and log every step."""
    from transformers import PrinterCallback, TrainingArguments

    model = classifier()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=BATCH // batch,
            max_steps=steps,
            logging_steps=1,
            learning_rate=LEARNING_RATE[optimizer],
            max_grad_norm=CLIP_NORM,
            optim=optimizer,
            seed=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        made = trainer(model, arguments, train_dataset=samples(BATCH * steps), **options)
        made.remove_callback(PrinterCallback)
        made.train()
    lines = [line for line in made.state.log_history if "loss" in line]
    return Logged([line["loss"] for line in lines], [float(line["grad_norm"]) for line in lines], flat(model))


def stock(steps: int, optimizer: str) -> tuple[Logged, Logged]:
    """Return a stock Trainer's runs of full batches and of split ones."""
    from transformers import Trainer

    return log(Trainer, steps, optimizer, BATCH), log(Trainer, steps, optimizer, MICRO_BATCH)


def drop_in(steps: int, optimizer: str) -> Logged:
    """Return the run of AutoAccumTrainer with the same arguments, its micro-batches held to the same size."""
    from autoaccum.integrations.transformers import AutoAccumTrainer

    return log(AutoAccumTrainer, steps, optimizer, MICRO_BATCH, micro_batch=MICRO_BATCH)


@dataclass(frozen=True)
class Trainers:
    """The curves with AdamW, and the figures of the table by optimizer and trainer."""

    full: Logged
    split: Logged
    ours: Logged
    summaries: dict[str, dict[str, dict[str, float]]]


def trainers(steps: int) -> Trainers:
    """Train with all trainers and optimizers.

    Raises:
        AssertionError: AutoAccumTrainer logged another loss than the full batch has.
    """
    curves, summaries = {}, {}
    start = flat(classifier())
    for optimizer in LEARNING_RATE:
        full, split = stock(steps, optimizer)
        ours = drop_in(steps, optimizer)
        worst = max(abs(own - other) for own, other in zip(ours.losses, full.losses, strict=True))
        assert worst < AGREES, f"{optimizer}: AutoAccumTrainer's loss differs by {worst} from the full batch's"
        curves[optimizer] = full, split, ours
        runs = {"full": full, "split": split, "ours": ours}
        summaries[optimizer] = {name: one.summary(full, start) for name, one in runs.items()}
    return Trainers(*curves["adamw_torch"], summaries)


# Memory that falls in mid-step.


class Device(MemorySimulation):
    """A simulated memory that keeps the peak of each attempt at a step, whoever resets the simulation's own."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._highest = 0

    def reset_peak(self) -> None:
        self._highest = max(self._highest, self.peak)
        super().reset_peak()

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        self.reset_peak()
        peak, self._highest = self._highest, 0
        return peak


class Counting(nn.Module):
    """A wide hidden layer, and one parameter per sample that counts how often the sample was trained.

    The counting parameters add zero to the loss and have a gradient of one, so SGD counts in the parameters themselves.
    ``in_forward`` is called in the middle of each forward.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Parameter(torch.randn(WIDTH, RANK) / RANK)
        self.right = nn.Parameter(torch.randn(RANK, FEATURES) / FEATURES**0.5)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.counts = nn.Parameter(torch.zeros(num_samples))
        self.in_forward: Callable[[], None] = lambda: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(inputs @ (self.left @ self.right).T)
        self.in_forward()
        return self.last(hidden)

    def times_trained(self) -> torch.Tensor:
        """Return how often each sample was trained, read from the parameters."""
        return self.counts.detach() * (-EFFECTIVE_BATCH / RATE)

    def weights(self) -> torch.Tensor:
        return torch.cat([self.left.flatten(), self.right.flatten(), self.last.weight.flatten()]).detach()


def counted_loss(model: Counting, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets, indices = batch
    counts = model.counts[indices]
    return (cross_entropy(model(inputs), targets, reduction="none") + counts - counts.detach()).mean()


@dataclass(frozen=True)
class Memory:
    """One run under a limit that falls in mid-step, and the same run under one that stays."""

    falls_in: int
    """The step in which the limit halves; it is back after step ``returns_after``."""
    returns_after: int
    micro_batches: list[int]
    peaks: list[int]
    """Bytes, of the attempt that was kept."""
    failures: list[tuple[int, int]]
    """Step and peak bytes of each attempt that ran out of memory."""
    num_samples: int
    times: tuple[float, float]
    """How often the samples were trained: the least and the most."""
    weights_differ: float
    """Distance of the weights from those of the run whose limit stays, divided by the distance that it trained them."""

    def limit(self, step: int) -> int:
        """Return the limit at the end of a step, in bytes."""
        return LIMIT // 2 if self.falls_in <= step <= self.returns_after else LIMIT


def count(steps: int, falls_in: int | None, returns_after: int) -> tuple[Counting, list[Any], list[int], list[Any]]:
    """Train one epoch; return the model, the reports, the peaks of the steps, and the attempts that failed."""
    num_samples = steps * EFFECTIVE_BATCH
    model = Counting(num_samples)
    torch.manual_seed(1)
    data = (
        torch.randn(num_samples, FEATURES),
        torch.randint(0, CLASSES, (num_samples,)),
        torch.arange(num_samples),
    )
    reports: list[StepReport] = []
    peaks: list[int] = []
    failures: list[tuple[int, int]] = []
    with Device(LIMIT) as device, manual_clock() as clock:

        def training_step(model: Counting, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            clock.advance(SECONDS_PER_MICRO_BATCH + SECONDS_PER_SAMPLE * len(batch[0]))
            return counted_loss(model, batch)

        def fall() -> None:
            device.limit = LIMIT // 2
            model.in_forward = lambda: None

        def follow(record: object) -> None:
            if isinstance(record, OutOfMemory):
                failures.append((record.step, device.take_peak()))
            if isinstance(record, StepReport):
                reports.append(record)
                peaks.append(device.take_peak())
                if falls_in is not None and record.step == falls_in - 1:
                    model.in_forward = fall
                if record.step == returns_after:
                    device.limit = LIMIT

        autoaccum.fit(
            model,
            data,
            effective_batch=EFFECTIVE_BATCH,
            epochs=1,
            training_step=training_step,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            device="cpu",
            callbacks=[follow],
            progress=False,
            cache=False,
        )
    return model, reports, peaks, failures


def memory(steps: int) -> Memory:
    """Train under a limit that halves in mid-step and comes back.

    Raises:
        AssertionError: a sample was not trained exactly once, no step ran out of memory and was replayed, or a step
            passed the limit.
    """
    falls_in, returns_after = steps // 3 + 1, 2 * steps // 3
    start = Counting(1).weights()
    model, reports, peaks, failures = count(steps, falls_in, returns_after)
    still, *_ = count(steps, None, returns_after)
    times = model.times_trained()
    found = Memory(
        falls_in,
        returns_after,
        [max(report.micro_batches) for report in reports],
        peaks,
        failures,
        times.numel(),
        (float(times.min()), float(times.max())),
        float((model.weights() - still.weights()).norm() / (still.weights() - start).norm()),
    )
    assert len(reports) == steps
    assert all(report.effective_batch == sum(report.micro_batches) == EFFECTIVE_BATCH for report in reports)
    assert (times - 1).abs().max() < 1e-3, f"samples were trained {found.times} times"
    assert failures, "no step ran out of memory"
    assert {step for step, _ in failures} == {falls_in}
    assert reports[falls_in - 1].replays == len(failures)
    assert all(peak <= found.limit(step) for step, peak in enumerate(peaks, 1))
    return found


@dataclass(frozen=True)
class Numbers:
    trainers: Trainers
    memory: Memory


def numbers(*, quick: bool = False) -> Numbers:
    """Return all that the figure shows; see ``trainers`` and ``memory`` for what is asserted."""
    steps = QUICK_STEPS if quick else STEPS
    return Numbers(trainers(steps), memory(4 * steps if quick else steps))


# The figure.


@dataclass(frozen=True)
class Theme:
    """Colours, of the Okabe-Ito palette where they tell curves apart."""

    text: str
    muted: str
    rule: str
    stock: str
    ours: str
    reference: str


LIGHT = Theme("#1f2328", "#59636e", "#d1d9e0", "#c84e00", "#0072b2", "#a6b1bc")
DARK = Theme("#f0f6fc", "#9da7b1", "#3d444d", "#ff9d57", "#56b4e9", "#7d8894")
PIXELS = 100
"""Per inch: the figure is 900 wide."""
TIMES = "\N{MULTIPLICATION SIGN}"


def draw(found: Numbers, path: Path, theme: Theme) -> None:
    """Draw the panels on a transparent background."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def points(pixels: float) -> float:
        return pixels * 72 / PIXELS

    style = {
        "font.size": points(22),
        "text.color": theme.text,
        "axes.edgecolor": theme.rule,
        "axes.labelcolor": theme.muted,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "axes.linewidth": 1.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "autoaccum",
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(9, 9.2), dpi=PIXELS)
        panels = [figure.add_axes((0.085, bottom, 0.895, height)) for bottom, height in PLACES]
        _draw_losses(panels[0], found.trainers, theme, points)
        _draw_memory(panels[1], panels[2], found.memory, theme, points)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


PLACES = ((0.63, 0.265), (0.25, 0.21), (0.08, 0.135))
"""Bottom and height of the panels."""


def _title(panel: Any, title: str, subtitle: str, theme: Theme, points: Callable[[float], float]) -> None:
    place = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points", "va": "baseline"}
    panel.annotate(title, (0.012, 1), xytext=(0, points(52)), fontsize=points(27), fontweight="bold", **place)
    panel.annotate(subtitle, (0.012, 1), xytext=(0, points(18)), color=theme.muted, **place)


def _draw_losses(panel: Any, found: Trainers, theme: Theme, points: Callable[[float], float]) -> None:
    import transformers

    steps = range(1, len(found.full.losses) + 1)
    split = f"{MICRO_BATCH} {TIMES} {BATCH // MICRO_BATCH}"
    _title(
        panel,
        f"Logged loss, same model, data and batch of {BATCH}",
        f"transformers {transformers.__version__}, batch split {split}",
        theme,
        points,
    )
    panel.plot(steps, found.split.losses, color=theme.stock, lw=3.5)
    panel.plot(steps, found.full.losses, color=theme.reference, lw=9, alpha=0.8, solid_capstyle="butt")
    panel.plot(steps, found.ours.losses, color=theme.ours, lw=3)
    panel.set_ylim(0, 3.2)
    panel.set_yticks([0, 1, 2, 3])
    panel.set_xlim(0, steps[-1] + 0.5)
    panel.set_xlabel("optimizer step")
    norm = found.split.gradient_norms[0] / found.full.gradient_norms[0]
    panel.text(
        len(steps) * 0.44,
        2.25,
        f"stock Trainer: {found.split.losses[0]:.2f} at step 1,\ngradient {norm:.1f} times too large",
        color=theme.stock,
        fontweight="bold",
        linespacing=1.2,
    )
    panel.text(1, 1.2, f"AutoAccumTrainer: {found.ours.losses[0]:.2f}", color=theme.ours, fontweight="bold")
    panel.text(1, 0.87, f"= full batch, {BATCH} {TIMES} 1: {found.full.losses[0]:.2f}", color=theme.muted)


def _draw_memory(above: Any, below: Any, found: Memory, theme: Theme, points: Callable[[float], float]) -> None:
    steps = len(found.peaks)
    edges = range(steps + 1)
    _title(
        above,
        "Memory limit halves in mid-step: no sample lost",
        f"autoaccum in simulated memory: {found.num_samples:,} samples, each trained once",
        theme,
        points,
    )
    mib = [peak / 2**20 for peak in found.peaks]
    above.stairs(mib, edges, fill=True, color=theme.ours, alpha=0.3, lw=0)
    above.stairs(mib, edges, color=theme.ours, lw=2.5, baseline=None)
    limits = [LIMIT / 2**20, LIMIT / 2**21, LIMIT / 2**20]
    above.stairs(limits, [0, found.falls_in - 0.5, found.returns_after, steps], color=theme.text, lw=3, baseline=None)
    step, peak = found.failures[0]
    above.plot(step - 0.5, peak / 2**20, "X", color=theme.stock, ms=points(20), mec="none", clip_on=False, zorder=5)
    above.annotate(
        f"out of memory:\nstep {step} replayed",
        (step - 0.5, peak / 2**20),
        xytext=(points(20), points(4)),
        textcoords="offset points",
        color=theme.stock,
        fontweight="bold",
        va="bottom",
        linespacing=1.15,
    )
    above.text(0.6, LIMIT / 2**20 * 0.96, "limit", va="top", fontweight="bold")
    above.text(0.6, mib[-1] * 0.12, "peak per step, MiB", color=theme.ours, fontweight="bold")
    above.set_ylim(0, LIMIT / 2**20 * 1.06)
    above.set_yticks([0, 12, 24])
    above.set_xlim(0, steps + 0.5)
    above.tick_params(labelbottom=False)
    below.stairs(found.micro_batches, edges, color=theme.ours, lw=3.5, baseline=None)
    below.set_xlim(0, steps + 0.5)
    below.set_ylim(0, EFFECTIVE_BATCH * 1.12)
    below.set_yticks([found.micro_batches[found.falls_in - 1], EFFECTIVE_BATCH])
    below.set_xlabel("optimizer step")
    below.text(found.falls_in + 1, EFFECTIVE_BATCH * 0.5, "micro-batch size", color=theme.ours, fontweight="bold")


# The table.

HEADER = (
    "transformers",
    "optimizer",
    "trainer",
    "split",
    "loss, step 1",
    "loss, last step",
    "logged loss",
    "gradient norm, step 1",
    "steps clipped",
    "parameters",
)
NAMES = {
    "full": ("Trainer, full batch", f"{BATCH} x 1"),
    "split": ("Trainer", f"{MICRO_BATCH} x {BATCH // MICRO_BATCH}"),
    "ours": ("AutoAccumTrainer", f"{MICRO_BATCH} x {BATCH // MICRO_BATCH}"),
}


def rows(version: str, summaries: dict[str, dict[str, dict[str, float]]]) -> list[list[object]]:
    return [
        [
            version,
            {"adamw_torch": "AdamW", "sgd": "SGD"}[optimizer],
            *NAMES[name],
            f"{one['first']:.4f}",
            f"{one['last']:.4f}",
            f"{one['ratio']:.3f}",
            f"{one['norm']:.3f}",
            int(one["clipped"]),
            f"{one['parameters']:.1g}",
        ]
        for optimizer, of_trainers in summaries.items()
        for name, one in of_trainers.items()
    ]


def text(found: Memory, steps: int) -> str:
    failed = ", ".join(f"step {step} at {peak / 2**20:.1f} MiB" for step, peak in found.failures)
    before = found.micro_batches[found.falls_in - 2]
    return (
        f"The numbers of the README's figure. All trainers train the same small BERT classifier of two classes on the "
        f"same data for {steps} steps of {BATCH} samples, without dropout. They log every step. The Trainer is that of "
        f"transformers, with its default gradient clipping at {CLIP_NORM}.\n\n"
        "*Logged loss* is the mean over all steps of the loss divided by that of the full batch. *Gradient norm* is "
        "divided by that of the full batch too, before clipping. *Steps clipped* had a norm above the threshold. "
        "*Parameters* is the distance of the final parameters from those of the full batch, divided by the distance "
        "that the full batch trained them.\n\n"
        "The stock Trainer does not divide by the number of micro-batches here. It expects the loss to do so, because "
        "the model's forward takes `**kwargs`, but this loss ignores `num_items_in_batch`. So the gradient is too "
        "large, and not only the log. AdamW cancels most of a constant factor; SGD and gradient clipping do not.\n\n"
        f"Memory: {len(found.peaks)} steps of {EFFECTIVE_BATCH} samples in a simulated memory of {LIMIT // 2**20} MiB. "
        f"On a simulated clock a micro-batch takes {1000 * SECONDS_PER_MICRO_BATCH:.0f} ms plus "
        f"{1000 * SECONDS_PER_SAMPLE:.1f} ms per sample, so every machine chooses the same sizes. The limit halves in "
        f"the middle of a forward of step {found.falls_in} and is back after step "
        f"{found.returns_after}. Out of memory: {failed}, replayed. Largest micro-batch: {before} before, "
        f"{found.micro_batches[found.falls_in - 1]} while half is gone, {found.micro_batches[-1]} at the end. No step "
        f"passed its limit. Each of the {found.num_samples:,} samples has a parameter of its own that counts its "
        f"gradients: {found.times[0]:.4f} to {found.times[1]:.4f} per sample. The weights differ from "
        f"those of a run whose limit stays by {found.weights_differ:.0e} of the distance trained.\n\n"
        "![loss and memory](../../docs/readme.svg)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--also", metavar="PYTHON", action="append", default=[], help="measure its transformers too")
    parser.add_argument("--rows", action="store_true", help="print the rows of this environment as JSON, and stop")
    options = parser.parse_args()
    import transformers

    torch.set_num_threads(1)
    steps = QUICK_STEPS if options.quick else STEPS
    if options.rows:
        print(json.dumps(rows(transformers.__version__, trainers(steps).summaries)))
        return
    found = numbers(quick=options.quick)
    lines = rows(transformers.__version__, found.trainers.summaries)
    for python in options.also:
        command = [python, __file__, "--rows", *(["--quick"] if options.quick else [])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        lines += json.loads(output.splitlines()[-1])
    draw(found, PICTURES / "readme.svg", LIGHT)
    draw(found, PICTURES / "readme-dark.svg", DARK)
    write_table("readme_figure", text(found.memory, steps), HEADER, lines, threads=1)


if __name__ == "__main__":
    main()
