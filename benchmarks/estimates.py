"""What ``estimate`` predicts, beside what a run takes: counted on a simulated device, and as a process on a CPU.

    python benchmarks/estimates.py [--quick] [--table TABLE] [--only NAME]

On each level of saving memory the same micro-batch is estimated and trained. The first table has the bytes of tensors,
which a simulated memory counts. The second has the memory of a process of its own for each level (its largest resident
set, less what it was before there was a model): beside the bytes that were estimated, as a ratio, and as a line through
two trials, of a fourth and of half of the micro-batch, foretells it. Trials begin as a probe's, from released memory.
Each is measured twice: as glibc's heap has it, and where that gives back at once what is freed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from estimates_models import Subject, subjects
from results import write_table

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.data.batches import num_bytes
from autoaccum.errors import AutoaccumError
from autoaccum.memory.cpu import CpuMemory
from autoaccum.step.memory_saving import Saving
from autoaccum.testing import simulated_memory

COUNTED, RESIDENT = "64MiB", "128MiB"
"""Memory of the devices whose largest micro-batch is taken, in the first and in the second table."""
HEAPS: dict[str, dict[str, str]] = {"the heap as it is": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "131072"}}
"""How the C library has memory, by what is in the environment: what is mapped is given back when it is freed."""
FEWEST = 4
"""Samples of a micro-batch of which a fourth can be tried."""
STEPS = 3
"""Windows of a run: what is computed twice is compared in the first, and the last is what is looked at."""


@contextmanager
def standing_on(level: str) -> Iterator[None]:
    """Let runs begin on a level, whatever fits."""
    made, begin = Saving.__init__, Saving.begin

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.wants_begin = level != "off"

    def go(self: Any, step: int) -> Any:
        self.wants_begin = False
        self._ladder.fall(2**62, 0)
        return self._moved(step, "a benchmark stands on it")

    Saving.__init__, Saving.begin = make, go  # type: ignore[method-assign]
    try:
        yield
    finally:
        Saving.__init__, Saving.begin = made, begin  # type: ignore[method-assign]


def options_of(subject: Subject) -> dict[str, Any]:
    return {"loss_fn": subject.loss_fn, "training_step": subject.training_step}


def estimates(subject: Subject, device: str) -> dict[str, autoaccum.Estimate]:
    """Return an estimate for each level there is, of the largest micro-batch that fits on the first."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"model": subject.model(), "batch": subject.batch(4), **options_of(subject)}
    off = autoaccum.estimate(**given, device_memory=device, memory_saving="off")
    size = off.micro_batch
    given |= {"min_micro_batch": size, "max_micro_batch": size}
    least = autoaccum.estimate(**given, device_memory=device, memory_saving="checkpoint")
    found = {"off": off}
    if least.memory_saving != "off":
        found["all blocks"] = least
    return found


