"""A progress bar over samples, and a summary at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from autoaccum.events import (
    Finished,
    OutOfMemory,
    Planned,
    Record,
    Replanned,
    Started,
    StepReport,
    StepSkipped,
    Validated,
)
from autoaccum.units import format_bytes

NEWS = 1.2
"""A line tells of an effective batch that has changed by this factor since the last one."""


class ProgressBar:
    """Shows loss, samples/s, micro-batch x accumulation steps, and memory used / limit; writes to standard error."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._limit_bytes = 0
        self._peak_bytes = 0
        self._replays = 0
        self._plan: tuple[int, ...] = ()
        self._shown = 0
        self._first: StepReport | None = None
        self._last: StepReport | None = None
        self._validated: Validated | None = None
        self._started = 0.0

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StepReport):
            self._step(record)
        elif isinstance(record, Started):
            self._started = time.perf_counter()
            self._limit_bytes = record.limit_bytes
            # A file is not redrawn: there, a line now and then shows that the run is alive.
            interval = 0.1 if sys.stderr.isatty() else 10.0
            self._bar = tqdm(
                total=record.num_samples, unit=" samples", mininterval=interval, maxinterval=interval, file=sys.stderr
            )
        elif isinstance(record, Planned):
            if not self._is_news(record.sizes):
                return
            predicted = "" if record.predicted_bytes is None else f"{format_bytes(record.predicted_bytes)} predicted"
            if record.prediction_error is not None:
                predicted += f" ({record.prediction_error:.1%} off last time)"
            memory = ", ".join(filter(None, (predicted, f"limit {format_bytes(record.limit_bytes)}")))
            self._write(f"plan: {cut_text(record.sizes)}, for {record.reason}; {memory}")
        elif isinstance(record, Replanned):
            if sum(record.old) != sum(record.new) and not self._is_news(record.new):
                return
            self._plan = record.new
            self._write(f"step {record.step}: {record.reason}: {cut_text(record.old)} -> {cut_text(record.new)}")
        elif isinstance(record, Validated):
            self._validated = record
            self._write(f"epoch {record.epoch}: validation loss {record.loss:.4f}")
        elif isinstance(record, Finished):
            self._finish(record)
        elif isinstance(record, StepSkipped):
            self._write(f"step {record.step}: skipped, for {record.reason}")
        elif isinstance(record, OutOfMemory) and record.phase == "validation":  # in training a re-plan says it
            self._write(f"step {record.step}: out of memory in validation at a micro-batch of {record.micro_batch}")

    def _step(self, report: StepReport) -> None:
        self._first = self._first or report
        self._last = report
        self._peak_bytes = max(self._peak_bytes, report.peak_bytes)
        self._limit_bytes = report.limit_bytes
        self._replays += report.replays
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss={report.loss:.4f}, {cut_text(report.micro_batches)}, "
                f"{format_bytes(report.peak_bytes)} / {format_bytes(self._limit_bytes)}",
                refresh=False,
            )
            self._bar.update(report.effective_batch)

    def _is_news(self, sizes: tuple[int, ...]) -> bool:
        """Of the plan that is to be shown: it is not while a ramp goes from one effective batch to the next."""
        self._plan, samples = sizes, sum(sizes)
        if self._shown != samples and self._shown / NEWS < samples < self._shown * NEWS:
            return False
        self._shown = samples
        return True

    def close(self) -> None:
        """Leave the bar as it is, also when the run ends in an error."""
        if self._bar is not None:
            self._bar.close()

    def _finish(self, finished: Finished) -> None:
        self.close()
        if self._first is None or self._last is None:
            return
        seconds = time.perf_counter() - self._started
        samples = self._last.num_samples
        validated = "" if self._validated is None else f"; validation {self._validated.loss:.4f}"
        replays = f"{self._replays} replay{'' if self._replays == 1 else 's'}"
        self._write(
            f"{'done' if finished.reason == 'budget' else finished.reason}: {finished.step} "
            f"step{'' if finished.step == 1 else 's'}, {samples} samples in {seconds:.1f} s "
            f"({samples / seconds:.0f} samples/s)\n"
            f"loss {self._first.loss:.4f} -> {self._last.loss:.4f}{validated}\n"
            f"micro-batches {cut_text(self._plan or self._last.micro_batches)}, {replays}, "
            f"peak {format_bytes(self._peak_bytes)} of {format_bytes(self._limit_bytes)}"
        )

    @staticmethod
    def _write(text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def cut_text(sizes: tuple[int, ...]) -> str:
    """Sizes as micro-batch x accumulation steps.

    >>> cut_text((64, 64, 64)), cut_text((86, 85, 85)), cut_text((1, 2, 4, 1))
    ('64 x 3', '85-86 x 3', '1-4 x 4')
    """
    largest, smallest = max(sizes), min(sizes)
    return f"{'' if smallest == largest else f'{smallest}-'}{largest} x {len(sizes)}"
