"""A run of a million windows: what recording them costs, what memory it keeps, and how long its page takes.

    python benchmarks/records.py

The windows are simulated reports; the page is made in a process of its own, whose memory is its own too.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from results import write_table

from autoaccum.events import Finished, StepReport
from autoaccum.reporting import RecordWriter
from autoaccum.runs.records import HISTORY

REPORT = """
import resource, sys
from autoaccum.cli.app import main
code = main(["report", sys.argv[1]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        epoch=step // 10_000,
        num_samples=64 * step,
        effective_batch=64,
        micro_batches=(16, 16, 16, 16),
        loss=2 / math.log(step + 2) + 0.1 * math.sin(step),
        lr=1e-3,
        grad_norm=1.0,
        seconds=0.01,
        peak_bytes=10**9 + step % 1000,
        limit_bytes=2 * 10**9,
        replays=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=1_000_000)
    options = parser.parse_args()
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / HISTORY
        writer = RecordWriter(path)
        writer(report(1))
        before, started = process.memory_info().rss, time.perf_counter()
        for step in range(2, options.windows + 1):
            writer(report(step))
        seconds, kept = time.perf_counter() - started, process.memory_info().rss - before
        writer(Finished(step=options.windows, reason="budget"))
        writer.close()
        size = os.path.getsize(path)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", REPORT, folder], capture_output=True, text=True, check=True)
        paged = time.perf_counter() - started
        page = os.path.getsize(Path(folder) / "report.html")
    write_table(
        "records",
        f"A run of {options.windows:,} windows, as simulated reports.",
        ["", ""],
        [
            ["µs to make and write a line", f"{1e6 * seconds / options.windows:.1f}"],
            ["resident memory that it added, in MiB", f"{kept / 2**20:.1f}"],
            ["history.jsonl, in MiB", f"{size / 2**20:.0f}"],
            ["seconds until its page is there, Python's start included", f"{paged:.1f}"],
            ["most memory that took, in MiB", f"{int(done.stdout.split()[-1]) / 2**20:.0f}"],
            ["the page, in KiB", f"{page / 2**10:.0f}"],
        ],
        threads=1,
    )


if __name__ == "__main__":
    main()
