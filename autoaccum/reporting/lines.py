"""The text of a run: of the progress bar, the log, the report and results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from math import isfinite

from autoaccum._units import format_bytes
from autoaccum.events import (
    HYPOTHESES,
    Compiled,
    Event,
    Finished,
    Joined,
    MemorySaving,
    Notice,
    OutOfMemory,
    Planned,
    Recomputed,
    Record,
    Replanned,
    Resumed,
    Saved,
    Shared,
    Started,
    StepReport,
    StepSkipped,
    Validated,
    Verified,
    Waiting,
)
from autoaccum.memory import clock

NEWS = 1.2
"""Tell of an effective batch in a line once it has changed by this factor since the last one."""


SHOWN = 4
"""Show at most so many outputs in the line of a window."""


class News:
    """Judge of whether a plan is worth a line: it is not while a ramp goes from one effective batch to the next."""

    def __init__(self) -> None:
        self._shown = 0  # effective batch of the last plan that was news

    def __call__(self, sizes: tuple[int, ...]) -> bool:
        """Return whether the plan is news; if so, it is taken to be shown."""
        samples = sum(sizes)
        # The same effective batch is news: then the plan was changed for another reason than a ramp.
        if self._shown != samples and self._shown / NEWS < samples < self._shown * NEWS:
            return False
        self._shown = samples
        return True


class Narrator:
    """Teller of a run: it takes the records in order, and has a line for those that are news."""

    def __init__(self) -> None:
        self.last: StepReport | None = None
        """The last window."""
        self._first: StepReport | None = None  # for the loss that the run, or this process, began with
        self._full: StepReport | None = None  # the last of the largest windows: that of an epoch's end may be short
        self._validated: Validated | None = None
        self._measured: tuple[bool, str] | None = None  # what the last measurement of a gradient came to
        self.plan: tuple[int, ...] = ()
        """How windows are cut; empty while that is being found out."""
        self._is_news = News()  # a ramp of thousands of plans is told in a few lines
        # For the summary: of this process, which may have resumed a run.
        self._peak_bytes = 0
        self._replays = 0
        self._resumed: Resumed | None = None
        self._started = 0.0
        self._is_finite, self._skipped = True, 0

    def __call__(self, record: Record) -> str | None:
        """Return the line, which for the end of a run is several; None for a window, and what is not worth one."""
        if isinstance(record, StepReport):  # by far the most frequent
            self._first = self._first or record
            self.last = record
            if self._full is None or record.effective_batch >= self._full.effective_batch:
                self._full = record
            self._peak_bytes = max(self._peak_bytes, record.peak_bytes)
            self._replays += record.replays
            # A step that was skipped has changed nothing, whatever its loss is.
            self._is_finite = isfinite(record.loss) if record.step != self._skipped else self._is_finite
            return None
        if isinstance(record, Started):
            self._started = clock.now()
        elif isinstance(record, Planned):
            self.plan = record.sizes
            return line(record) if self._is_news(record.sizes) else None
        elif isinstance(record, Replanned):
            self.plan = record.new
            # What is not the schedule's doing is told always, and then it is not what the next one is compared with.
            if not is_scheduled(record.old, record.new) or self._is_news(record.new):
                return line(record)
            return None
        elif isinstance(record, Validated):
            self._validated = record
        elif isinstance(record, StepSkipped):
            self._skipped = record.step
        elif isinstance(record, Resumed):
            self._resumed = record
        elif isinstance(record, Verified):
            # Measured again and again in the first windows: what comes to the same is no news.
            before, self._measured = self._measured, (record.passed, record.hypothesis)
            return None if record.passed and before == self._measured else line(record)
        elif isinstance(record, Joined):
            before, self._measured = self._measured, (record.passed, "joined")
            return None if record.passed and before == self._measured else line(record)
        elif isinstance(record, Finished):
            return self._summary(record)
        return line(record)

    def _summary(self, finished: Finished) -> str | None:
        """Return what the run has come to in three lines; None where it has trained nothing."""
        if self._first is None or self.last is None or self._full is None:
            return None
        # Where lengths differ each window has sizes of its own, and a plan is of a window that may never come.
        sizes = self.plan or self._full.micro_batches
        sizes = self._full.micro_batches if is_by_length(sizes) else sizes
        # As FitResult has it: a validation loss that is not finite is no divergence.
        reason = finished.reason if self._is_finite or finished.reason == "interrupted" else "diverged"
        # Of this process: what was trained before a resume took its own time, which nobody has measured here.
        seconds = clock.now() - self._started
        samples = self.last.num_samples
        own = samples - (0 if self._resumed is None else self._resumed.num_samples)
        took = f"in {seconds:.1f} s" + (f" ({own / seconds:.0f} samples/s)" if seconds > 0 else "")
        since = "" if self._resumed is None else f" since step {self._resumed.step}"
        if self._resumed is not None:
            took = f"of which {own} now, {took}"
        means = means_of(self.last.outputs)
        outputs = f", {metrics_text(means)}" if means else ""
        # The last one, as the parameters at the end are what the run leaves.
        validated = "" if self._validated is None else f"; validation {self._validated.loss:.4f}"
        if self._validated is not None and self._validated.metrics:
            validated += f", {metrics_text(self._validated.metrics)}"
        return (
            f"{end_text(reason, finished.stopped_by)}: {counted(finished.step, 'step')}, "
            f"{samples} samples{',' if since else ''} {took}\n"
            f"loss {self._first.loss:.4f} -> {self.last.loss:.4f}{since}{outputs}{validated}\n"
            f"micro-batches {cut_text(sizes)}, {counted(self._replays, 'replay')}, "
            f"peak {format_bytes(self._peak_bytes)} of {format_bytes(self.last.limit_bytes)}{since}"
        )


def end_text(reason: str, stopped_by: str) -> str:
    """Return how a run has ended.

    >>> end_text("budget", ""), end_text("stopped", "EarlyStopping")
    ('done', 'stopped by EarlyStopping')
    """
    by = f" by {stopped_by}" if reason == "stopped" and stopped_by else ""  # a signal may have come first
    return "done" if reason == "budget" else f"{reason}{by}"


def line(event: Event) -> str | None:
    """Return what an event says by itself; None where another record says it better.

    >>> line(Replanned(step=12, old=(86, 85, 85), new=(43, 43, 43, 43, 42, 42), reason="out of memory"))
    'step 12: out of memory: 85-86 x 3 -> 42-43 x 6'
    """
    if isinstance(event, Planned):
        # Whatever is not known is left out: a plan that needed no memory model has no prediction to tell.
        predicted = "" if event.predicted_bytes is None else f"{format_bytes(event.predicted_bytes)} predicted"
        if event.prediction_error is not None:
            predicted += f" (predictions so far: {event.prediction_error:.1%} off)"
        memory = ", ".join(filter(None, (predicted, f"limit {format_bytes(event.limit_bytes)}")))
        saving = "" if event.memory_saving == "off" else f"; {event.memory_saving}"
        return f"plan: {cut_text(event.sizes)} ({event.reason}); memory: {memory}{saving}"
    if isinstance(event, Replanned):
        return f"step {event.step}: {event.reason}: {cut_text(event.old)} -> {cut_text(event.new)}"
    if isinstance(event, MemorySaving):
        return f"step {event.step}: memory saving {event.old} -> {event.new}: {event.reason}"
    if isinstance(event, Recomputed):
        blocks = counted(event.blocks, "block")
        return f"step {event.step}: activation checkpointing has the same gradient (checked on {blocks})"
    if isinstance(event, Validated):
        metrics = f", {metrics_text(event.metrics)}" if event.metrics else ""
        return f"epoch {event.epoch}: validation loss {event.loss:.4f}{metrics}"
    if isinstance(event, StepSkipped):
        return f"step {event.step}: skipped ({event.reason})"
    if isinstance(event, OutOfMemory) and event.phase == "validation":  # in training a re-plan says it
        return f"step {event.step}: out of memory in validation at a micro-batch of {event.micro_batch}"
    if isinstance(event, Waiting):
        where = " in validation" if event.phase == "validation" else ""
        return (
            f"step {event.step}: out of memory{where} at the smallest micro-batch ({event.micro_batch}): waiting up to "
            f"{event.seconds:g} s for memory; it needs at least {format_bytes(event.needed_bytes)}, the limit is "
            f"{format_bytes(event.limit_bytes)}"
        )
    if isinstance(event, Compiled) and event.compilations:
        what = counted(event.compilations, "compilation")
        return f"step {event.step}: {what} at a micro-batch of {event.micro_batch}, in {event.seconds:.1f} s"
    if isinstance(event, Verified):
        return verified_text(event)
    if isinstance(event, Joined):
        return joined_text(event)
    if isinstance(event, Shared):
        return shared_text(event)
    if isinstance(event, Saved):
        return f"step {event.step}: saved {event.path} in {event.seconds:.2f} s"
    if isinstance(event, Resumed):
        return f"step {event.step}: resumed from {event.checkpoint}, {counted(event.num_samples, 'sample')} in"
    # What is left is said by the bar, by the next re-plan or in the summary.
    return str(event) if isinstance(event, Notice) else None


def shared_text(event: Shared) -> str:
    """Return how a window was shared out among ranks, and how long they have waited for each other, as a text."""
    parts = [sum(sizes) for sizes in event.micro_batches]
    both = zip(event.busy_seconds, event.waited_seconds, strict=True)
    waited = [wait / max(busy + wait, 1e-9) for busy, wait in both]
    # Of thousands of ranks only the extremes are worth a line; records have all of them.
    shown = " + ".join(map(str, parts)) if len(parts) <= SHOWN else f"{min(parts)} to {max(parts)} samples each"
    share = f"{min(waited):.0%} to {max(waited):.0%}"
    return f"step {event.step}: {len(parts)} ranks: {shown}; waiting: {share} of the time"


def verified_text(event: Verified) -> str:
    """Return what was measured of a gradient, as a text."""
    cuts = ", ".join("+".join(map(str, sizes)) for sizes in event.cuts)
    verdict = "exact" if event.passed else "not exact"
    where = "" if event.passed or event.tensor is None else f" in {event.tensor}"
    loss = HYPOTHESES[event.hypothesis]
    allowed = _allowed(event)
    return (
        f"step {event.step}: micro-batches are weighted: {verdict}, relative error {event.error:.1e}{where} "
        f"({allowed}; {event.samples} samples split {cuts}; the loss is {loss})"
    )


def _allowed(event: Verified | Joined) -> str:
    # What passes only for rounding, as 64 bits show, is taken for the tolerance itself.
    is_rounded = event.passed and event.error == event.tolerance
    return "within measured rounding" if is_rounded else f"{event.tolerance:.0e} allowed"


_SAVES_LITTLE = 0.5
"""Shares of the full batch's memory above which it is said why joined micro-batches hold so much."""


