"""Schedules of the effective batch as users give them: an int, a text, a function, or a schedule.

>>> schedule = parse("64, 1000:256, 5000:1024")
>>> schedule
Milestones(start=64, points=((1000, 256), (5000, 1024)), by='steps')
>>> [schedule.at(Progress(step=step)) for step in (999, 1000, 9999)]
[64, 256, 1024]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from autoaccum.errors import ArgumentError, ArgumentTypeError, ScheduleError
from autoaccum.planning.noise_schedule import GROW, SHRINK, SMOOTHING, NoiseScale
from autoaccum.planning.schedule_kinds import (
    REPORTS,
    SUFFIXES,
    By,
    Constant,
    Doubling,
    Function,
    Geometric,
    Linear,
    Milestones,
    Progress,
    Schedule,
)

__all__ = [
    "GROW",
    "REPORTS",
    "SHRINK",
    "SMOOTHING",
    "SUFFIXES",
    "By",
    "Constant",
    "Doubling",
    "Function",
    "Geometric",
    "Linear",
    "Milestones",
    "NoiseScale",
    "Progress",
    "Schedule",
    "parse",
    "schedule_of",
]


def schedule_of(effective_batch: int | str | Schedule | Callable[[Progress], int]) -> Schedule:
    """Return what ``fit(effective_batch=...)`` takes as a schedule.

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
    # A class is callable too; who passes ``Linear`` has forgotten its arguments.
    if callable(effective_batch) and not isinstance(effective_batch, type):
        return Function(effective_batch)
    raise ArgumentTypeError(
        "effective_batch",
        effective_batch,
        "an int of at least 1, a schedule, its text such as '64, 1000:256', or a function of Progress",
        "Pass the samples you want per optimizer step.",
    )


def parse(text: str) -> Schedule:
    """Read a schedule from its text.

    A point in time is a number of steps, or with the suffix ``s`` of samples, with ``e`` of epochs.

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
        ArgumentTypeError: it is no text.
        ScheduleError: it cannot be read; says what was expected at which character.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError("text", text, "the text of a schedule, such as '64, 1000:256'")
    scanner = _Scanner(text)
    # A word in front says the kind; without one there are only numbers.
    word = scanner.find("linear|geometric|double|noise")
    if word is None:
        return _milestones(scanner)
    kinds: dict[str, type[Any]] = {"linear": Linear, "geometric": Geometric, "double": Doubling, "noise": NoiseScale}
    # All kinds begin with two batches, from and to, whatever their fields are called; all ramps go on with a duration.
    names = [field.name for field in fields(kinds[word])]
    found: dict[str, Any] = {}
    where: dict[str, int] = {}  # in the text each argument stands, for errors that only the schedule itself can find

    def keep(name: str, value: object) -> None:
        """Remember an argument, and where the token just taken stands."""
        found[name], where[name] = value, scanner.begin

    keep(names[0], scanner.number("a number of samples"))
    scanner.take(":", "':'")
    keep(names[1], scanner.number("a number of samples"))
    if word == "noise":
        # Both may be left out, and stand in this order, in which the schedule's own text has them.
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
    # What numbers are allowed only the schedule knows; where the wrong one stands only the scanner does.
    try:
        schedule: Schedule = kinds[word](**found)
    except ArgumentError as error:
        raise scanner.error(error.accepted, where[error.argument]) from None
    return schedule


def _milestones(scanner: _Scanner) -> Schedule:
    """Read a text without a word in front: one batch, perhaps with milestones behind it."""
    start = scanner.number("a number of samples, or linear, geometric, double or noise")
    points: list[tuple[int, int]] = []
    by: By = "steps"
    while scanner.find(","):
        point = scanner.number("a number of steps (with s: samples, with e: epochs)")
        begin, end = scanner.begin, scanner.end
        unit = scanner.unit()
        # The mistake is the unit, or where it is missing the place behind the number, where it should be.
        if points and unit != by:
            raise scanner.error(f"{by} like the milestone before", scanner.begin if SUFFIXES[unit] else end)
        # ``Milestones`` would find this too, but could not say where in the text it is.
        if points and point <= points[-1][0]:
            raise scanner.error(f"a milestone after {points[-1][0]}", begin)
        by = unit
        scanner.take(":", "':'")
        points.append((point, scanner.number("a number of samples")))
    scanner.take("$", "',' or the end of the text")
    return Milestones(start, points, by) if points else Constant(start)


class _Scanner:
    """A reader that takes one token of a text after the other; spaces between them are free."""

    def __init__(self, text: str) -> None:
        self.text = text
        # The place of the last token, counted from 0: its first character, and the one behind it.
        self.begin = self.end = 0

    def find(self, pattern: str) -> str | None:
        """Take the next token if it matches the pattern, and return it; else return None and stay."""
        # A compiled pattern's ``match`` begins at any place, where that of the module would need a copy of the rest.
        match = re.compile(rf"\s*({pattern})").match(self.text, self.end)
        if match is None:
            return None
        self.begin, self.end = match.span(1)
        return match[1]

    def take(self, pattern: str, expected: str) -> str:
        """Take the next token, which has to match the pattern, and return it."""
        token = self.find(pattern)
        if token is None:
            raise self.error(expected)
        return token

    def number(self, expected: str) -> int:
        """Take an int of at least 1, and return it."""
        # Digits, in groups as Python has them, and nothing else that ``int`` would read: no sign, no other scripts.
        digits = self.take("[0-9]+(_[0-9]+)*", expected)
        value = int(digits) if len(digits) < 100 else 2**63  # Python reads no more than some thousand digits
        if value >= 2**63:
            raise self.error("an int below 2**63", self.begin)
        if value < 1:
            raise self.error("an int of at least 1", self.begin)
        return value

    def unit(self) -> By:
        """Take the suffix of the number before, if it has one; return what that number counts."""
        suffix = self.find("[se]") or ""
        return next(by for by, known in SUFFIXES.items() if known == suffix)

    def error(self, expected: str, at: int | None = None) -> ScheduleError:
        """Make the error that something else was expected there.

        Args:
            expected: what can stand there.
            at: the character, from 0; None for the first one that no token took.
        """
        cure = ""
        if at is None:
            at = len(self.text) - len(self.text[self.end :].lstrip())
            # "1e6" was read as 1 epoch, and "5s0" as 5 samples: the mistake is the digit behind the letter, which is
            # not always the first that no token took.
            if re.match("[0-9][se][0-9]", self.text[at - 1 :]):
                at += 1
            if re.match("[0-9][se][0-9]", self.text[max(0, at - 2) :]):
                meant = "epochs" if self.text[at - 1] == "e" else "samples"
                cure = f"{self.text[at - 1]} means {meant}: write a number in full, such as 1_000_000."
        return ScheduleError(self.text, at + 1, expected, cure)
