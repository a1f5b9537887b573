"""Records of runs that never were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoaccum.events import MemorySaving, Planned, Record, Shared, Started, StepReport, Validated, Verified
from autoaccum.runs.records import HISTORY, line_of

MIB = 2**20
GIB = 2**30


def started(num_samples: int | None = 20, limit_bytes: int = GIB) -> Started:
    return Started(num_steps=None, num_samples=num_samples, device="cpu", limit_bytes=limit_bytes, used_bytes=5)


def report(step: int, micro_batches: tuple[int, ...] = (4, 4), **options: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "num_samples": 8 * step,
        "effective_batch": sum(micro_batches),
        "micro_batches": micro_batches,
        "loss": 2.0 / step,
        "lr": 0.1,
        "grad_norm": None,
        "seconds": 0.1,
        "peak_bytes": step * 2**20,
        "limit_bytes": GIB,
        "replays": 0,
        **options,
    }
    return StepReport(**fields)


def planned(*sizes: int, step: int = 1, predicted_bytes: int | None = None, reason: str = "r") -> Planned:
    return Planned(
        step=step, sizes=sizes, reason=reason, predicted_bytes=predicted_bytes, prediction_error=None, limit_bytes=GIB
    )


def verified(error: float, *, step: int = 1, tensor: str | None = None) -> Verified:
    return Verified(
        step=step, hypothesis="items", error=error, tolerance=2e-5, tensor=tensor, samples=6,
        cuts=((1, 2, 3), (3, 2, 1), (2, 2, 2)), seconds=0.25,
    )  # fmt: skip


def validated(step: int, loss: float, **metrics: float) -> Validated:
    return Validated(step=step, epoch=0, loss=loss, metrics=metrics, num_samples=5, micro_batch=3, seconds=2.0)


def saving(*, step: int = 1) -> MemorySaving:
    return MemorySaving(step=step, old="off", new="every second block", reason="out of memory", blocks=2)


def shared(times: int = 1) -> Shared:
    return Shared(
        step=3, micro_batches=((3, 2), (3,)) * times, peak_bytes=(200, 100) * times, limit_bytes=(GIB, 2 * GIB) * times,
        busy_seconds=(4.0, 1.0) * times, waited_seconds=(1.0, 1.0) * times,
    )  # fmt: skip


def write(run_dir: Path, *records: Record, start: float = 1_700_000_000.0, name: str = HISTORY) -> Path:
    """A run's directory in which these were recorded, one a second."""
    run_dir.mkdir(exist_ok=True)
    with open(run_dir / name, "ab") as file:
        file.writelines(line_of(record, start + index) for index, record in enumerate(records))
    return run_dir
