"""What finding the largest micro-batch costs, and how near it comes: autoaccum and its peers on a simulated memory.

    python benchmarks/search.py
    python benchmarks/search.py --quick                     # two limits, a small window
    python benchmarks/search.py --only probe --only power   # those whose names hold one of the texts

The truth needs no finder. For each of them the device gets the bytes half way between the peaks of the finder's own
procedure, run once with ``n`` samples and once with ``n + 1``; run again on that device, the one must fit and the other
not, or the row says that the truth is not known. A hook on the model counts what goes forward, a hook on optimizers
their steps, and the memory the errors it raises.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peers import (
    Device,
    Task,
    lightning_module,
    lightning_trainer,
    loader_of,
    optimizer_of,
    silence,
    transformers_trainer,
)
from results import write_table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

import autoaccum
from autoaccum.errors import NothingFitsError
from autoaccum.events import OutOfMemory, Planned

LIMITS = [1, 3, 7, 100, 500, 1000, 4097, 10_000]
CEILING = 16_384
"""The largest size that a finder may consider, and the effective batch of ``fit``."""
MOST_PASSES = 256
"""No window of ``fit`` has more micro-batches than this at the truth: below it is smaller, or it would take minutes."""
POSITIONS, WIDTH = 64, 64


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # (B, POSITIONS, 3), (B,)
    return cross_entropy(logits.mean(1), targets)


def make_task(samples: int) -> Task:
    """An MLP at each of 64 positions: all of it takes less than one sample does, and so do the copies of a finder.

    A finder may keep them on the host, where a device has none of it; here the host is the device.
    """

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, POSITIONS, 2, generator=generator)
    targets = torch.randint(0, 3, (samples,), generator=generator)
    return Task(make_model=make_model, inputs=inputs, targets=targets, loss_fn=mean_cross_entropy, shuffle=False)


@dataclass(kw_only=True, slots=True)
class Count:
    """What went forward through the models it is attached to."""

    device: Device
    passes: int = 0
    samples: int = 0
    trials: int = 0
    """Passes larger than every pass before them that went well."""
    _largest: int = 0
    _last: tuple[int, int] = field(default=(0, 0))

    def attach(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(self._saw)
        return model

    def _saw(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        size, ooms = self._last
        if self.device.ooms == ooms:
            self._largest = max(self._largest, size)
        size = len(inputs[0])
        self.passes += 1
        self.samples += size
        self.trials += size > self._largest
        self._last = size, self.device.ooms


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a finder answered, and what of its work was not thrown away."""

    size: int
    passes: int = 0
    samples: int = 0
    steps: int = 0
    reason: str = ""
    """Why no larger, where it says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finder:
    name: str
    once: Callable[[Task, int, int], bool]
    """(task, samples, ceiling) -> whether it fits: the procedure by which the finder judges one size."""
    find: Callable[[Task, Count, int], Found]
    """(task, count, ceiling) -> the answer."""


def train_steps(task: Task, model: nn.Module, batch_size: int, steps: int) -> None:
    """The loop that a person would hand to ``find_executable_batch_size``."""
    optimizer = optimizer_of(model.parameters())
    loader = loader_of(task, batch_size)
    for _, (inputs, targets) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        task.loss_fn(model(inputs), targets).backward()
        optimizer.step()


def as_probe(task: Task, size: int, _: int) -> bool:
    """One forward and backward beside gradients and the optimizer's state; nothing of autoaccum in it."""
    model = task.make_model()
    optimizer = optimizer_of(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    indices = torch.arange(size)
    task.loss_fn(model(task.inputs[indices]), task.targets[indices]).backward()
    return True


def probe(task: Task, count: Count, ceiling: int) -> Found:
    report = autoaccum.probe(
        count.attach(task.make_model()),
        (task.inputs, task.targets),
        loss_fn=task.loss_fn,
        optimizer=optimizer_of,
        max_micro_batch=ceiling,
        headroom=0,
        device="cpu",
    )
    return Found(size=report.max_micro_batch)


def run_fit(task: Task, model: nn.Module, ceiling: int, micro_batch: Any, callback: Any) -> autoaccum.FitResult:
    return autoaccum.fit(
        model,
        (task.inputs, task.targets),
        effective_batch=ceiling,
        micro_batch=micro_batch,
        loss_fn=task.loss_fn,
        optimizer=optimizer_of,
        steps=1 if micro_batch != "auto" else 60,
        shuffle=task.shuffle,
        headroom=0,
        device="cpu",
        progress=False,
        cache=False,
        verify=False,  # what it measures of itself takes memory of its own, where there is any
        callbacks=[callback],
    )


def as_fit(task: Task, size: int, ceiling: int) -> bool:
    """A window of micro-batches of this size. The odd one comes first: it is the one without gradients in memory."""
    odd = ceiling % size or size
    sizes = (odd, *[size] * ((ceiling - odd) // size))
    run_fit(task, task.make_model(), ceiling, [sizes], refuse)
    return True


class NotFittingError(Exception):
    """A window ran out of memory whose sizes were told."""


def refuse(record: object) -> None:
    if isinstance(record, OutOfMemory):
        raise NotFittingError


def fit(task: Task, count: Count, ceiling: int) -> Found:
    def stop_when_settled(record: object) -> None:
        if isinstance(record, Planned):
            raise autoaccum.StopTraining

    result = run_fit(task, count.attach(task.make_model()), ceiling, "auto", stop_when_settled)
    sizes = [size for report in result.history for size in report.micro_batches]
    reason = next(
        (event.reason for event in result.events if isinstance(event, Planned)), "not settled after 60 windows"
    )
    return Found(size=max(sizes), passes=len(sizes), samples=sum(sizes), steps=result.num_steps, reason=reason)


def as_lightning(task: Task, size: int, _: int) -> bool:
    """Three steps of its trainer, as many as a trial of its finder has."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning_trainer(folder, max_steps=3, max_epochs=-1)
        trainer.fit(lightning_module(task, task.make_model(), size))
    return True


def lightning(mode: str) -> Callable[[Task, Count, int], Found]:
    def find(task: Task, count: Count, ceiling: int) -> Found:
        from lightning.pytorch.tuner import Tuner

        with tempfile.TemporaryDirectory() as folder:
            trainer = lightning_trainer(folder, max_epochs=-1)
            module = lightning_module(task, count.attach(task.make_model()), 2)
            size = Tuner(trainer).scale_batch_size(module, mode=mode, margin=0.0, max_val=ceiling)
        assert size is not None
        return Found(size=size)

    return find


def as_accelerate(task: Task, size: int, _: int) -> bool:
    train_steps(task, task.make_model(), size, 2)
    return True


def accelerate(task: Task, count: Count, ceiling: int) -> Found:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=ceiling)
    def train(batch_size: int) -> int:
        train_steps(task, count.attach(task.make_model()), batch_size, 2)
        return batch_size

    size = train()
    return Found(size=size, passes=2, samples=2 * size, steps=2)


def as_transformers(task: Task, size: int, _: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        transformers_trainer(task, task.make_model(), folder, size, [], max_steps=2).train()
    return True


def transformers(task: Task, count: Count, ceiling: int) -> Found:
    attempts: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        model = count.attach(task.make_model())
        transformers_trainer(task, model, folder, ceiling, attempts, max_steps=2, auto_find_batch_size=True).train()
    return Found(size=attempts[-1], passes=2, samples=2 * attempts[-1], steps=2)


FINDERS = [
    Finder(name="autoaccum probe", once=as_probe, find=probe),
    Finder(name="autoaccum fit", once=as_fit, find=fit),
    Finder(name="Lightning power", once=as_lightning, find=lightning("power")),
    Finder(name="Lightning binsearch", once=as_lightning, find=lightning("binsearch")),
    Finder(name="Accelerate find_executable_batch_size", once=as_accelerate, find=accelerate),
    Finder(name="Transformers auto_find_batch_size", once=as_transformers, find=transformers),
]


def limit_for(finder: Finder, size: int, ceiling: int, samples: int) -> tuple[int, bool]:
    """(bytes at which ``size`` is the largest that fits, whether it is so)."""

    def fits(tried: int, limit_bytes: int) -> tuple[bool, int]:
        gc.collect()
        try:
            with Device(limit_bytes) as device:
                fitted = finder.once(make_task(samples), tried, ceiling)
        except (torch.OutOfMemoryError, NothingFitsError, NotFittingError):
            fitted = False
        return fitted, device.peak

    limit_bytes = sum(fits(n, 2**40)[1] for n in (size, size + 1)) // 2
    return limit_bytes, fits(size, limit_bytes)[0] and not fits(size + 1, limit_bytes)[0]


def measure(finder: Finder, size: int, ceiling: int, samples: int) -> dict[str, Any]:
    """One row, by name of column."""
    row: dict[str, Any] = {"finder": finder.name, "true": size}
    window = min(ceiling, MOST_PASSES * size)
    if finder.find is fit:
        ceiling = window
    steps = 0

    def stepped(*_: object) -> None:
        nonlocal steps
        steps += 1

    started = time.perf_counter()
    try:
        limit_bytes, known = limit_for(finder, size, ceiling, samples)
        if not known:
            return {**row, "found": "the truth is not known"}
        gc.collect()
        handle = register_optimizer_step_post_hook(stepped)
        task = make_task(samples)
        device = Device(limit_bytes)
        count = Count(device=device)
        try:
            with device:
                found = finder.find(task, count, ceiling)
        finally:
            handle.remove()
            row |= {"trials": count.trials, "OOMs": device.ooms}
    except Exception as error:  # one finder's failure is its result
        text = str(error).split("\n")[0][:100]
        return {**row, "found": f"failed: {type(error).__name__}: {text}"}
    finally:
        print(f"{finder.name}, {size}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return {
        **row,
        "found": found.size,
        "found / true": found.size / size,
        "passes / best": math.ceil(window / found.size) / math.ceil(window / size),
        "passes thrown away": count.passes - found.passes,
        "samples thrown away": count.samples - found.samples,
        "steps thrown away": steps - found.steps,
        "why no larger": found.reason,
    }


COLUMNS = [
    "finder",
    "true",
    "found",
    "found / true",
    "passes / best",
    "trials",
    "OOMs",
    "passes thrown away",
    "samples thrown away",
    "steps thrown away",
    "why no larger",
]


def cell(value: object) -> object:
    return f"{value:.3f}" if isinstance(value, float) else value


def summary(rows: list[dict[str, Any]]) -> str:
    """A table with one line per finder."""
    header = ["finder", "answers that fit", "found / true, median", "worst of those that fit", "most trials"]
    header += ["OOMs in all", "samples thrown away in all", "steps thrown away in all"]
    lines = [header, ["---"] * len(header)]
    for name in dict.fromkeys(row["finder"] for row in rows):
        mine = [row for row in rows if row["finder"] == name]
        answers = [row["found / true"] for row in mine if "found / true" in row]
        good = [ratio for ratio in answers if ratio <= 1]
        line: list[object] = [name, f"{len(good)} of {len(mine)}"]
        line += [cell(statistics.median(answers)), cell(min(good, default=math.nan))] if answers else ["", ""]
        line.append(max(row.get("trials", 0) for row in mine))
        line += [sum(row.get(key, 0) for row in mine) for key in ("OOMs", "samples thrown away", "steps thrown away")]
        lines.append(line)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only to see that it works; writes search_quick.md")
    parser.add_argument("--only", action="append", metavar="NAME", help="finders whose name holds it")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    silence()
    limits, ceiling = ([3, 100], 1024) if options.quick else (LIMITS, CEILING)
    wanted = [f for f in FINDERS if not options.only or any(text.lower() in f.name.lower() for text in options.only)]
    rows = [measure(finder, size, ceiling, ceiling + 1) for size in limits for finder in wanted]
    write_table(
        "search" + ("_quick" if options.quick else ""),
        "An MLP on a simulated memory in which `true` samples fit, each finder by its own procedure, and no more. No "
        f"finder may use more than {ceiling} samples, the effective batch of `fit` (at most {MOST_PASSES} times the "
        "truth); none leaves headroom (`headroom=0`; Lightning's `margin=0`). Found beyond true: a size that was never "
        "tried, and does not fit. Passes / best: micro-batches that such a window takes with what was found, beside "
        "what it would take with the truth; `fit` looks for no size that saves none, and stops where larger ones are "
        "no faster. Trials: forward passes larger than all that had gone well; a batch can also run out of memory "
        "before its forward. Thrown away: what did not train the model that one goes on with. Accelerate and "
        f"Transformers begin at {ceiling}, with two steps; their answers count as trained."
        f"\n\n{summary(rows)}\n\nEach of them:",
        COLUMNS,
        [[cell(row.get(column, "")) for column in COLUMNS] for row in rows],
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
