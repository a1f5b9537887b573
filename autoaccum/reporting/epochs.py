"""A run in a line per epoch, for logs of jobs, in which a bar would be noise."""

from __future__ import annotations

import sys

from autoaccum.events import Finished, Record, Started, StepReport, Validated
from autoaccum.reporting.lines import cut_text, metrics_text


class EpochLines:
    """Callback that prints a line per epoch: its loss, what was validated, samples/s, micro-batch x steps.

    It writes to standard error, as the progress bar does; of several ranks the first alone.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Forget the epoch before."""
        self._last: StepReport | None = None  # of the epoch that goes on; None before its first window
        self._validated: Validated | None = None
        # Sums over its windows: of losses, each as often as it has samples, of samples and of seconds.
        self._loss, self._samples, self._seconds = 0.0, 0, 0.0

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StepReport):
            # Nothing says that an epoch is over: it is when another one has begun, and was validated by then.
            if self._last is not None and record.epoch != self._last.epoch:
                self._tell(self._last)
            self._last = record
            self._loss += record.loss * record.effective_batch
            self._samples += record.effective_batch
            self._seconds += record.seconds
        elif isinstance(record, Validated):
            self._validated = record
        elif isinstance(record, Finished) and self._last is not None:
            self._tell(self._last)
        elif isinstance(record, Started):
            self._begin()

    def _tell(self, last: StepReport) -> None:
        """Print the line of the epoch that ends with that window, and begin the next one."""
        from autoaccum.ranks.group import speaks  # not at the top: it takes torch with it

        parts = [f"epoch {last.epoch}: loss {self._loss / self._samples:.4f}"]
        if self._validated is not None:
            parts.append(f"validation loss {self._validated.loss:.4f}")
            if self._validated.metrics:
                parts.append(metrics_text(self._validated.metrics))
        if self._seconds > 0:
            parts.append(f"{self._samples / self._seconds:.0f} samples/s")
        parts.append(f"micro-batch {cut_text(last.micro_batches)}")
        if speaks():
            print(", ".join(parts), file=sys.stderr, flush=True)
        self._begin()
