"""What the callbacks that write a run somewhere have in common: when they begin, what they write, when they end.

::

    Started, Resumed, Notice    kept until something is trained, for a run that is finished has nothing to write
    any other record            begins; a Resumed among those kept says that the run goes on
    StepReport, Validated       numbers of a step
    any other event             a text
    Finished, an error          ends
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autoaccum.events import Event, Finished, Notice, Record, Resumed, Started, StepReport, Validated
from autoaccum.reporting.lines import line, means_of
from autoaccum.reporting.progress import Teller

FACTS = ("device", "num_steps", "num_samples", "limit_bytes")
"""Fields of ``Started`` that are kept as parameters of a run."""


class Follower:
    """Base of callbacks that write a run to a place of its own; of several ranks only those of the first are called."""

    def __init__(self) -> None:
        self._kept: list[Record] = []  # what was told of a run for which nothing has begun yet
        self._is_open = False
        self._step = 0  # the last one that was written

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, Started):
            self.close()  # of a run that has ended otherwise
            self._kept = [record]
        elif isinstance(record, Finished):
            if self._is_open:
                self._take(record)
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
        self._step = 0 if resumed is None else resumed.step
        self._begin(started, resumed)
        self._is_open = True
        for record in kept:
            if record is not started:
                self._take(record)

    def _take(self, record: Record) -> None:
        self._step = getattr(record, "step", self._step)  # a notice has none
        if isinstance(record, StepReport):
            self._numbers(numbers_of(record), self._step)
        elif isinstance(record, Validated):
            self._numbers(validation_of(record), self._step)
        else:
            self._text(text_of(record), self._step)

    # What each of them does otherwise.

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        """Begin with a run; ``resumed`` says from where one goes on."""
        raise NotImplementedError

    def _numbers(self, values: dict[str, float], step: int) -> None:
        """Write numbers of a window or a validation."""
        raise NotImplementedError

    def _text(self, text: str, step: int) -> None:
        """Write what another event says."""
        raise NotImplementedError

    def _end(self, reason: str) -> None:
        """Write what is left, and close what is open."""
        raise NotImplementedError


class KnownFollower(Follower):
    """One that writes to a service, which knows the run by an id; checkpoints keep it, so a resumed run is the same."""

    def __init__(self) -> None:
        super().__init__()
        self._id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the id by which the service knows the run."""
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it from a checkpoint."""
        self._id = state["id"]


def heard(callbacks: Iterable[Any], *, is_first: bool) -> list[Any]:
    """Return the callbacks that are called on a rank: only the first one calls those that write or show the run."""
    return [callback for callback in callbacks if is_first or not isinstance(callback, Follower | Teller)]


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
