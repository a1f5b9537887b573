"""Effective batches that change while training: what a window is to have, as a pure function of where the run stands.

>>> schedule = parse("64, 1000:256, 5000:1024")
>>> schedule
Milestones(start=64, points=((1000, 256), (5000, 1024)), by='steps')
>>> [schedule.at(Progress(step=step)) for step in (999, 1000, 9999)]
[64, 256, 1024]

A function of ``Progress`` alone goes on from any point without its history. What goes by samples or epochs changes with
the first window that begins at or past the point.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from autoaccum._checks import number_between, one_of, positive_int
from autoaccum.errors import ArgumentError, ArgumentTypeError, ScheduleError
from autoaccum.events import StepReport

By = Literal["steps", "samples", "epochs"]
SUFFIXES: dict[By, str] = {"steps": "", "samples": "s", "epochs": "e"}
"""How a text says what a number counts."""

SMOOTHING = 0.95
"""Weight of the past in the averages that noise scales are made of."""

REPORTS = 100
"""``Progress`` holds at most this many reports."""

GROW = 1.25
"""The noise scale asks for a larger batch from this many times the batch on."""

SHRINK = 2.0
"""... and for a smaller one up to the batch divided by this: samples spent are worse than steps spent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands before a window."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """The pass over the data that the window belongs to: the first is 0."""
    samples: int = 0
    """Samples trained on."""
    effective_batch: int | None = None
    """Samples asked for the window before, also a short one, never more than the data has; None before the first."""
    reports: Sequence[StepReport] = ()
    """The last ones, newest last, at most 100."""


def _counted(progress: Progress, by: By) -> int:
    return progress.step if by == "steps" else progress.samples if by == "samples" else progress.epoch


class Schedule(ABC):
    """The effective batch over a run."""

    __slots__ = ()

    foreseeable: ClassVar[bool] = True
    """Whether it is the same whatever training shows, so that its steps can be counted in advance."""

    @abstractmethod
    def at(self, progress: Progress) -> int:
        """Samples that the next window is to have."""

    @property
    @abstractmethod
    def largest(self) -> int | None:
        """Most samples that it ever asks for; None when that is not known."""

    @abstractmethod
    def settled(self, progress: Progress) -> bool:
        """Whether it asks for the same from there on."""

    @abstractmethod
    def __str__(self) -> str:
        """The text that ``parse`` reads it from; a function has none, and gives its name."""


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same for every window."""

    effective_batch: int
    """Samples."""

    def __post_init__(self) -> None:
        positive_int("effective_batch", self.effective_batch, "Pass the samples you want per optimizer step.")

    def at(self, progress: Progress) -> int:
        """The one there is."""
        return self.effective_batch

    @property
    def largest(self) -> int:
        """The one there is."""
        return self.effective_batch

    def settled(self, progress: Progress) -> bool:
        """Always."""
        return True

    def __str__(self) -> str:
        return str(self.effective_batch)


@dataclass(frozen=True, slots=True)
class _Ramp(Schedule):
    """From ``start`` to ``end``, up or down, and there it stays."""

    start: int
    """Samples at the beginning."""
    end: int
    """Samples from ``over`` on."""
    over: int
    """Steps, samples or epochs that it takes."""
    by: By = "steps"

    _word: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("start", "end", "over"):
            positive_int(name, getattr(self, name))
        one_of("by", self.by, tuple(SUFFIXES))

    @property
    def largest(self) -> int:
        """Its higher end."""
        return max(self.start, self.end)

    def settled(self, progress: Progress) -> bool:
        """Once it is over."""
        return self.start == self.end or _counted(progress, self.by) >= self.over

    def __str__(self) -> str:
        return f"{self._word} {self.start}:{self.end} over {self.over}{SUFFIXES[self.by]}"


@dataclass(frozen=True, slots=True)
class Linear(_Ramp):
    """By the same number of samples with every step, sample or epoch; exact, rounded half up."""

    _word: ClassVar = "linear"

    def at(self, progress: Progress) -> int:
        """On the line between the two ends."""
        done = min(_counted(progress, self.by), self.over)
        return (2 * (self.start * self.over + (self.end - self.start) * done) + self.over) // (2 * self.over)


