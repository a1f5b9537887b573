"""What ``estimate`` predicts, beside what a run takes: counted on a simulated device, and as a process on a CPU.

    python benchmarks/estimates.py [--quick] [--table TABLE] [--only NAME]

On each rung of saving memory the same micro-batch is estimated and trained. The first table has the bytes of tensors,
which a simulated memory counts. The second has the memory of a process of its own for each rung (its largest resident
set, less what it was before there was a model): beside the bytes that were estimated, as a ratio, and as it is
predicted from two trials of a fourth and of half of the micro-batch, by a line through the estimates.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from estimates_models import Subject, subjects
from results import write_table

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.data.batches import num_bytes
from autoaccum.errors import AutoaccumError
from autoaccum.memory.procfs import number, read
from autoaccum.testing import simulated_memory
from autoaccum.window.saving import Saving

RUNGS = ("off", "every 2nd block", "all blocks")
COUNTED, RESIDENT = "64MiB", "192MiB"
"""Memory of the devices whose largest micro-batch is taken, in the first and in the second table."""
STEPS = 3
"""Windows of a run: what is computed twice is compared in the first two, and the last is what is looked at."""


@contextmanager
def standing_on(rung: str) -> Iterator[None]:
    """Let runs begin on a rung, whatever fits."""
    made, begin = Saving.__init__, Saving.begin

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.wants_begin = rung != "off"

    def go(self: Any, batch: Any, step: int) -> Any:
        self.wants_begin = False
        self._find(batch)
        for _ in self._rungs if rung == "all blocks" else self._rungs[:1]:
            self._ladder.fall(2**62, 0)
        return self._moved(step, "off", "a benchmark stands on it")

    Saving.__init__, Saving.begin = make, go  # type: ignore[method-assign]
    try:
        yield
    finally:
        Saving.__init__, Saving.begin = made, begin  # type: ignore[method-assign]


def options_of(subject: Subject) -> dict[str, Any]:
    return {"loss_fn": subject.loss_fn, "training_step": subject.training_step}


def estimates(subject: Subject, device: str) -> dict[str, autoaccum.Estimate]:
    """Return an estimate for each rung there is, of the largest micro-batch that fits on the first."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"model": subject.model(), "batch": subject.batch(4), **options_of(subject)}
    off = autoaccum.estimate(**given, device_memory=device, memory_saving="off")
    size = off.micro_batch
    given |= {"min_micro_batch": size, "max_micro_batch": size}
    least = autoaccum.estimate(**given, device_memory=device, memory_saving="checkpoint")
    found = {"off": off}
    if least.memory_saving != "off":
        limit = off.peak_bytes - 1
        between = autoaccum.estimate(**given, device_memory=limit, headroom=0.0)
        if between.memory_saving != least.memory_saving:
            found["every 2nd block"] = between
        found["all blocks"] = least
    return found


def trained(subject: Subject, rung: str, size: int) -> autoaccum.StepReport:
    """Return the report of a settled window of two micro-batches of that size."""
    torch.manual_seed(0)
    data = subject.batch(2 * size)
    with standing_on(rung):
        result = autoaccum.fit(
            subject.model(), data, effective_batch=2 * size, micro_batch=size, min_micro_batch=size, steps=STEPS,
            **options_of(subject), device="cpu", verify=False, cache=False, progress=False, shuffle=False,
        )  # fmt: skip
    return result.history[-1]


