"""What runs take below limits at which one sample does not fit plainly, beside the best of all plans and rungs by hand.

    python benchmarks/ladder.py
    python benchmarks/ladder.py --quick             # few limits, one round: only to see that it works
    python benchmarks/ladder.py --part regret       # or grid, or peers

Four models, each in eight simulated memories, half of which hold no sample plainly. The grid is each near-equal cut of
a window, with no block computed twice, every second one or all of them, in a loop by hand. Of what fits, the fastest is
what ``fit`` is measured against, once it has settled: the plan that it has chosen, both run by hand, and its windows
themselves, beside those by hand of the same minute; its cold start stands by itself. Peers train the same number of
samples from a cold start, with blocks computed twice, and with finders of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import Device, Task, compute_twice, optimizer_of, silence
from results import write_table
from time_to_train import (
    COLUMNS,
    HAND,
    Outcome,
    by_autoaccum,
    by_lightning,
    by_transformers,
    in_a_process_of_its_own,
    row_of,
    timed,
)
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.errors import NothingFitsError
from autoaccum.events import StepReport

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CharGPT
from char_gpt import loss_fn as gpt_loss

WINDOW = 12
"""Samples of a window, the effective batch."""
STEADY = 10
"""Windows that are timed of a plan that stays as it is."""
CALM = 24
"""Windows in one plan and on one rung after which a run has settled: none has more while they are compared."""
LONGEST = 200
"""Windows after which a run is given up that has not settled."""
PEERS_WINDOWS = 32
RUNGS = {"off": 0, "every 2nd": 2, "all": 1}
"""Which blocks are computed twice: each so-manieth."""
BELOW, ABOVE = (0.3, 0.5, 0.7, 0.9), (0.02, 0.2, 0.5, 1.05)
"""Limits: between what one sample takes on the lowest rung and plainly, and from there to what a whole window takes."""


class Residual(nn.Module):
    """Adds what some layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Blocks(nn.Module):
    """Blocks between what makes their input, and what reads their output."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt() -> nn.Module:
    return CharGPT(depth=6, dropout=0.0)


def conv_block() -> nn.Module:
    return Residual(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU())


def conv_net() -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Blocks(nn.Conv2d(3, 16, 3, padding=1), [conv_block() for _ in range(8)], head)


def encoder() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(6)]
    return Blocks(nn.Linear(16, 64), layers, nn.Linear(64, 1))


def deep_mlp() -> nn.Module:
    blocks = [
        Residual(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
        for _ in range(8)
    ]
    return Blocks(nn.Linear(16, 64), blocks, nn.Linear(64, 1))


def task(name: str, windows: int) -> Task:
    """Return a model with the data of so many windows."""
    generator, samples = torch.Generator().manual_seed(1), windows * WINDOW
    make = {
        "GPT": lambda: CharGPT(depth=6, dropout=0.0),
        "conv net": conv_net,
        "encoder": encoder,
        "deep MLP": deep_mlp,
    }

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return make[name]()

    if name == "GPT":
        ids = torch.randint(0, len(ALPHABET), (samples, 65), generator=generator)
        return Task(make_model=make_model, inputs=ids[:, :-1], targets=ids[:, 1:], loss_fn=gpt_loss)
    if name == "conv net":
        inputs = torch.randn(samples, 3, 32, 32, generator=generator)
        targets = torch.randint(0, 10, (samples,), generator=generator)
        return Task(make_model=make_model, inputs=inputs, targets=targets, loss_fn=cross_entropy)
    inputs = torch.randn(samples, 64, 16, generator=generator)
    targets = torch.randn(samples, 64, 1, generator=generator)
    return Task(make_model=make_model, inputs=inputs, targets=targets, loss_fn=mse_loss)


MODELS = ("GPT", "conv net", "encoder", "deep MLP")


class Plan(NamedTuple):
    """A way to run a window."""

    micro_batch: int
    rung: str


class Fixed(NamedTuple):
    """What a plan takes that stays as it is."""

    seconds: float
    """Of a window, the median."""
    peak_bytes: int


def grid() -> list[Plan]:
    sizes = dict.fromkeys(-(-WINDOW // parts) for parts in range(1, WINDOW + 1))
    return [Plan(size, rung) for rung in RUNGS for size in sizes]


def windows_by_hand(work: Task, plan: Plan, windows: int) -> list[float]:
    """Train a plan; return the seconds of each window."""
    model = work.make_model()
    compute_twice(model, RUNGS[plan.rung])
    optimizer, seconds = optimizer_of(model.parameters()), []
    sizes = autoaccum.plan(effective_batch=WINDOW, max_micro_batch=plan.micro_batch).sizes
    for window in range(windows):
        started = time.perf_counter()
        begin = window * WINDOW % len(work.inputs)
        optimizer.zero_grad()
        total = torch.zeros(())
        for size in sizes:
            inputs, targets = work.inputs[begin : begin + size], work.targets[begin : begin + size]
            loss = work.loss_fn(model(inputs), targets) * (size / WINDOW)
            loss.backward()
            total += loss.detach()
            begin += size
        optimizer.step()
        total.item()
        seconds.append(time.perf_counter() - started)
    return seconds


def fixed(work: Task, plan: Plan, windows: int) -> Fixed:
    """Measure a plan; its first window, in which the optimizer makes its state, counts for memory alone."""
    gc.collect()
    with Device() as device:
        seconds = windows_by_hand(work, plan, 1 + windows)
    return Fixed(statistics.median(seconds[1:]), device.peak)


class Run(NamedTuple):
    """What ``fit`` came to."""

    seconds: float
    """Of a window once it has settled, the median."""
    plan: Plan
    cold_seconds: float
    """Until it had settled."""
    cold_windows: int
    """Windows that it trained in these."""


def by_fit(work: Task, limit_bytes: int) -> Run:
    """Train until it has settled."""
    ends: list[float] = []
    plans: list[Plan] = []

    def watch(record: object) -> None:
        if isinstance(record, StepReport):
            ends.append(time.perf_counter())
            rungs = (rung for rung in RUNGS if record.memory_saving.startswith(f"checkpoint, {rung} of "))
            rung = "off" if record.memory_saving == "off" else next(rungs, "all")
            plans.append(Plan(max(record.micro_batches), rung))
            if len(plans) > CALM and len(set(plans[-CALM:])) == 1:
                raise autoaccum.StopTraining

    gc.collect()
    with Device(limit_bytes):
        started = time.perf_counter()
        autoaccum.fit(
            work.make_model(),
            (work.inputs, work.targets),
            effective_batch=WINDOW,
            loss_fn=work.loss_fn,
            optimizer=optimizer_of,
            steps=LONGEST,
            shuffle=False,
            device="cpu",
            headroom=0.0,  # as the loop by hand, which leaves none
            verify=False,  # it lays copies aside on the host, which is the device here
            progress=False,
            cache=False,
            callbacks=[watch],
        )
    seconds = [after - before for before, after in zip(ends[-STEADY - 1 :], ends[-STEADY:], strict=False)]
    cold = next((n for n, plan in reversed(list(enumerate(plans))) if plan != plans[-1]), -1) + 1
    return Run(statistics.median(seconds), plans[-1], ends[cold - 1] - started if cold else 0.0, cold)


def measured_grid(name: str, rounds: int) -> dict[Plan, Fixed]:
    """Return what each plan takes: the median of rounds that take turns."""
    work, plans = task(name, 2), grid()
    found: dict[Plan, list[Fixed]] = {plan: [] for plan in plans}
    for turn in range(rounds):
        for plan in plans if turn % 2 == 0 else plans[::-1]:
            found[plan].append(fixed(work, plan, 2))
    return {
        plan: Fixed(statistics.median(one.seconds for one in of), max(one.peak_bytes for one in of))
        for plan, of in found.items()
    }


def limits(known: dict[Plan, Fixed]) -> list[int]:
    least, plain, most = (known[plan].peak_bytes for plan in (Plan(1, "all"), Plan(1, "off"), Plan(WINDOW, "off")))
    below = [least + share * (plain - least) for share in BELOW]
    return [int(limit) for limit in (*below, *(plain + share * (most - plain) for share in ABOVE))]


def best_within(known: dict[Plan, Fixed], limit_bytes: int) -> Plan:
    fitting = [plan for plan, of in known.items() if of.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda plan: known[plan].seconds)


REGRET = [
    "model", "limit", "plainly", "best by hand", "its ms", "fit", "its choice by hand", "ms", "its windows",
    "windows until settled", "seconds until then",
]  # fmt: skip


class Regret(NamedTuple):
    """How far ``fit`` is behind, at one limit."""

    choice: float
    """What the plan that it has chosen takes by hand, beside the best."""
    windows: float
    """What its own windows take, beside those of the best by hand."""


def regret_rows(
    name: str, known: dict[Plan, Fixed], only: Sequence[int], rounds: int
) -> tuple[list[Any], list[Regret]]:
    work, rows, regrets = task(name, 2), [], []
    for limit_bytes in only:
        best = best_within(known, limit_bytes)
        fitting = [plan for plan, of in known.items() if of.peak_bytes <= limit_bytes]
        plainly = [plan.micro_batch for plan in fitting if plan.rung == "off"]
        cells = [name, format_bytes(limit_bytes), max(plainly, default="no sample"), f"{best.micro_batch}, {best.rung}"]
        hand: list[float] = []
        ours: list[Run] = []
        try:
            for turn in range(rounds):
                runs = [
                    lambda: hand.append(fixed(work, best, STEADY).seconds),  # noqa: B023
                    lambda: ours.append(by_fit(work, limit_bytes)),  # noqa: B023
                ]
                for run in runs[:: 1 - 2 * (turn % 2)]:
                    run()
        except NothingFitsError:  # by hand nothing is kept by which a window could be rolled back
            rows.append([*cells, "", "does not fit", *[""] * 5])
            continue
        last = sorted(ours, key=lambda run: known[run.plan].seconds)[rounds // 2]
        windows = statistics.median(run.seconds / seconds for run, seconds in zip(ours, hand, strict=True))
        regrets.append(Regret(known[last.plan].seconds / known[best].seconds, windows))
        rows.append(
            [
                *cells,
                f"{statistics.median(hand) * 1e3:.1f}",
                f"{last.plan.micro_batch}, {last.plan.rung}",
                f"{regrets[-1].choice:.3f}",
                f"{last.seconds * 1e3:.1f}",
                f"{windows:.3f}",
                last.cold_windows,
                f"{statistics.median(run.cold_seconds for run in ours):.2f}",
            ]
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    return rows, regrets


GRID = ["model", "micro-batch", "ms", "peak", "larger, with blocks computed twice", "its ms", "its peak", "ratio"]


def grid_rows(name: str, known: dict[Plan, Fixed]) -> tuple[list[Any], list[float]]:
    """Set each plan that computes nothing twice beside the fastest larger one that does, in no more memory."""
    rows, ratios = [], []
    for plan, of in known.items():
        if plan.rung != "off":
            continue
        cells: list[object] = [name, plan.micro_batch, f"{of.seconds * 1e3:.1f}", format_bytes(of.peak_bytes)]
        larger = {
            other: found
            for other, found in known.items()
            if other.rung != "off" and other.micro_batch > plan.micro_batch and found.peak_bytes <= of.peak_bytes
        }
        if not larger:
            rows.append([*cells, "none", "", "", ""])
            continue
        best = min(larger, key=lambda other: larger[other].seconds)
        ratios.append(larger[best].seconds / of.seconds)
        rows.append(
            [
                *cells,
                f"{best.micro_batch}, {best.rung}",
                f"{larger[best].seconds * 1e3:.1f}",
                format_bytes(larger[best].peak_bytes),
                f"{ratios[-1]:.3f}",
            ]
        )
    return rows, ratios


# Peers, each run a process of its own.


def by_hand(plan: Plan, work: Task, epochs: int, *_: int) -> Outcome:
    search_end = time.perf_counter()
    windows_by_hand(work, plan, epochs * len(work.inputs) // WINDOW)
    return Outcome(micro_batch=plan.micro_batch, effective_batch=WINDOW, ooms=0, search_end=search_end)


def twice(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Let a contestant train a model that computes its blocks twice."""

    def run_twice(work: Task, *rest: Any) -> Outcome:
        def make_model() -> nn.Module:
            model = work.make_model()
            compute_twice(model)
            return model

        return run(Task(make_model=make_model, inputs=work.inputs, targets=work.targets, loss_fn=work.loss_fn), *rest)

    return run_twice


