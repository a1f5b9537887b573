"""The kinds of schedules: the effective batch of a window, as a pure function of where the run stands.

>>> schedule = Milestones(64, {1000: 256, 5000: 1024})
>>> [schedule.at(Progress(step=step)) for step in (999, 1000, 9999)]
[64, 256, 1024]

A function of ``Progress`` alone goes on from any point without its history. What goes by samples or epochs changes with
the first window that begins at or past the point.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from autoaccum._checks import function, one_of, positive_int
from autoaccum._units import shown
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.events import StepReport

By = Literal["steps", "samples", "epochs"]
SUFFIXES: dict[By, str] = {"steps": "", "samples": "s", "epochs": "e"}
"""The letters behind a number in a schedule's text that say what it counts."""

REPORTS = 100
"""Reports that ``Progress`` holds at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The place of a run before a window."""

    # Without arguments it is the place where every run begins.
    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """The pass over the data that the window belongs to: the first is 0."""
    samples: int = 0
    """Samples trained on."""
    effective_batch: int | None = None
    """Samples asked for the window before, also a short one, never more than the data has; None before the first."""
    reports: Sequence[StepReport] = ()
    """The last reports, newest last, at most 100."""


def _counted(progress: Progress, by: By) -> int:
    """Return how far the run is, in the unit that a schedule goes by."""
    # Samples and epochs are those that windows before have had: a window is not changed half-way.
    if by == "steps":
        return progress.step
    if by == "samples":
        return progress.samples
    return progress.epoch