def trained(subject: Subject, level: str, size: int) -> autoaccum.StepReport:
    """Return the report of a settled window of two micro-batches of that size."""
    torch.manual_seed(0)
    data = subject.batch(2 * size)
    with standing_on(level):
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
    for level, estimate in found.items():
        with simulated_memory("64GiB"):
            report = trained(subject, level, estimate.micro_batch)
        # The data that windows are cut from lie on the simulated device too.
        counted = report.peak_bytes - num_bytes(subject.batch(2 * estimate.micro_batch))
        off = estimate.peak_bytes / counted - 1
        same = estimate.memory_saving == report.memory_saving
        rows.append(
            [
                name, format_bytes(estimate.parts.parameters), estimate.micro_batch,
                level if same else f"{level}: {estimate.memory_saving}, not {report.memory_saving}",
                format_bytes(estimate.peak_bytes), format_bytes(counted), f"{100 * off:+.2f} %", f"{seconds:.1f}",
            ]
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def release(memory: CpuMemory) -> None:
    """Have the process give back what it holds of nothing, as before a trial."""
    gc.collect()
    memory.release()


def resident(name: str, level: str, sizes: list[int], heap: dict[str, str]) -> list[int]:
    """Return what a process takes for each of these micro-batches, one after the other from the smallest on."""
    command = [sys.executable, __file__, "--row", name, level, *map(str, sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **heap}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: list[int] = json.loads(run.stdout.splitlines()[-1])
    return found


class Measured(NamedTuple):
    """A level of a model as processes have taken it."""

    cells: list[object]
    ratios: list[float]
    """To what was estimated, for each way to have memory."""
    offs: list[float]
    """How far what two trials foretell is off, likewise."""


def resident_rows(name: str, subject: Subject) -> list[Measured]:
    """Return the rows of one model in the second table."""
    rows: list[Measured] = []
    try:
        found = estimates(subject, RESIDENT)
    except AutoaccumError:
        return []
    for level, estimate in found.items():
        size = estimate.micro_batch
        if size < FEWEST:
            continue
        sizes = [size // 4, size // 2, size]
        row = Measured([name, size, level, format_bytes(estimate.peak_bytes)], [], [])
        for heap in HEAPS.values():
            first, second, real = resident(name, level, sizes, heap)
            # What a process takes is a line in what is counted: the two trials say which.
            slope = (second - first) / (sizes[1] - sizes[0])
            predicted = second + slope * (size - sizes[1])
            row.ratios.append(real / estimate.peak_bytes)
            row.offs.append(predicted / real - 1)
            row.cells.extend([format_bytes(real), f"{row.ratios[-1]:.2f}", f"{100 * row.offs[-1]:+.1f} %"])
        rows.append(row)
        print(*row.cells, sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", help="a model, a level and micro-batches: print what this process takes")
    parser.add_argument("--quick", action="store_true", help="three models, and no processes")
    parser.add_argument("--table", choices=["estimates", "estimates_resident"], help="one of the two")
    parser.add_argument("--only", help="part of the names of models")
    given = parser.parse_args()
    every = subjects()
    if given.row:
        name, level, *sizes = given.row
        trained(every[name], level, 2)  # which imports what there is to import
        memory, peaks = CpuMemory(), []
        release(memory)
        before = memory.used()
        for size in map(int, sizes):
            release(memory)
            memory.reset_peak()
            trained(every[name], level, size)
            peaks.append(memory.peak() - before)
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
        f"{median(errors):.2f} %, the worst {max(errors):.2f} %, of {len(errors)} levels. "
        "A line without figures could not be estimated: it names the operation that needs values. Seconds are of one "
        "estimate.",
        ["model", "parameters", "micro-batch", "computed twice", "estimated", "counted", "off by", "seconds"],
        rows,
        quiet=True,
    )


def write_resident(every: dict[str, Subject]) -> None:
    """Write the second table, after each model: what has been measured stays."""
    measured: list[Measured] = []
    for name, subject in every.items():
        measured += resident_rows(name, subject)
        if measured:
            write_resident_rows(measured, len({row.cells[0] for row in measured}))


def write_resident_rows(measured: list[Measured], num_models: int) -> None:
    """Write the second table with these rows."""
    said = []
    for place, heap in enumerate(HEAPS):
        ratios = [row.ratios[place] for row in measured]
        offs = [abs(100 * row.offs[place]) for row in measured]
        said.append(
            f"{heap}, {min(ratios):.2f} to {max(ratios):.2f} times what was estimated, and {median(offs):.1f} % off in "
            f"the median and {max(offs):.1f} % at worst as two trials foretell it"
        )
    write_table(
        "estimates_resident",
        f"The memory of a process beside what was estimated for it, at the largest micro-batch that was estimated to "
        f"fit in {RESIDENT}, of {num_models} models on {len(measured)} levels: its largest resident set, less what it "
        f"was before there was a model. With {said[0]}; with {said[1]}. Mapped: with `MALLOC_MMAP_THRESHOLD_=131072` "
        "in the environment glibc gives back at once what is freed, and leaves no fragments. The trials are of a "
        "fourth and of half of the micro-batch, in the same process before it.",
        [
            "model", "micro-batch", "computed twice", "estimated",
            *(f"{what}{mode}" for mode in ("", ", mapped") for what in ("process", "ratio", "two trials are off by")),
        ],
        [row.cells for row in measured],
        quiet=True,
        threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