PEERS: dict[str, Callable[..., Outcome]] = {
    "autoaccum fit": by_autoaccum,
    # As near to the limit as the others go; and told, as they are, to compute blocks twice.
    "autoaccum fit, headroom=0": functools.partial(by_autoaccum, headroom=0.0),
    "autoaccum fit, memory_saving=checkpoint, headroom=0": functools.partial(
        by_autoaccum, memory_saving="checkpoint", headroom=0.0
    ),
    "Transformers gradient_checkpointing, auto_find_batch_size": functools.partial(
        by_transformers, activation_checkpointing=True
    ),
    "Lightning power, a model that checkpoints": twice(by_lightning("power")),
    "Lightning binsearch, a model that checkpoints": twice(by_lightning("binsearch")),
}


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """One run of a contestant; what it prints on the way goes to stderr."""
    torch.set_num_threads(spec["threads"])
    silence()
    plan = Plan(*spec["plan"])
    run = functools.partial(by_hand, plan) if spec["contestant"] == HAND else PEERS[spec["contestant"]]
    run(task("deep MLP", 1), 1, 4, 2)  # imports what is lazy
    work = task(spec["model"], spec["windows"])
    with_all = functools.partial(run, work, 1, WINDOW, plan.micro_batch)
    return timed(with_all, "simulated", spec["limit_bytes"], len(work.inputs))