class Schedule(ABC):
    """The effective batch over a run."""

    # A value without state: the same place in a run gives the same batch, so that a run is counted in advance, killed
    # and resumed, and its windows are read ahead by workers, all by asking again.

    # Subclasses are frozen dataclasses with slots, which only are without a dict if their base is, too.
    __slots__ = ()

    foreseeable: ClassVar[bool] = True
    """Whether it is the same whatever training shows, so that its steps can be counted in advance."""

    @abstractmethod
    def at(self, progress: Progress) -> int:
        """Return the samples that the next window is to have."""

    @property
    @abstractmethod
    def largest(self) -> int | None:
        """Return the most samples that it ever asks for; None when that is not known."""

    @property
    def smallest(self) -> int | None:
        """Return the fewest samples that it ever asks for; None when that is not known."""
        return None

    @abstractmethod
    def settled(self, progress: Progress) -> bool:
        """Return whether it asks for the same from there on."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the text that ``parse`` reads it from; a function has none, and gives its name."""
        # A run's configuration keeps this text: by it a run that is resumed is told from another.


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same batch for every window."""

    effective_batch: int
    """Samples of each window."""

    def __post_init__(self) -> None:
        positive_int("effective_batch", self.effective_batch, "Pass the samples you want per optimizer step.")

    def at(self, progress: Progress) -> int:
        """Return the one batch there is."""
        return self.effective_batch

    @property
    def largest(self) -> int:
        """Return the one batch there is."""
        return self.effective_batch

    @property
    def smallest(self) -> int:
        """Return the one batch there is."""
        return self.effective_batch

    def settled(self, progress: Progress) -> bool:
        """Return True, always."""
        return True

    def __str__(self) -> str:
        return str(self.effective_batch)


@dataclass(frozen=True, slots=True)
class _Ramp(Schedule):
    """A way from ``start`` to ``end``, up or down, where it stays."""

    start: int
    """Samples at the beginning."""
    end: int
    """Samples from ``over`` on."""
    over: int
    """Steps, samples or epochs that it takes."""
    by: By = "steps"
    """What ``over`` counts."""

    _word: ClassVar[str]  # that its text begins with

    def __post_init__(self) -> None:
        # ``over`` may not be 0: a ramp that takes no time is a constant, and would divide by it.
        for name in ("start", "end", "over"):
            positive_int(name, getattr(self, name))
        one_of("by", self.by, tuple(SUFFIXES))

    @property
    def largest(self) -> int:
        """Return its higher end."""
        return max(self.start, self.end)

    @property
    def smallest(self) -> int:
        """Return its lower end."""
        return min(self.start, self.end)

    def settled(self, progress: Progress) -> bool:
        """Return whether it is over, or goes nowhere."""
        # Rounding reaches the end a little earlier: to say so only here costs whoever counts a few windows more.
        return self.start == self.end or _counted(progress, self.by) >= self.over

    def __str__(self) -> str:
        return f"{self._word} {self.start}:{self.end} over {self.over}{SUFFIXES[self.by]}"


@dataclass(frozen=True, slots=True)
class Linear(_Ramp):
    """A ramp by the same number of samples with every step, sample or epoch; exact, rounded half up."""

    _word: ClassVar = "linear"

    def at(self, progress: Progress) -> int:
        """Return the batch on the line between the two ends."""
        done = min(_counted(progress, self.by), self.over)
        # floor(x + 1/2) of the fraction x = (start * over + (end - start) * done) / over, in integers: a float would
        # round differently where samples are counted in billions.
        return (2 * (self.start * self.over + (self.end - self.start) * done) + self.over) // (2 * self.over)


@dataclass(frozen=True, slots=True)
class Geometric(_Ramp):
    """A ramp by the same factor with every step, sample or epoch; rounded."""

    _word: ClassVar = "geometric"

    def at(self, progress: Progress) -> int:
        """Return the batch on the curve between the two ends."""
        done = _counted(progress, self.by)
        # Beyond its end the power would go on.
        if done >= self.over:
            return self.end
        # start * (end / start)^(done / over): by the power, and not factor by factor, so that no rounding adds up.
        return round(self.start * math.pow(self.end / self.start, done / self.over))


@dataclass(frozen=True, slots=True, init=False)
class Milestones(Schedule):
    """A batch that changes at points: one until the first, then the one that each point says."""

    start: int
    """Samples before the first point."""
    points: tuple[tuple[int, int], ...]
    """(steps, samples or epochs; samples per window from there on), in order."""
    by: By = "steps"
    """What the points count."""

    def __init__(self, start: int, points: Mapping[int, int] | Iterable[tuple[int, int]], by: By = "steps") -> None:
        """Check the points and put them in place.

        Args:
            start: samples before the first point.
            points: maps steps (samples, epochs), each more than the one before, to the effective batch from there.
            by: what the points count.

        Raises:
            ArgumentTypeError: the points are no such mapping.
            ArgumentError: there are none, or they are out of order.
        """
        positive_int("start", start)
        one_of("by", by, tuple(SUFFIXES))
        accepted = f"a dict such as {{1000: 256}}, from {by} to the effective batch from there on"
        # Taken apart here, where whatever is not made of pairs can be refused with words of ours; one by one, for what
        # can be iterated over need not come to an end.
        pairs: list[tuple[int, int]] = []
        # The first point is above 0: what there is from the beginning is ``start``.
        before = 0
        try:
            for point, batch in points.items() if isinstance(points, Mapping) else points:
                positive_int("points", point, f"That is where {shown(batch)} was to begin, in {by}.")
                positive_int("points", batch, f"That is the effective batch from {point} {by} on.")
                if point <= before:
                    raise ArgumentError("points", points, f"{point} to be more than {before}", "Give them in order.")
                pairs.append((point, batch))
                before = point
        except ArgumentError:
            raise
        except Exception:
            raise ArgumentTypeError("points", points, accepted) from None
        # Without points its text would be that of ``Constant``, and be read as one.
        if not pairs:
            raise ArgumentError("points", points, accepted, f"For one batch throughout pass {start} itself.")
        # A frozen dataclass can be set in no other way.
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "points", tuple(pairs))
        object.__setattr__(self, "by", by)

    def at(self, progress: Progress) -> int:
        """Return the batch of the last point reached."""
        done = _counted(progress, self.by)
        reached = self.start  # the batch of the last point that is not past ``done``
        for point, batch in self.points:
            if done < point:
                break
            reached = batch
        return reached

    @property
    def largest(self) -> int:
        """Return the highest batch of all."""
        return max(self.start, *(batch for _, batch in self.points))

    @property
    def smallest(self) -> int:
        """Return the lowest batch of all."""
        return min(self.start, *(batch for _, batch in self.points))

    def settled(self, progress: Progress) -> bool:
        """Return whether the last point is reached."""
        return _counted(progress, self.by) >= self.points[-1][0]

    def __str__(self) -> str:
        points = (f"{point}{SUFFIXES[self.by]}:{batch}" for point, batch in self.points)
        return ", ".join([str(self.start), *points])


@dataclass(frozen=True, slots=True)
class Function(Schedule):
    """A function of your own. It has to be pure: it is called in advance too, to count the steps.

    Once it looks at ``progress.reports``, which only training fills, counting in advance is given up.
    """

    function: Callable[[Progress], int]
    """(progress) -> samples that the next window is to have."""

    def __post_init__(self) -> None:
        # Else it would fail when it is called for the first time, with an error that names no argument.
        function("function", self.function, ("progress",), "samples")

    def at(self, progress: Progress) -> int:
        """Return what the function returns.

        Raises:
            ArgumentError: that is no int of at least 1.
        """
        # Not rounded: which way, only whoever wrote it can say.
        returned = self.function(progress)
        return positive_int("effective_batch", returned, "The function passed as effective_batch returned it.")

    @property
    def largest(self) -> None:
        """Return None: it is not known."""
        # Nor can it be found out by asking in advance: a function may look at anything that there is in ``Progress``.
        return

    def settled(self, progress: Progress) -> bool:
        """Return False: it may change at any time."""
        return False

    def __str__(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))
