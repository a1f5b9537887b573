"""Seconds from a cold start to the same number of samples trained, below a memory limit: autoaccum, peers, and by hand.

    python benchmarks/time_to_train.py
    python benchmarks/time_to_train.py --quick                          # a few samples, one round
    python benchmarks/time_to_train.py --only autoaccum --only power    # and by hand, which the ratios need

Each run is a process of its own. Its clock starts when the model and the data are there and everything is imported (it
has trained a toy first); searches are in the time. Rounds alternate the contestants. By hand is the loop of somebody
who knows the best micro-batch: that of all divisors of the effective batch which was fastest in a short run that is not
counted. Two limits: a simulated device memory, and RLIMIT_DATA, below which PyTorch's own allocator fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_models
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
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.events import OutOfMemory, Planned

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CharGPT
from char_gpt import loss_fn as gpt_loss

MIB = 2**20
LENGTH = 64
INPUTS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One model at one size of run."""

    make_task: Callable[[int], Task]
    samples: int
    """In the data; a multiple of the effective batch."""
    epochs: int
    effective_batch: int
    room: int
    """Samples in a micro-batch that just fits: no divisor, and at most half of the data."""


def small_gpt(samples: int) -> Task:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return CharGPT(dropout=0.0)

    ids = torch.randint(0, len(ALPHABET), (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Task(make_model=make_model, inputs=ids[:, :-1], targets=ids[:, 1:], loss_fn=gpt_loss)


def wide_mlp(samples: int) -> Task:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, INPUTS, generator=generator)
    targets = torch.randint(0, 10, (samples,), generator=generator)
    return Task(make_model=make_model, inputs=inputs, targets=targets, loss_fn=cross_entropy)


def toy(samples: int = 8, device: str = "cpu") -> Task:
    return Task(
        device=device,
        make_model=lambda: nn.Linear(4, 2),
        inputs=torch.randn(samples, 4),
        targets=torch.randint(0, 2, (samples,)),
        loss_fn=cross_entropy,
    )


SETTINGS = {
    "small GPT": Setting(make_task=small_gpt, samples=2048, epochs=7, effective_batch=256, room=100),
    "wide MLP": Setting(make_task=wide_mlp, samples=4096, epochs=64, effective_batch=4096, room=1800),
}
QUICK = {
    "small GPT": Setting(make_task=small_gpt, samples=128, epochs=1, effective_batch=64, room=20),
    "wide MLP": Setting(make_task=wide_mlp, samples=2048, epochs=2, effective_batch=2048, room=1000),
}


def gpt_on_device(samples: int) -> Task:
    case = gpu_models.gpt(256)
    inputs, targets = case.data(samples)
    device = str(gpu_models.device())
    return Task(make_model=case.model, inputs=inputs, targets=targets, loss_fn=case.loss_fn, device=device)


ON_DEVICE = {
    "small GPT": Setting(make_task=gpt_on_device, samples=1536, epochs=4, effective_batch=192, room=48),
    "GPT-2": Setting(make_task=gpt_on_device, samples=768, epochs=2, effective_batch=256, room=64),
}
"""For ``gpu.py``, which runs them below a fraction of an accelerator."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a contestant did."""

    micro_batch: int
    effective_batch: int
    """Samples in its optimizer steps, the first of the last run of it."""
    ooms: int
    search_end: float
    """``time.perf_counter`` when it knew its micro-batch; all but autoaccum throw away what came before."""
    searched: int = 0
    """Samples trained before that, and kept."""


def by_hand(task: Task, epochs: int, effective_batch: int, micro_batch: int) -> Outcome:
    search_end = time.perf_counter()
    model = task.make_model().to(task.device)
    optimizer = optimizer_of(model.parameters())
    for _ in range(epochs):
        for window in torch.randperm(len(task.inputs)).split(effective_batch):
            optimizer.zero_grad()
            total = torch.zeros((), device=task.device)
            for indices in window.split(micro_batch):
                inputs, targets = task.inputs[indices].to(task.device), task.targets[indices].to(task.device)
                loss = task.loss_fn(model(inputs), targets) * (len(indices) / len(window))
                loss.backward()
                total += loss.detach()
            optimizer.step()
            total.item()
    return Outcome(micro_batch=micro_batch, effective_batch=effective_batch, ooms=0, search_end=search_end)


def by_autoaccum(task: Task, epochs: int, effective_batch: int, _: int, **options: Any) -> Outcome:
    settled: list[float] = []

    def watch(record: object) -> None:
        if isinstance(record, Planned) and not settled:
            settled.append(time.perf_counter())

    result = autoaccum.fit(
        task.make_model(),
        (task.inputs, task.targets),
        effective_batch=effective_batch,
        loss_fn=task.loss_fn,
        optimizer=optimizer_of,
        epochs=epochs,
        device=task.device,
        progress=False,
        callbacks=[watch],
        **({"cache": False} if "cache" in inspect.signature(autoaccum.fit).parameters else {}),
        **options,
    )
    step = next((event.step for event in result.events if isinstance(event, Planned)), result.num_steps)
    return Outcome(
        micro_batch=max(result.history[-1].micro_batches),
        effective_batch=result.history[0].effective_batch,
        ooms=sum(isinstance(event, OutOfMemory) for event in result.events),
        search_end=settled[0] if settled else time.perf_counter(),
        searched=sum(report.effective_batch for report in result.history[:step]),
    )


def by_lightning(mode: str) -> Callable[[Task, int, int, int], Outcome]:
    """Its batch size finder, then the same trainer, accumulating as many of them as the effective batch holds."""

    def run(task: Task, epochs: int, effective_batch: int, _: int) -> Outcome:
        from lightning.pytorch.tuner import Tuner, batch_size_scaling

        ooms = 0
        is_oom_error = batch_size_scaling.is_oom_error

        def counted(error: BaseException) -> bool:
            nonlocal ooms
            ooms += is_oom_error(error)
            return is_oom_error(error)

        batch_size_scaling.is_oom_error = counted
        with tempfile.TemporaryDirectory() as folder:
            module = lightning_module(task, task.make_model(), 2)
            trainer = lightning_trainer(folder, task.device, max_epochs=epochs)
            found = Tuner(trainer).scale_batch_size(module, mode=mode)
            search_end = time.perf_counter()
            steps = max(1, effective_batch // found)
            trainer.accumulate_grad_batches = steps  # as its GradientAccumulationScheduler does
            trainer.fit(module)
        batch_size_scaling.is_oom_error = is_oom_error
        return Outcome(micro_batch=found, effective_batch=found * steps, ooms=ooms, search_end=search_end)

    return run


def by_accelerate(task: Task, epochs: int, effective_batch: int, _: int) -> Outcome:
    """As its guide shows: all that holds memory is made in the function that is run again."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=task.device == "cpu")
    attempts: list[int] = []
    begun = 0.0

    @find_executable_batch_size(starting_batch_size=effective_batch)
    def train(batch_size: int) -> None:
        nonlocal begun
        attempts.append(batch_size)
        begun = time.perf_counter()
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = max(1, effective_batch // batch_size)
        model = task.make_model()
        model, optimizer, loader = accelerator.prepare(
            model, optimizer_of(model.parameters()), loader_of(task, batch_size)
        )
        for _ in range(epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = task.loss_fn(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    train()
    found = attempts[-1]
    trained = found * max(1, effective_batch // found)
    return Outcome(micro_batch=found, effective_batch=trained, ooms=len(attempts) - 1, search_end=begun)


def by_transformers(task: Task, epochs: int, effective_batch: int, _: int, **options: Any) -> Outcome:
    """As its users write it: the batch that they want, and ``auto_find_batch_size``, which shrinks it."""
    attempts: list[int] = []
    begun: list[float] = []

    class Attempts(list[int]):
        def append(self, size: int) -> None:
            attempts.append(size)
            begun.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        transformers_trainer(
            task,
            task.make_model(),
            folder,
            effective_batch,
            Attempts(),
            num_train_epochs=epochs,
            auto_find_batch_size=True,
            **options,
        ).train()
    return Outcome(micro_batch=attempts[-1], effective_batch=attempts[-1], ooms=len(attempts) - 1, search_end=begun[-1])


COLUMNS = ["contestant", "seconds", "to by hand", "micro-batch", "effective", "OOMs", "search s", "samples/s"]
NOT_DONE = "not done after"
HAND = "by hand, best of all"
CONTESTANTS: dict[str, Callable[[Task, int, int, int], Outcome]] = {
    HAND: by_hand,
    "autoaccum fit": by_autoaccum,
    "Lightning power": by_lightning("power"),
    "Lightning binsearch": by_lightning("binsearch"),
    "Accelerate find_executable_batch_size": by_accelerate,
    "Transformers auto_find_batch_size": by_transformers,
}


def first_of(task: Task, samples: int) -> Task:
    """The same data in memory, of which some is read."""
    return dataclasses.replace(task, inputs=task.inputs[:samples], targets=task.targets[:samples])


@contextlib.contextmanager
def limited(kind: str, limit_bytes: int) -> Iterator[None]:
    """Below a limit: of all memory when it is simulated or a device's, beyond what is in use when it is real."""
    if kind == "simulated":
        with Device(limit_bytes):
            yield
        return
    if kind == "device":
        with gpu_models.fraction(limit_bytes / gpu_models.total_bytes()):
            yield
        return
    import resource

    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(found[1]) * 1024 + limit_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)


def timed(run: Callable[[], Outcome], kind: str, limit_bytes: int, samples: int) -> dict[str, Any]:
    """Run a contestant below a limit on so many samples; return what it took, or how it failed."""
    torch.manual_seed(0)
    try:
        with limited(kind, limit_bytes):
            started = time.perf_counter()
            outcome = run()
            ended = time.perf_counter()
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().split("\n")[0][:120]
        return {"failed": f"failed: {type(error).__name__}: {text}"}
    return {
        "seconds": ended - started,
        "micro_batch": outcome.micro_batch,
        "effective_batch": outcome.effective_batch,
        "ooms": outcome.ooms,
        "search_seconds": outcome.search_end - started,
        "rate": (samples - outcome.searched) / (ended - outcome.search_end),
    }


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """One run; what it prints on the way goes to stderr."""
    torch.set_num_threads(spec["threads"])
    silence()
    on_device = spec["kind"] == "device"
    settings = ON_DEVICE if on_device else QUICK if spec["quick"] else SETTINGS
    setting = settings[spec["model"]]
    run = CONTESTANTS[spec["contestant"]]
    run(toy(device=str(gpu_models.device()) if on_device else "cpu"), 1, 4, 2)  # imports what is lazy
    task = setting.make_task(setting.samples)
    samples, epochs = setting.samples, setting.epochs
    if spec["short"]:
        samples, epochs = setting.effective_batch, 2
        task = first_of(task, samples)
    with_all = functools.partial(run, task, epochs, setting.effective_batch, spec["micro_batch"])
    return timed(with_all, spec["kind"], spec["limit_bytes"], samples * epochs)


def in_a_process_of_its_own(spec: dict[str, Any], timeout: float, script: str = __file__) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
    command = [sys.executable, script, "--child", json.dumps(spec)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"failed: {NOT_DONE} {timeout:.0f} s"}
    if process.returncode < 0:
        return {"failed": f"failed: killed by {signal.Signals(-process.returncode).name}"}
    if process.returncode:
        lines = process.stderr.strip().split("\n")
        return {"failed": f"failed: exit {process.returncode}: {lines[-1][:120]}"}
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def limit_bytes_of(setting: Setting, kind: str) -> int:
    """What ``room`` samples take at once; of a real limit, without what is there before and with room for the heap."""
    task = setting.make_task(setting.samples)
    with Device() as device:
        by_hand(first_of(task, 2 * setting.room), 2, 2 * setting.room, setting.room)
    model_bytes = sum(p.nbytes for p in task.make_model().parameters())
    there = model_bytes + task.inputs.untyped_storage().nbytes()
    return device.peak if kind == "simulated" else device.peak - there + 64 * MIB


def best_by_hand(spec: dict[str, Any], setting: Setting, timeout: float) -> int:
    """The fastest micro-batch that a whole run survives, of all divisors of the effective batch; 0 when none does.

    Each is tried for two windows, then the fastest run whole: what fits for two windows need not fit for many.
    """
    times = {}
    smallest = max(1, setting.room // 32)  # smaller ones are slow beyond doubt
    for micro_batch in (n for n in range(smallest, setting.effective_batch + 1) if setting.effective_batch % n == 0):
        result = in_a_process_of_its_own(
            {**spec, "contestant": HAND, "micro_batch": micro_batch, "short": True}, timeout
        )
        print(f"  by hand, {micro_batch}: {result.get('seconds', result.get('failed'))}", file=sys.stderr)
        if "seconds" in result:
            times[micro_batch] = result["seconds"]
        elif times:
            break  # nor does anything larger fit
    for micro_batch in sorted(times, key=times.__getitem__):
        result = in_a_process_of_its_own({**spec, "contestant": HAND, "micro_batch": micro_batch}, timeout)
        if "seconds" in result:
            return micro_batch
    return 0


def row_of(results: list[dict[str, Any]], hand: list[dict[str, Any]]) -> list[object]:
    """Cells of one contestant: medians over the rounds that it survived."""
    good = [result for result in results if "seconds" in result]
    if not good:
        return [results[0]["failed"], *[""] * 6]
    ratios = [
        result["seconds"] / other["seconds"]
        for result, other in zip(results, hand, strict=True)
        if "seconds" in result and "seconds" in other
    ]

    def median(key: str, digits: int = 1) -> str:
        return f"{statistics.median(result[key] for result in good):.{digits}f}"

    lost = "" if len(good) == len(results) else f" ({len(results) - len(good)} of {len(results)} failed)"
    return [
        median("seconds") + lost,
        f"{statistics.median(ratios):.3f}" if ratios else "",
        median("micro_batch", 0),
        median("effective_batch", 0),
        median("ooms", 0),
        median("search_seconds", 2),
        median("rate", 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run is given up")
    parser.add_argument("--quick", action="store_true", help="only to see that it works; writes time_to_train_quick.md")
    parser.add_argument("--only", action="append", metavar="NAME", help="contestants whose name holds it")
    parser.add_argument("--model", choices=SETTINGS, action="append", help="leave the others out")
    parser.add_argument("--limit", choices=["simulated", "real"], action="append", help="leave the other out")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with contextlib.redirect_stdout(sys.stderr):
            result = child(options.child)
        print(json.dumps(result))
        return
    torch.set_num_threads(options.threads)
    names = [HAND, *(n for n in CONTESTANTS if n != HAND and _is_wanted(n, options.only))]
    rows = []
    for model in options.model or SETTINGS:
        setting = (QUICK if options.quick else SETTINGS)[model]
        for kind in options.limit or ("simulated", "real"):
            spec = {
                "model": model,
                "kind": kind,
                "limit_bytes": limit_bytes_of(setting, kind),
                "threads": options.threads,
                "quick": options.quick,
                "short": False,
                "micro_batch": 0,
            }
            label = f"{kind}, {format_bytes(spec['limit_bytes'])}{'' if kind == 'simulated' else ' more'}"
            print(f"{model}, {label}", file=sys.stderr)
            micro_batch = best_by_hand(spec, setting, options.timeout)
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for turn in range(1 if options.quick else options.rounds):
                for name in names if turn % 2 == 0 else names[::-1]:
                    run = {**spec, "contestant": name, "micro_batch": micro_batch or 1}
                    if results[name] and NOT_DONE in results[name][-1].get("failed", ""):
                        results[name].append(results[name][-1])  # it would hang again
                    else:
                        results[name].append(in_a_process_of_its_own(run, options.timeout))
                    print(f"  {name}: {results[name][-1]}", file=sys.stderr)
            rows += [[model, label, name, *row_of(results[name], results[HAND])] for name in names]
    sizes = "; ".join(
        f"{name}: {s.samples * s.epochs} samples, effective batch {s.effective_batch}"
        for name, s in (QUICK if options.quick else SETTINGS).items()
    )
    write_table(
        "time_to_train" + ("_quick" if options.quick else ""),
        f"{sizes}. AdamW, fused; float32. Medians of {1 if options.quick else options.rounds} rounds, each run a "
        "process of its own; the ratios are each round's. Search: seconds until the micro-batch was known; they are in "
        "the seconds, and what was trained until then is thrown away by all but autoaccum. Samples a second: after "
        "that. Effective: what an optimizer step got, beside what was asked for. A simulated memory slows every "
        "operation down, the same for all; copies that a peer keeps on the host count, for the host is the device.",
        ["model", "limit", *COLUMNS],
        rows,
        threads=options.threads,
    )


def _is_wanted(name: str, only: list[str] | None) -> bool:
    return not only or any(text.lower() in name.lower() for text in only)


if __name__ == "__main__":
    main()
