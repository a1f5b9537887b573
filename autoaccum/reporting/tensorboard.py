"""A run in TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import (
    Finished,
    MemorySaving,
    Notice,
    OutOfMemory,
    Planned,
    Record,
    Replanned,
    Resumed,
    StepReport,
    Validated,
    Waiting,
)
from autoaccum.reporting.lines import line, means_of


class TensorBoardReporter:
    """Callback that writes a scalar of each number per step, and re-plans and notices as texts.

    Steps that a resume made void are purged.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Write event files to a directory, which need not be there.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """
        # Imported here, for it needs a package that nothing else needs.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "TensorBoardReporter") from None
        self._open: Any = SummaryWriter
        self._directory = os.fspath(directory)
        self._writer = self._open(self._directory)

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StepReport):
            for tag, value in _scalars(record).items():
                if value is not None:
                    self._writer.add_scalar(tag, value, record.step)
        elif isinstance(record, Validated):
            self._writer.add_scalar("loss/validation", record.loss, record.step)
            for name, value in record.metrics.items():
                self._writer.add_scalar(f"validation/{name}", value, record.step)
        elif isinstance(record, Resumed):
            # What TensorBoard shows beyond that step is of windows that are trained again.
            self._writer.close()
            self._writer = self._open(self._directory, purge_step=record.step + 1)
        elif isinstance(record, Finished):
            self._writer.flush()  # and not closed, for a callback may be passed to a second run
        if isinstance(record, Planned | Replanned | MemorySaving | OutOfMemory | Waiting | Resumed):
            if (text := line(record)) is not None:
                self._writer.add_text("plans", text, record.step)
        elif isinstance(record, Notice):
            self._writer.add_text("notices", str(record))

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._writer.close()


def _scalars(report: StepReport) -> dict[str, float | None]:
    """Return the numbers of a window by their tags; None for one that was not asked for."""
    return {
        "loss/train": report.loss,
        "lr": report.lr,
        "batch/effective": report.effective_batch,
        "batch/micro": max(report.micro_batches),
        "samples_per_second": report.effective_batch / report.seconds if report.seconds > 0 else None,
        "memory/peak_bytes": report.peak_bytes,
        "memory/limit_bytes": report.limit_bytes,
        "gradient/norm": report.grad_norm,
        "gradient/noise_scale": report.noise_scale,
        **{f"train/{name}": value for name, value in means_of(report.outputs).items()},
    }
