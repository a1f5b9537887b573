"""Writes a benchmark's table to benchmarks/results/, with what it was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

import autoaccum

COMMITTED = Path(__file__).parent / "results"
RESULTS = Path(os.environ.get("AUTOACCUM_RESULTS", COMMITTED))
"""Where tables are written: quick runs of ``run_all.py`` leave those alone that are committed."""


def write_table(
    name: str,
    text: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    threads: int | None = None,
    quiet: bool = False,
) -> str:
    """Print the table unless ``quiet``, and write it as Markdown; returns the page without its title."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)]
    page = "\n".join([text, "", *lines, "", f"Measured on {_machine(threads)}.", ""])
    if not quiet:
        print(f"# {name}\n\n{page}")
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{page}")
    return page


def _machine(threads: int | None) -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ", ".join(
        [
            f"{datetime.date.today()}: {_processor()}",
            f"{os.cpu_count()} cores ({threads or torch.get_num_threads()} threads)",
            f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "no GPU" if accelerator is None else torch.get_device_module(accelerator).get_device_name(),
            platform.system(),
            f"Python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"autoaccum {autoaccum.__version__}",
        ]
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