def data_bytes(work: Task) -> int:
    storages = (part.untyped_storage() for part in (work.inputs, work.targets))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peers_rows(name: str, known: dict[Plan, Fixed], windows: int, rounds: int, threads: int) -> list[Any]:
    limit_bytes = limits(known)[2]
    best = best_within(known, limit_bytes)
    # The data count too, where the host is the device: of a few windows when the grid was measured, now of all.
    more = data_bytes(task(name, windows)) - data_bytes(task(name, 2))
    spec = {
        "model": name, "windows": windows, "limit_bytes": limit_bytes + more, "plan": best, "threads": threads
    }  # fmt: skip
    names = [HAND, *PEERS]
    results: dict[str, list[dict[str, Any]]] = {contestant: [] for contestant in names}
    for turn in range(rounds):
        for contestant in names if turn % 2 == 0 else names[::-1]:
            found = in_a_process_of_its_own({**spec, "contestant": contestant}, 300, __file__)
            results[contestant].append(found)
            print(name, contestant, found, file=sys.stderr, flush=True)
    label = format_bytes(limit_bytes)
    return [[name, label, contestant, *row_of(results[contestant], results[HAND])] for contestant in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only to see that it works; tables end in _quick")
    parser.add_argument("--model", choices=MODELS, action="append", help="leave the others out")
    parser.add_argument("--part", choices=["regret", "grid", "peers"], action="append", help="leave the others out")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with contextlib.redirect_stdout(sys.stderr):
            result = child(options.child)
        print(json.dumps(result))
        return
    torch.set_num_threads(options.threads)
    rounds, suffix = (1, "_quick") if options.quick else (options.rounds, "")
    parts, models = options.part or ["regret", "grid", "peers"], options.model or MODELS[: 1 if options.quick else None]
    known = {name: measured_grid(name, rounds) for name in models}
    about = f"Windows of {WINDOW} samples, AdamW, float32, simulated memory, which slows all operations alike. "
    about += f"Medians of {rounds} rounds that take turns."
    if "grid" in parts:
        found = {name: grid_rows(name, known[name]) for name in models}
        ratios = [ratio for _, of in found.values() for ratio in of]
        faster = f"faster in {sum(ratio < 0.98 for ratio in ratios)} of {len(ratios)} cases by more than 2 %"
        text = (
            f"When a larger micro-batch whose blocks are computed twice beats a smaller one without: {faster}. {about}"
        )
        write_table(f"ladder_grid{suffix}", text, GRID, [row for rows, _ in found.values() for row in rows], threads=1)
    if "regret" in parts:
        of = {name: limits(known[name])[:: 4 if options.quick else 1] for name in models}
        regrets = {name: regret_rows(name, known[name], of[name], rounds) for name in models}
        found = [regret for _, of_model in regrets.values() for regret in of_model]

        def mean_and_worst(ratios: list[float]) -> str:
            return f"mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f}"

        by_hand = mean_and_worst([regret.choice for regret in found])
        own = mean_and_worst([regret.windows for regret in found])
        text = f"What `fit` has settled on beside the fastest of {len(grid())} plans by hand that fit. "
        text += f"Its choice, both by hand: {by_hand}. Its windows, with all that it does in them: {own}. {about} "
        text += "Plainly: the largest micro-batch that fits with nothing computed twice."
        rows = [row for of_model, _ in regrets.values() for row in of_model]
        write_table(f"ladder{suffix}", text, REGRET, rows, threads=options.threads)
    if "peers" in parts:
        windows = 4 if options.quick else PEERS_WINDOWS
        rows = [row for name in models[:2] for row in peers_rows(name, known[name], windows, rounds, options.threads)]
        text = f"Seconds from a cold start to {windows * WINDOW} samples, at a limit that holds no sample plainly. "
        text += f"{about} Each run is a process of its own. Effective: what an optimizer step got."
        write_table(f"ladder_peers{suffix}", text, ["model", "limit", *COLUMNS], rows, threads=options.threads)


if __name__ == "__main__":
    main()