def counted_rows(name: str, subject: Subject) -> list[list[object]]:
    """Return the rows of one model in the first table."""
    started = time.perf_counter()
    try:
        found = estimates(subject, COUNTED)
    except AutoaccumError as error:
        return [[name, "", "", "", "", "", getattr(error, "operation", type(error).__name__), ""]]
    seconds = (time.perf_counter() - started) / len(found)
    rows: list[list[object]] = []
    for rung, estimate in found.items():
        with simulated_memory("64GiB"):
            report = trained(subject, rung, estimate.micro_batch)
        # The data that windows are cut from lie on the simulated device too.
        counted = report.peak_bytes - num_bytes(subject.batch(2 * estimate.micro_batch))
        off = estimate.peak_bytes / counted - 1
        same = estimate.memory_saving == report.memory_saving
        rows.append(
            [
                name, format_bytes(estimate.parts.parameters), estimate.micro_batch,
                rung if same else f"{rung}: {estimate.memory_saving}, not {report.memory_saving}",
                format_bytes(estimate.peak_bytes), format_bytes(counted), f"{100 * off:+.2f} %", f"{seconds:.1f}",
            ]
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def process_bytes() -> tuple[int, int]:
    """Return this process's resident set, and the largest that it was."""
    status = read("/proc/self/status")
    now, most = (1024 * (number(status, name) or 0) for name in ("VmRSS", "VmHWM"))
    return now, most


def resident(name: str, rung: str, sizes: list[int]) -> list[int]:
    """Return what a process takes for each of these micro-batches, one after the other from the smallest on."""
    command = [sys.executable, __file__, "--row", name, rung, *map(str, sizes)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[int] = json.loads(run.stdout.splitlines()[-1])
    return found


def resident_rows(name: str, subject: Subject) -> list[tuple[list[object], float, float]]:
    """Return the rows of one model in the second table, with the ratio and the error of each."""
    rows: list[tuple[list[object], float, float]] = []
    try:
        found = estimates(subject, RESIDENT)
    except AutoaccumError:
        return []
    for rung, estimate in found.items():
        size = estimate.micro_batch
        if size < 8:
            continue
        sizes = [size // 4, size // 2, size]
        first, second, real = resident(name, rung, sizes)
        each = estimate.parts.activations_per_sample
        held = estimate.peak_bytes - size * each
        # What a process takes is a line in what is counted: the two trials say which.
        slope = (second - first) / (each * (sizes[1] - sizes[0]))
        predicted = second + slope * (estimate.peak_bytes - (held + sizes[1] * each))
        ratio, off = real / estimate.peak_bytes, predicted / real - 1
        cells = [format_bytes(value) for value in (estimate.peak_bytes, real)]
        rows.append(
            ([name, size, rung, *cells, f"{ratio:.2f}", format_bytes(predicted), f"{100 * off:+.1f} %"], ratio, off)
        )
        print(*rows[-1][0], sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", help="a model, a rung and micro-batches: print what this process takes")
    parser.add_argument("--quick", action="store_true", help="three models, and no processes")
    parser.add_argument("--table", choices=["estimates", "estimates_resident"], help="one of the two")
    parser.add_argument("--only", help="part of the names of models")
    given = parser.parse_args()
    every = subjects()
    if given.row:
        name, rung, *sizes = given.row
        trained(every[name], rung, 2)  # which imports what there is to import
        before, peaks = process_bytes()[0], []
        for size in map(int, sizes):
            Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
            trained(every[name], rung, size)
            gc.collect()
            peaks.append(process_bytes()[1] - before)
        print(json.dumps(peaks))
        return
    every = {name: subject for name, subject in every.items() if given.only is None or given.only in name}
    if given.quick:
        every = dict(list(every.items())[:3])
    if given.table != "estimates_resident":
        write_counted(every)
    if given.table != "estimates" and not given.quick:
        write_resident(every)


def write_counted(every: dict[str, Subject]) -> None:
    """Write the first table, after each model: what has been measured stays."""
    rows: list[list[object]] = []
    for name, subject in every.items():
        rows += counted_rows(name, subject)
        write_counted_rows(rows)


def write_counted_rows(rows: list[list[object]]) -> None:
    """Write the first table with these rows."""
    errors = [abs(float(str(row[6]).split()[0])) for row in rows if row[5]]
    write_table(
        "estimates",
        f"`estimate` beside `fit` on a simulated device, in bytes of tensors, for the largest micro-batch that was "
        f"estimated to fit in {COUNTED} with nothing computed twice. The median of the errors is "
        f"{median(errors):.2f} %, the worst {max(errors):.2f} %, of {len(errors)} rungs. What has no figures cannot be "
        "estimated: the operation that needs values stands in place of the error. Seconds are those of one estimate.",
        ["model", "parameters", "micro-batch", "computed twice", "estimated", "counted", "off by", "seconds"],
        rows,
        quiet=True,
    )


def write_resident(every: dict[str, Subject]) -> None:
    """Write the second table, after each model: what has been measured stays."""
    measured: list[tuple[list[object], float, float]] = []
    for name, subject in every.items():
        measured += resident_rows(name, subject)
        write_resident_rows(measured)


def write_resident_rows(measured: list[tuple[list[object], float, float]]) -> None:
    """Write the second table with these rows."""
    ratios, offs = [ratio for _, ratio, _ in measured], [abs(100 * off) for _, _, off in measured]
    write_table(
        "estimates_resident",
        f"The memory of a process beside what was estimated for it, at the largest micro-batch that was estimated to "
        f"fit in {RESIDENT}: its largest resident set, less what it was before there was a model. As a ratio, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; and predicted from two trials, of a fourth and of half of the "
        f"micro-batch: off by {median(offs):.1f} % in the median, {max(offs):.1f} % at worst, of {len(offs)} rungs.",
        [
            "model",
            "micro-batch",
            "computed twice",
            "estimated",
            "process",
            "ratio",
            "predicted by two trials",
            "off by",
        ],
        [row for row, _, _ in measured],
        quiet=True,
    )


if __name__ == "__main__":
    main()