def joined_text(event: Joined) -> str:
    """Return how micro-batches are joined, and what was measured of it, as a text."""
    verdict = "exact" if event.passed else "not exact"
    where = "" if event.passed or event.tensor is None else f" in {event.tensor}"
    more = ""
    if event.held > _SAVES_LITTLE:
        names = [*event.opened[:2], *(["others"] if len(event.opened) > 2 else [])]
        whole = ", ".join(names) or "the step's own code"
        more = f", for the full batch runs through {whole}"
        more += " (if these are BatchNorm layers, accumulate='weighted' saves more)" if names else ""
    return (
        f"step {event.step}: micro-batches are joined: {verdict}, relative error {event.error:.1e}{where} "
        f"({_allowed(event)}; {event.samples} samples); a step holds {event.held:.0%} of what the full "
        f"batch holds for backward, and a micro-batch{more}. Reason: {event.reason}"
    )


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return what validations report beside the loss, as a text.

    >>> metrics_text({"accuracy": 0.953, "perplexity": 17.24512})
    'accuracy 0.953, perplexity 17.25'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def means_of(outputs: Mapping[str, object]) -> dict[str, float]:
    """Return those of the outputs beside a loss that are means, and no tensors."""
    return {name: value for name, value in outputs.items() if isinstance(value, float)}


