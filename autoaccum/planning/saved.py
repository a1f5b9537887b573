"""What the state of a tuner, of a validation's trials and of a noise scale may be, as checkpoints hold them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from autoaccum._kinds import Check, a, entries, every, number, of_record, optional, parts, refuse, whole
from autoaccum.planning.costs import SteppedModel, Trial


# None is so large that its square overflows a float, or the models of memory and time with it.
def trials_of(kind: type = Trial, *, in_full: bool = False) -> Check:
    """Return the check of trials; ``in_full``: with every field, as checkpoints have them."""
    seconds = optional(number(0))
    of_one = of_record(
        kind, in_full=in_full, later=("allocated_bytes",), micro_batch=whole(1), length=whole(1), seconds=seconds
    )
    return every(of_one)


TRIALS = trials_of(in_full=True)
"""Trials in a checkpoint, oldest first."""
NOISE = parts(number(), number())
"""The averages that a noise scale is made of; scattered estimates may be negative."""
PLAN = every(whole(1), tuple)
"""Sizes of micro-batches."""


def _times(value: Any, entry: str) -> None:
    """Check the points of a time model: (weight, seconds), the weights rising."""
    every(parts(whole(1), number(0)), tuple)(value, entry)
    if not value or any(first >= second for (first, _), (second, _) in pairwise(value)):
        refuse(entry, "is no curve over rising sizes")


def _peaks(value: Any, entry: str) -> None:
    """Check the peaks of a memory model: (bytes on its line, bytes that were measured there), both rising."""
    every(parts(number(), number()), tuple)(value, entry)
    if not value or any(first >= second or low > high for (first, low), (second, high) in pairwise(value)):
        refuse(entry, "is no curve that rises")


def _window(value: Any, entry: str) -> None:
    """Check (samples of a full window, their lengths, longest first)."""
    parts(whole(), optional(every(whole(1), tuple)))(value, entry)
    num_samples, lengths = value
    if lengths is not None and (len(lengths) != num_samples or list(lengths) != sorted(lengths, reverse=True)):
        refuse(entry, f"has {len(lengths)} lengths of {num_samples} samples, or not the longest first")


TUNER = entries(
    {
        "loads": entries(
            {
                "trials": TRIALS,
                "weighed": TRIALS,
                "prior": optional(of_record(SteppedModel, in_full=True, later=("peaks",), peaks=_peaks)),
            }
        ),
        "past": TRIALS,
        "times": optional(_times),
        "is_timing": a(bool),
        "searching": a(bool),
        "smallest": whole(1),
        "largest": whole(1),
        "least_bytes": whole(),
        "window": _window,
        "_known": whole(),
        "_is_ragged": optional(a(bool)),
        "_cap": optional(whole(1)),
        "_doubts_plateau": a(bool),
        "_best": whole(),
        "_refused": optional(parts(whole(1), whole())),
        "_enough": optional(whole()),
        "_goal": optional(whole(1)),
        "_grown_from": whole(),
    },
    optionally={"_warm": whole(1)},
)
"""The state of a tuner, under the names of the first version of the format."""
