"""A run in a line per epoch, for logs of jobs, in which a bar would be noise."""

from __future__ import annotations

import sys

from autoaccum.events import Event, Finished, Resumed, Started, StepReport, Validated
from autoaccum.reporting.following import Follower
from autoaccum.reporting.lines import counted, cut_text, end_text, line, metrics_text
from autoaccum.reporting.progress import Teller


class EpochLines(Follower, Teller):
    """Callback that prints a line per epoch: its loss, what was validated, samples/s, micro-batch x steps.

    It writes to standard error, as the progress bar does; of several ranks the first alone. It tells at once that a
    signal has come, and in its last line that the run has ended before its budget.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        """Forget the epoch before."""
        self._last: StepReport | None = None  # of the epoch that goes on; None before its first window
        self._full: StepReport | None = None  # the last of its largest windows: the one at its end may be short
        self._is_part = False  # whether an earlier process has trained its first windows
        self._validated: Validated | None = None
        # Sums over its windows: of losses, each as often as it has samples, of samples and of seconds.
        self._loss, self._samples, self._seconds = 0.0, 0, 0.0

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        self._forget()
        self._is_part = resumed is not None
        self._stopped_by = ""

    def _window(self, report: StepReport) -> None:
        # Nothing says that an epoch is over: it is when another one has begun, and was validated by then.
        if self._last is not None and report.epoch != self._last.epoch:
            self._tell(self._last)
        self._tell_made_up()
        if self._full is None or report.effective_batch >= self._full.effective_batch:
            self._full = report
        self._last = report
        self._loss += report.loss * report.effective_batch
        self._samples += report.effective_batch
        self._seconds += report.seconds

    def _validation(self, validated: Validated) -> None:
        self._validated = validated

    def _told(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._stopped_by = event.stopped_by

    def _end(self, reason: str) -> None:
        # Also where an error ends it: what it has trained of the epoch is not lost on whoever reads the log.
        last = self._last
        if last is not None:
            self._tell(last)
            if reason in ("interrupted", "stopped"):
                came_to = f"{counted(last.step, 'step')}, {counted(last.num_samples, 'sample')}"
                print(f"{end_text(reason, self._stopped_by)}: {came_to}", file=sys.stderr, flush=True)
        self._tell_made_up()

    def _tell_made_up(self) -> None:
        """Print the line of a validation that the end of an earlier process has kept the run from."""
        if self._last is None and self._validated is not None:
            print(line(self._validated), file=sys.stderr, flush=True)
            self._validated = None

    def _tell(self, last: StepReport) -> None:
        """Print the line of the epoch that ends with that window, and begin the next one."""
        since = " since it was resumed" if self._is_part else ""
        parts = [f"epoch {last.epoch}{since}: loss {self._loss / self._samples:.4f}"]
        if self._validated is not None:
            parts.append(f"validation loss {self._validated.loss:.4f}")
            if self._validated.metrics:
                parts.append(metrics_text(self._validated.metrics))
        if self._seconds > 0:
            parts.append(f"{self._samples / self._seconds:.0f} samples/s")
        parts.append(f"micro-batch {cut_text((self._full or last).micro_batches)}")
        print(", ".join(parts), file=sys.stderr, flush=True)
        self._forget()