@dataclass(frozen=True, slots=True)
class Geometric(_Ramp):
    """By the same factor with every step, sample or epoch; rounded."""

    _word: ClassVar = "geometric"

    def at(self, progress: Progress) -> int:
        """On the curve between the two ends."""
        done = _counted(progress, self.by)
        if done >= self.over:
            return self.end
        return round(self.start * math.pow(self.end / self.start, done / self.over))


@dataclass(frozen=True, slots=True, init=False)
class Milestones(Schedule):
    """One batch until the first point, then the one that each point says."""

    start: int
    """Samples before the first point."""
    points: tuple[tuple[int, int], ...]
    """(steps, samples or epochs; samples per window from there on), in order."""
    by: By = "steps"

    def __init__(self, start: int, points: Mapping[int, int] | Iterable[tuple[int, int]], by: By = "steps") -> None:
        """``points`` maps steps (samples, epochs), each more than the one before, to the effective batch from there."""
        positive_int("start", start)
        one_of("by", by, tuple(SUFFIXES))
        accepted = f"a dict such as {{1000: 256}}, from {by} to the effective batch from there on"
        try:
            pairs = tuple(
                (point, batch) for point, batch in (points.items() if isinstance(points, Mapping) else points)
            )
        except (TypeError, ValueError):
            raise ArgumentTypeError("points", points, accepted) from None
        if not pairs:
            raise ArgumentError("points", points, accepted, f"For one batch throughout pass {start} itself.")
        before = 0
        for point, batch in pairs:
            positive_int("points", point, f"That is where {batch!r} was to begin, in {by}.")
            positive_int("points", batch, f"That is the effective batch from {point} {by} on.")
            if point <= before:
                raise ArgumentError("points", points, f"{point} to be more than {before}", "Give them in order.")
            before = point
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "points", pairs)
        object.__setattr__(self, "by", by)

    def at(self, progress: Progress) -> int:
        """That of the last point reached."""
        done = _counted(progress, self.by)
        reached = self.start
        for point, batch in self.points:
            if done < point:
                break
            reached = batch
        return reached

    @property
    def largest(self) -> int:
        """The highest of all."""
        return max(self.start, *(batch for _, batch in self.points))

    def settled(self, progress: Progress) -> bool:
        """Past the last point."""
        return _counted(progress, self.by) >= self.points[-1][0]

    def __str__(self) -> str:
        points = (f"{point}{SUFFIXES[self.by]}:{batch}" for point, batch in self.points)
        return ", ".join([str(self.start), *points])


@dataclass(frozen=True, slots=True)
class Doubling(Schedule):
    """Twice as much again and again, up to ``most``."""

    start: int
    """Samples at the beginning."""
    most: int
    """Samples that it ends at."""
    every: int
    """Steps, samples or epochs from one doubling to the next."""
    by: By = "epochs"

    def __post_init__(self) -> None:
        for name in ("start", "most", "every"):
            positive_int(name, getattr(self, name))
        one_of("by", self.by, tuple(SUFFIXES))
        if self.most < self.start:
            raise ArgumentError("most", self.most, f"at least start={self.start}", "Doubling only grows.")

    def at(self, progress: Progress) -> int:
        """``start`` doubled as often as there was time for."""
        doublings = min(_counted(progress, self.by) // self.every, self.most.bit_length())  # that many are enough
        return min(self.start << doublings, self.most)

    @property
    def largest(self) -> int:
        """Where it ends."""
        return self.most

    def settled(self, progress: Progress) -> bool:
        """Once it can double no more."""
        return self.at(progress) == self.most

    def __str__(self) -> str:
        return f"double {self.start}:{self.most} every {self.every}{SUFFIXES[self.by]}"


@dataclass(frozen=True, slots=True)
class Function(Schedule):
    """A function of your own. It has to be pure: it is called in advance too, to count the steps.

    Once it looks at ``progress.reports``, which only training fills, counting in advance is given up.
    """

    function: Callable[[Progress], int]
    """(progress) -> samples that the next window is to have"""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ArgumentTypeError("function", self.function, "a function of Progress")

    def at(self, progress: Progress) -> int:
        """What it returns.

        Raises:
            ArgumentError: that is no int of at least 1.
        """
        returned = self.function(progress)
        return positive_int("effective_batch", returned, "The function passed as effective_batch returned it.")

    @property
    def largest(self) -> None:
        """Not known."""
        return

    def settled(self, progress: Progress) -> bool:
        """Never, as far as can be known."""
        return False

    def __str__(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))


