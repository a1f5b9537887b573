"""What a search could save that began with an estimate, beside what the estimate takes.

    python benchmarks/first_jump.py [--quick] [--rounds N]

Each model trains from a cold start on a simulated device, once with its micro-batch left to ``fit``, once at the size
that an estimate has found, from the first window on. What the first takes longer is the most that any first jump could
save: no estimate is better than knowing. Runs take turns, a window is one micro-batch of that size, and medians are of
all rounds. ``estimate`` is timed beside them, on the same model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from estimates import COUNTED, options_of
from estimates_models import Subject, subjects
from results import write_table

import autoaccum
from autoaccum._units import parse_bytes
from autoaccum.data.batches import num_bytes
from autoaccum.errors import AutoaccumError
from autoaccum.testing import simulated_memory

WINDOWS = 24
"""Windows of a run: searches end within the first dozen."""


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and what it returned."""
    started = time.perf_counter()
    found = run()
    return time.perf_counter() - started, found


def estimated(subject: Subject) -> autoaccum.Estimate:
    torch.manual_seed(0)
    given: dict[str, Any] = {"model": subject.model(), "batch": subject.batch(4), **options_of(subject)}
    return autoaccum.estimate(**given, device_memory=COUNTED, memory_saving="off")


def trained(subject: Subject, size: int, micro_batch: int | str) -> autoaccum.FitResult:
    """Train for some windows of one micro-batch of that size."""
    torch.manual_seed(0)
    data = subject.batch(2 * size)
    # The data lie on the simulated device as well.
    with simulated_memory("64GiB"):
        return autoaccum.fit(
            subject.model(), data, effective_batch=size, micro_batch=micro_batch, steps=WINDOWS,
            **options_of(subject), device="cpu", verify=False, cache=False, progress=False, shuffle=False,
            memory_saving="off", memory_limit=parse_bytes(COUNTED) + num_bytes(data),
        )  # fmt: skip


def row_of(name: str, subject: Subject, rounds: int) -> list[object] | None:
    """Return the row of one model; None where it cannot be estimated."""
    try:
        size = estimated(subject).micro_batch
    except AutoaccumError:
        return None
    trained(subject, size, size)  # imports what is lazy
    cold, told, asked = [], [], []
    for _ in range(rounds):
        cold.append(timed(lambda: trained(subject, size, "auto")))
        told.append(timed(lambda: trained(subject, size, size))[0])
        asked.append(timed(lambda: estimated(subject))[0])
    saved = median(seconds for seconds, _ in cold) - median(told)
    window = median(report.seconds for report in cold[-1][1].history[WINDOWS // 2 :])
    return [
        name, size, f"{1e3 * window:.0f}", f"{median(seconds for seconds, _ in cold):.2f}", f"{median(told):.2f}",
        f"{saved:+.2f}", f"{median(asked):.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, one round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, subject in list(subjects().items())[: 2 if given.quick else None]:
        row = row_of(name, subject, 1 if given.quick else given.rounds)
        if row is not None:
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    slower = sum(float(str(row[6])) > float(str(row[5])) for row in rows)
    write_table(
        "first_jump",
        f"{WINDOWS} windows from a cold start at {COUNTED} of simulated memory, beside the same windows that are told "
        f"their micro-batch at once: the difference is all that an estimate could save. For {slower} of {len(rows)} "
        f"models the estimate takes longer than that. Medians of rounds that take turns.",
        ["model", "micro-batch", "ms a window", "cold, s", "told, s", "could save, s", "an estimate takes, s"],
        rows,
        threads=1,
    )


if __name__ == "__main__":
    main()
