"""The progress bar over samples, by tqdm; its text is made in ``lines.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm.auto import tqdm

from autoaccum.events import Finished, Notice, Record, Resumed, Saved, Started, StepReport, Waiting
from autoaccum.reporting.lines import Narrator, state_text

_FIRST = "first step: trying micro-batch sizes"


class Teller:
    """Base of callbacks that tell at once, on standard error, that a signal has come and what it does."""

    _is_validating = False

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Know within it that what takes time is a validation."""
        self._is_validating = True
        try:
            yield
        finally:
            self._is_validating = False

    def ending(self, *, may_repeat: bool) -> None:
        """Tell that a signal has come.

        Args:
            may_repeat: whether a second one would stop at once.
        """
        text = f"stopping after this {'validation' if self._is_validating else 'step'}"
        text += "; press Ctrl-C again to stop now" if may_repeat else ""
        # A handler runs in the midst of whatever the process was doing: of a write to the same stream too, which
        # cannot be entered twice.
        with suppress(RuntimeError):
            tqdm.write(text, file=sys.stderr)


def teller_of(callbacks: Iterable[object]) -> Teller | None:
    """Return the callback that tells of signals, if one does."""
    return next((callback for callback in callbacks if isinstance(callback, Teller)), None)


class ProgressBar(Teller):
    """Callback that shows loss, samples/s, micro-batch x accumulation steps, and memory used / limit.

    It writes to standard error.
    """

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._done = 0  # samples of the windows that committed
        self._is_ending = False
        self._narrator = Narrator()

    def __call__(self, record: Record) -> None:
        """Take one record."""
        text = self._narrator(record)
        if isinstance(record, Started):
            # A file is not redrawn: there, a line now and then shows that the run is alive.
            interval = 0.1 if sys.stderr.isatty() else 10.0
            # By the clock alone: a window's end moves it by as many samples as a hundred micro-batches.
            self._bar = tqdm(
                total=record.num_samples, unit=" samples", mininterval=interval, maxinterval=interval, miniters=0,
                file=sys.stderr, postfix=_FIRST,
            )  # fmt: skip
        elif isinstance(record, StepReport) and self._bar is not None:
            self._bar.set_postfix_str(state_text(record, self._narrator.plan), refresh=False)
            self._bar.update(record.num_samples - self._bar.n)
            self._done = record.num_samples
        elif isinstance(record, Waiting) and self._bar is not None:
            # Until the next window says otherwise: nothing else moves the bar meanwhile.
            self._bar.set_postfix_str(f"waiting up to {record.seconds:g} s for memory", refresh=True)
        elif isinstance(record, Resumed) and self._bar is not None:
            # The samples of processes before this one are done, but say nothing of its speed.
            self._done = self._bar.initial = self._bar.n = record.num_samples
            self._bar.set_postfix_str("", refresh=False)
        elif isinstance(record, Finished):
            self.close()
        # A notice is a warning already, and checkpoints are many.
        if text is not None and not isinstance(record, Notice | Saved):
            tqdm.write(text, file=sys.stderr)

    def within(self, num_samples: int) -> None:
        """Show how much of a window has been run, which may take minutes; less than before where it is run again."""
        if self._bar is not None:
            self._bar.update(self._done + num_samples - self._bar.n)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Show within it that what takes time is a validation: the bar stands still meanwhile."""
        self._describe("validating")
        try:
            with super().validating():
                yield
        finally:
            self._describe("")

    def _describe(self, text: str) -> None:
        # What was said of the end of the run stays.
        if self._bar is not None and not self._is_ending:
            self._bar.set_description_str(text, refresh=bool(text))

    def ending(self, *, may_repeat: bool) -> None:
        """Tell it, and show it in the bar until the end: there it stands where nothing could be written just now."""
        self._is_ending = True
        if self._bar is not None:
            self._bar.set_description_str("stopping", refresh=False)
        super().ending(may_repeat=may_repeat)

    def close(self) -> None:
        """Leave the bar as it is, also when the run ends in an error."""
        if self._bar is not None:
            self._bar.close()
