"""Peak memory beside the effective batch, which must not matter, and beside the micro-batch, which the model predicts.

    python benchmarks/memory.py

On an accelerator the peaks are its allocator's. On the CPU they are counted twice: tensor by tensor in a simulated
device memory, which is exact, and as the resident set of a process of its own for each row, as a system sees it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from results import write_table

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.testing import simulated_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CharGPT, loss_fn

LENGTH, SAMPLES = 32, 16_384
EFFECTIVE_BATCHES = [16, 64, 256, 1024, 4096, 16_384]
MICRO_BATCHES = [1, 4, 16, 64, 256, 1024]


def options() -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(0, len(ALPHABET), (SAMPLES, LENGTH + 1))
    return {"model": CharGPT(), "data": (ids[:, :-1], ids[:, 1:]), "loss_fn": loss_fn}


def peak_of(effective_batch: int, micro_batch: int) -> int:
    """Bytes at the peak of one window."""
    result = autoaccum.fit(
        **options(), effective_batch=effective_batch, micro_batch=micro_batch, steps=1, progress=False
    )
    return max(report.peak_bytes for report in result.history)


def in_a_process_of_its_own(effective_batch: int, micro_batch: int) -> int:
    command = [sys.executable, __file__, "--row", str(effective_batch), str(micro_batch)]
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, nargs=2, help="print the peak bytes of one row (used by the script itself)")
    row = parser.parse_args().row
    if row:
        print(peak_of(*row))
        return
    real = torch.accelerator.is_available()

    def simulated(effective_batch: int, micro_batch: int) -> int:
        with simulated_memory("64GiB"):
            return peak_of(effective_batch, micro_batch)

    def cells(effective_batch: int, micro_batch: int) -> list[str]:
        peaks = [] if real else [simulated(effective_batch, micro_batch)]
        peaks.append(in_a_process_of_its_own(effective_batch, micro_batch))
        return [format_bytes(peak) for peak in peaks]

    if real:
        model = autoaccum.probe(**options(), max_micro_batch=1024).memory_model
    else:
        with simulated_memory("64GiB"):
            model = autoaccum.probe(**options(), max_micro_batch=64).memory_model
    assert model is not None
    header = ["device memory"] if real else ["simulated device memory", "resident set"]
    rows = [["effective batch", n, 16, *cells(n, 16), ""] for n in EFFECTIVE_BATCHES]
    rows += [["micro-batch", 2048, n, *cells(2048, n), format_bytes(model.predict(n))] for n in MICRO_BATCHES]
    write_table(
        "memory",
        f"Peak of one window of the character GPT on {LENGTH} characters. The prediction is the memory model's, from a "
        f"probe of micro-batches up to {1024 if real else 64}{'' if real else ', of the simulated memory'}.",
        ["varied", "effective batch", "micro-batch", *header, "predicted"],
        rows,
    )


if __name__ == "__main__":
    main()