@dataclass(frozen=True, slots=True)
class NoiseScale(Schedule):
    """Follows the gradient noise scale, up to which a larger batch saves about as many steps as it costs samples.

    McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), section 2.2: the ratio of the trace of the
    covariance of a sample's gradient to the squared norm of the true gradient. It moves by a factor of two at most, and
    only where ``patience`` full windows at the present batch all say so: the estimate is noisy.
    """

    min: int
    """Samples at the beginning, and the fewest there are."""
    max: int
    """The most there are."""
    smoothing: float = SMOOTHING
    """Weight of the past in the averages over windows that the estimate is made of."""
    patience: int = 10
    """Full windows that have to agree."""

    foreseeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        cure = "It takes two micro-batches to measure the noise, so a window needs two samples."
        if positive_int("min", self.min, cure) < 2:
            raise ArgumentError("min", self.min, "an int of at least 2", cure)
        if positive_int("max", self.max) < self.min:
            raise ArgumentError("max", self.max, f"at least min={self.min}")
        number_between("smoothing", self.smoothing, 0, 1)
        if (
            positive_int("patience", self.patience) > REPORTS // 2
        ):  # every second window may be the short one of an epoch
            cure = f"{REPORTS} reports are kept, and up to half of them are of short windows."
            raise ArgumentError("patience", self.patience, f"at most {REPORTS // 2}", cure)

    def at(self, progress: Progress) -> int:
        """The present batch, or one nearer to the noise scale."""
        batch = progress.effective_batch
        if batch is None:
            return self.min
        scales = [report.noise_scale for report in self._full(progress, batch)]
        known = [scale for scale in scales if scale is not None]
        wanted: float = batch
        if len(known) == self.patience:
            if all(scale >= GROW * batch for scale in known):
                wanted = math.floor(min(2 * batch, *known))
            elif all(scale <= batch / SHRINK for scale in known):
                wanted = math.ceil(max(batch / 2, *known))
        return int(min(max(wanted, self.min), self.max))

    def _full(self, progress: Progress, batch: int) -> list[StepReport]:
        """The last reports on full windows since the batch became what it is, ``patience`` at most, newest first."""
        found: list[StepReport] = []
        epoch = progress.epoch
        for report in reversed(progress.reports):
            if report.effective_batch == batch:
                found.append(report)
            elif report.effective_batch > batch or report.epoch == epoch:
                break  # not the short last window of its epoch: another batch was asked for
            if len(found) == self.patience:
                break
            epoch = report.epoch
        return found

    @property
    def largest(self) -> int:
        """``max``."""
        return self.max

    def settled(self, progress: Progress) -> bool:
        """When there is nowhere to go."""
        return self.min == self.max

    def __str__(self) -> str:
        smoothing = "" if self.smoothing == SMOOTHING else f" smoothing {self.smoothing}"
        patience = "" if self.patience == 10 else f" patience {self.patience}"
        return f"noise {self.min}:{self.max}{smoothing}{patience}"


def schedule_of(effective_batch: int | str | Schedule | Callable[[Progress], int]) -> Schedule:
    """What ``fit(effective_batch=...)`` takes, as a schedule.

    Raises:
        ArgumentError: an int below 1.
        ScheduleError: a text that cannot be read.
        ArgumentTypeError: something else.
    """
    if isinstance(effective_batch, Schedule):
        return effective_batch
    if isinstance(effective_batch, str):
        return parse(effective_batch)
    if isinstance(effective_batch, int):
        return Constant(effective_batch)
    if callable(effective_batch) and not isinstance(effective_batch, type):
        return Function(effective_batch)
    raise ArgumentTypeError(
        "effective_batch",
        effective_batch,
        "an int of at least 1, a schedule, its text such as '64, 1000:256', or a function of Progress",
        "Pass the samples you want per optimizer step.",
    )


