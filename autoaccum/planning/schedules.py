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

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.planning.noise import GROW, SHRINK, SMOOTHING, NoiseScale
from autoaccum.planning.schedule_kinds import (
    REPORTS,
    SUFFIXES,
    By,
    Constant,
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


_N = "([0-9](?:_?[0-9]){0,17})"
_BY: dict[str, By] = {suffix: by for by, suffix in SUFFIXES.items()}
_TEXTS = (
    "'256', '64, 1000:256, 5000:1024', 'linear 64:1024 over 5000', 'geometric 64:1024 over 10e' or 'noise 64:1024', "
    "with numbers below 10**18 and points of one unit"
)


def _match(form: str, text: str) -> re.Match[str] | None:
    """Match a text with a form in which N is a number and spaces are free."""
    return re.fullmatch(rf" {form} ".replace("N", _N).replace(" ", r"\s*"), text)


def schedule_of(effective_batch: int | str | Schedule | Callable[[Progress], int]) -> Schedule:
    """Return what ``fit(effective_batch=...)`` takes as a schedule.

    Raises:
        ArgumentError: an int below 1, or a text that cannot be read.
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
    ...              "noise 64:1024 smoothing 0.9 patience 5"):
    ...     print(repr(parse(text)))
    Constant(effective_batch=256)
    Milestones(start=64, points=((10000, 256),), by='samples')
    Linear(start=64, end=1024, over=10, by='epochs')
    Geometric(start=64, end=1024, over=5000, by='steps')
    NoiseScale(min=64, max=1024, smoothing=0.9, patience=5)

    Raises:
        ArgumentTypeError: it is no text.
        ArgumentError: it cannot be read, or a number in it is of no use.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError("text", text, "the text of a schedule, such as '64, 1000:256'")
    try:
        if ramp := _match("(linear|geometric) N : N over N ([se]?)", text):
            kind, (start, end, over) = Linear if ramp[1] == "linear" else Geometric, map(int, ramp.group(2, 3, 4))
            return kind(start, end, over, _BY[ramp[5]])
        if noise := _match(r"noise N : N (?:smoothing ([0-9.e-]+))? (?:patience N)?", text):
            fewest, most, smoothing, patience = noise.groups()
            return NoiseScale(int(fewest), int(most), float(smoothing or SMOOTHING), int(patience or 10))
        if constant := _match("N", text):
            return Constant(int(constant[1]))
        if _match("N(?: , N [se]? : N)+", text):
            first, *others = (re.split(r"([se]?)\s*:", part) for part in text.split(","))
            if len(units := {suffix for _, suffix, _ in others}) == 1:
                return Milestones(int(first[0]), [(int(at), int(batch)) for at, _, batch in others], _BY[units.pop()])
    except ArgumentError as error:
        raise ArgumentError("effective_batch", text, f"{error.accepted} ({error.argument})") from None
    except ValueError:  # of a smoothing that is no number
        pass
    raise ArgumentError("effective_batch", text, _TEXTS, "The letter s counts samples, and e epochs.")
