"""What the callbacks that write a run somewhere have in common: when they begin, what they write, when they end.

::

    Started, Resumed, Notice    kept until something is trained, for a run that is finished has nothing to write
    any other record            begins; a Resumed among those kept says that the run goes on
    Finished, an error          ends
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoaccum.events import Event, Finished, Notice, Record, Resumed, Started, StepReport, Validated
from autoaccum.reporting.lines import line, means_of


class Follower:
    """Base of callbacks that write a run to a place of its own; of several ranks only those of the first are called."""

    def __init__(self) -> None:
        self._kept: list[Record] = []  # what was told of a run for which nothing has begun yet
        self._is_open = False

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, Started):
            self.close()  # of a run that has ended otherwise
            self._kept = [record]
        elif isinstance(record, Finished):
            if self._is_open:
                self._told(record)
            self.close(record.reason)
        elif self._is_open:
            self._take(record)
        else:
            self._kept.append(record)
            if not isinstance(record, Resumed | Notice):
                self._open()

    def failed(self, error: BaseException) -> None:
        """End a run that an error has ended, of which no record tells."""
        self.close(type(error).__name__)

    def close(self, reason: str = "closed") -> None:
        """Write what is left, and end what has begun.

        Args:
            reason: that of ``Finished``, or the name of an error.
        """
        self._kept = []
        if self._is_open:
            self._is_open = False
            self._end(reason)

    def _open(self) -> None:
        """Begin, and write what was kept."""
        kept, self._kept = self._kept, []
        started = next((record for record in kept if isinstance(record, Started)), None)
        resumed = next((record for record in kept if isinstance(record, Resumed)), None)
        self._begin(started, resumed)
        self._is_open = True
        for record in kept:
            if record is not started:
                self._take(record)

    def _take(self, record: Record) -> None:
        if isinstance(record, StepReport):
            self._window(record)
        elif isinstance(record, Validated):
            self._validation(record)
        else:
            self._told(record)

    # What each of them does otherwise.

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        """Begin with a run; ``resumed`` says from where one goes on."""
        raise NotImplementedError

    def _window(self, report: StepReport) -> None:
        """Write a window."""
        raise NotImplementedError

    def _validation(self, validated: Validated) -> None:
        """Write a validation."""
        raise NotImplementedError

    def _told(self, event: Event) -> None:
        """Write any other event."""
        raise NotImplementedError

    def _end(self, reason: str) -> None:
        """Write what is left, and close what is open."""
        raise NotImplementedError


def heard(callbacks: Iterable[Any], *, is_first: bool) -> list[Any]:
    """Return the callbacks that are called on a rank: on all but the first none that writes the run elsewhere."""
    return [callback for callback in callbacks if is_first or not isinstance(callback, Follower)]


def tell_failure(callbacks: Iterable[object], error: BaseException) -> None:
    """Tell those of the callbacks that follow a run of the error that ends it."""
    for callback in callbacks:
        if isinstance(callback, Follower):
            # The error that is on its way says more than one that comes of telling it.
            try:
                callback.failed(error)
            except Exception as other:
                error.add_note(f"{type(callback).__name__} could not be closed: {other!r}")


def numbers_of(report: StepReport) -> dict[str, float]:
    """Return the numbers of a window by their names; those that were not asked for are left out."""
    found: dict[str, float | None] = {
        "epoch": report.epoch,
        "num_samples": report.num_samples,
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "noise_scale": report.noise_scale,
        "effective_batch": report.effective_batch,
        # The largest, as that decides what memory is needed.
        "micro_batch": max(report.micro_batches),
        "accumulation_steps": len(report.micro_batches),
        "replays": report.replays,
        "seconds": report.seconds,
        "samples_per_second": report.effective_batch / report.seconds if report.seconds > 0 else None,
        "peak_bytes": report.peak_bytes,
        "limit_bytes": report.limit_bytes,
        **{f"train/{name}": value for name, value in means_of(report.outputs).items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def validation_of(validated: Validated) -> dict[str, float]:
    """Return the numbers of a validation by their names."""
    metrics = {f"validation/{name}": value for name, value in validated.metrics.items()}
    return {"validation/loss": validated.loss, **metrics}


def text_of(event: Event) -> str:
    """Return what an event says, in one line: its name where nothing else is to be said."""
    return " ".join((line(event) or type(event).__name__).split())


def kept_of(directory: Path | None, name: str) -> dict[str, Any]:
    """Return what an earlier process has kept in the run's directory about where else the run is; empty without it."""
    if directory is None or not (directory / name).is_file():
        return {}
    found = json.loads((directory / name).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def keep(directory: Path | None, name: str, **facts: Any) -> None:
    """Keep in the run's directory, where it has one, where else the run is."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(facts), encoding="utf-8")