def parse(text: str) -> Schedule:
    """A schedule from its text; a number of steps, or with the suffix ``s`` of samples, with ``e`` of epochs.

    >>> for text in ("256", "64, 10_000s:256", "linear 64:1024 over 10e", "geometric 64:1024 over 5000",
    ...              "double 64:1024 every 2e", "noise 64:1024 smoothing 0.9 patience 5"):
    ...     print(repr(parse(text)))
    Constant(effective_batch=256)
    Milestones(start=64, points=((10000, 256),), by='samples')
    Linear(start=64, end=1024, over=10, by='epochs')
    Geometric(start=64, end=1024, over=5000, by='steps')
    Doubling(start=64, most=1024, every=2, by='epochs')
    NoiseScale(min=64, max=1024, smoothing=0.9, patience=5)

    Raises:
        ScheduleError: it cannot be read; says what was expected at which character.
    """
    scanner = _Scanner(text)
    word = scanner.find("linear|geometric|double|noise")
    if word is None:
        return _milestones(scanner)
    kinds: dict[str, type[Any]] = {"linear": Linear, "geometric": Geometric, "double": Doubling, "noise": NoiseScale}
    names = [field.name for field in fields(kinds[word])]
    found: dict[str, Any] = {}
    where: dict[str, int] = {}

    def keep(name: str, value: object) -> None:
        found[name], where[name] = value, scanner.begin

    keep(names[0], scanner.number("a number of samples"))
    scanner.take(":", "':'")
    keep(names[1], scanner.number("a number of samples"))
    if word == "noise":
        if scanner.find("smoothing"):
            keep("smoothing", float(scanner.take(r"[0-9]+(\.[0-9]+)?(e-[0-9]+)?", "a number below 1")))
        if scanner.find("patience"):
            keep("patience", scanner.number("a number of windows"))
    else:
        clause = "every" if word == "double" else "over"
        scanner.take(clause, f"'{clause}'")
        keep(names[2], scanner.number("a number of steps (with s: samples, with e: epochs)"))
        found["by"] = scanner.unit()
    scanner.take("$", "the end of the text")
    try:
        schedule: Schedule = kinds[word](**found)
    except ArgumentError as error:
        raise scanner.error(error.accepted, where[error.argument]) from None
    return schedule


def _milestones(scanner: _Scanner) -> Schedule:
    start = scanner.number("a number of samples, or linear, geometric, double or noise")
    points: list[tuple[int, int]] = []
    by: By = "steps"
    while scanner.find(","):
        point = scanner.number("a number of steps (with s: samples, with e: epochs)")
        if points and point <= points[-1][0]:
            raise scanner.error(f"a milestone after {points[-1][0]}", scanner.begin)
        end = scanner.end
        unit = scanner.unit()
        if points and unit != by:
            raise scanner.error(f"{by} like the milestone before", scanner.begin if SUFFIXES[unit] else end)
        by = unit
        scanner.take(":", "':'")
        points.append((point, scanner.number("a number of samples")))
    scanner.take("$", "',' or the end of the text")
    return Milestones(start, points, by) if points else Constant(start)


class _Scanner:
    """Takes one token of a text after the other; spaces between them are free."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begin = self.end = 0
        """Where the last token stands, from 0."""

    def find(self, pattern: str) -> str | None:
        """The next token when it is one of those."""
        match = re.compile(rf"\s*({pattern})").match(self.text, self.end)
        if match is None:
            return None
        self.begin, self.end = match.span(1)
        return match[1]

    def take(self, pattern: str, expected: str) -> str:
        """The next token, which has to be one of those."""
        if (token := self.find(pattern)) is None:
            raise self.error(expected)
        return token

    def number(self, expected: str) -> int:
        """An int of at least 1."""
        value = int(self.take("[0-9]+(_[0-9]+)*", expected))
        if value < 1:
            raise self.error("an int of at least 1", self.begin)
        return value

    def unit(self) -> By:
        """What the number before counts."""
        suffix = self.find("[se]") or ""
        return next(by for by, known in SUFFIXES.items() if known == suffix)

    def error(self, expected: str, at: int | None = None) -> ScheduleError:
        """Of the character at ``at``; None for the first one that no token took."""
        cure = ""
        if at is None:
            at = len(self.text) - len(self.text[self.end :].lstrip())
            if re.match("[0-9][se][0-9]", self.text[at - 1 :]):
                at += 1
            if re.match("[0-9][se][0-9]", self.text[max(0, at - 2) :]):
                meant = "epochs" if self.text[at - 1] == "e" else "samples"
                cure = f"{self.text[at - 1]} means {meant}: write a number in full, such as 1_000_000."
        return ScheduleError(self.text, at + 1, expected, cure)