def state_text(report: StepReport, plan: tuple[int, ...] = ()) -> str:
    """Return how things stand after a window: its loss and what is beside it, its cut, memory used / limit.

    Of a window with fewer samples than the ``plan`` has, as at an epoch's end, the cut that is shown is the plan.
    """
    outputs = ""
    if report.outputs:
        means = list(means_of(report.outputs).items())
        outputs = "".join(f"{name} {value:.4g}, " for name, value in means[:SHOWN])
        outputs += "..., " if len(means) > SHOWN else ""  # else nothing of the line but them would be seen
    cut = cut_text(plan if sum(plan) > report.effective_batch else report.micro_batches)
    return (
        f"loss {report.loss:.4f}, {outputs}split {cut}, "
        f"{format_bytes(report.peak_bytes)} of {format_bytes(report.limit_bytes)}"
    )


def is_scheduled(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Return whether a re-plan is one of another effective batch, rather than of memory."""
    return sum(old) != sum(new)  # what memory changes is how the same samples are cut


def cut_text(sizes: tuple[int, ...]) -> str:
    """Return sizes as micro-batch x accumulation steps.

    >>> cut_text((64, 64, 64)), cut_text((86, 85, 85)), cut_text((1, 2, 4, 1))
    ('64 x 3', '85-86 x 3', '1-4 x 4')
    """
    # Sizes of a plan are as equal as can be, but for samples that differ in length: their span says enough.
    largest, smallest = max(sizes), min(sizes)
    span = f"{largest}" if smallest == largest else f"{smallest}-{largest}"
    return f"{span} x {len(sizes)}"


def is_by_length(sizes: tuple[int, ...]) -> bool:
    """Return whether sizes are of samples that differ in length; else they are as equal as can be."""
    # The longest come first, so that there are few of them; else the first micro-batch is as large as any.
    return any(size > before for before, size in pairwise(sizes))


def counted(number: int, noun: str) -> str:
    """Return a number of things as a text.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2000 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_rate(per_second: float) -> str:
    """Format a rate for people.

    >>> format_rate(17023.4), format_rate(17.0234)
    ('17,023', '17.02')
    """
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> [format_seconds(s) for s in (0.0123, 1.5, 75, 7380, 200_000)]
    ['12 ms', '1.5 s', '1 min 15 s', '2 h 3 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.001 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    # The largest unit that there is one of, and of the next smaller one the rest.
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (part, part_name) in pairwise(units):
        if seconds >= size:
            rest = int(seconds % size) // part
            return f"{int(seconds // size)} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError(seconds)


Facts = dict[str, object]
"""What is shown, by its name."""


def as_line(title: str, facts: Facts) -> str:
    """Return facts as the ``repr`` of an object.

    >>> as_line("Result", {"steps": 3, "loss": 0.5})
    'Result(steps=3, loss=0.5)'
    """
    return f"{title}({', '.join(f'{name}={value}' for name, value in facts.items())})"


def as_table(title: str, facts: Facts) -> str:
    """Return facts as a table in HTML, as notebooks show it.

    >>> as_table("Result", {"steps": 3})
    '<table><caption>Result</caption><tr><th>steps</th><td>3</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
