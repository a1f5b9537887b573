"""A run in the log of the program that it is part of."""

from __future__ import annotations

import logging

from autoaccum._checks import number_between
from autoaccum.events import Notice, Record, Started, StepReport
from autoaccum.memory import clock
from autoaccum.reporting.lines import Narrator, state_text
from autoaccum.reporting.progress import Teller


class LoggingReporter(Teller):
    """A callback that logs a line per event, and at most every so often how far the run is.

    On several ranks only the first one logs.
    """

    def __init__(self, logger: logging.Logger | None = None, every: float = 30.0) -> None:
        """Log to ``logger``, or the one named ``autoaccum``; ``every`` is in seconds.

        Raises:
            ArgumentError: ``every`` is not a number of at least 0.
        """
        self._logger = logger or logging.getLogger("autoaccum")
        self._every = number_between("every", every, 0)
        self._narrator = Narrator()
        self._total: int | None = None
        # When the last line of progress was logged, and the samples then.
        self._mark: tuple[float, int] | None = None

    def __call__(self, record: Record) -> None:
        """Take one record."""
        text = self._narrator(record)
        if text is not None:
            self._logger.log(logging.WARNING if isinstance(record, Notice) else logging.INFO, "%s", text)
        elif isinstance(record, Started):
            self._total = record.num_samples
        elif isinstance(record, StepReport):
            self._progress(record)

    def _progress(self, report: StepReport) -> None:
        """Log how far the run is, if the last such line was long enough ago."""
        now = clock.now()
        if self._mark is None:
            # After the first window at once, for a rate over that window alone.
            self._mark = now - report.seconds, report.num_samples - report.effective_batch
        elif now - self._mark[0] < self._every:
            return
        seconds, samples = now - self._mark[0], report.num_samples - self._mark[1]
        self._mark = now, report.num_samples
        rate = f", {samples / seconds:.0f} samples/s" if seconds > 0 else ""
        of = "" if self._total is None else f" of {self._total}"
        self._logger.info("step %d: %d%s samples, %s%s", report.step, report.num_samples, of, state_text(report), rate)
