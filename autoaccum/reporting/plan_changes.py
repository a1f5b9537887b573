"""How the plans of a run changed, read from its records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import is_by_length, is_scheduled


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """Steps for which one micro-batch size was planned."""

    first: int
    """Index of the first step."""
    end: int
    """Index after the last one."""
    micro_batch: int
    """Largest micro-batch in the plan."""
    predicted_bytes: int | None
    """Predicted peak; None without a memory model, and after a re-plan."""
    is_by_length: bool = False
    """Whether samples differ in length, so that each step has sizes of its own."""


def replans(run: Run) -> list[tuple[int, tuple[int, ...], tuple[int, ...], str]]:
    """Return (step, old, new, reason) of each re-plan that the schedule did not ask for."""
    columns = run.events["Replanned"]
    rows = zip(columns["step"].tolist(), columns["old"], columns["new"], columns["reason"], strict=True)
    return [row for row in rows if not is_scheduled(row[1], row[2])]


def settled(run: Run) -> list[tuple[int, tuple[int, ...], str]]:
    """Return (steps before it, sizes, reason) of each plan that was settled on and differs from the one before."""
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    # As in the table of plans: each by the first of its windows.
    rows = zip(planned["step"] + 1, planned["time"], planned["sizes"], planned["reason"], strict=True)
    told: list[tuple[Any, ...]] = [(*plan, None) for plan in rows]
    told += zip(*(replanned[field] for field in ("step", "time", "new", "reason", "old")), strict=True)
    found: list[tuple[int, tuple[int, ...], str]] = []
    last: tuple[int, ...] = ()
    for step, _, sizes, reason, old in sorted(told, key=lambda one: one[:2]):
        if old is None and sizes != last:
            found.append((int(step) - 1, sizes, reason))
        # A plan that memory has changed for the short window of an epoch's end is not the one that stands.
        if old is None or not last or is_scheduled(old, sizes) or sum(sizes) == sum(last):
            last = sizes
    return found


def tried_again(run: Run) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first step, number, plan before) of windows that were cut otherwise until another plan was settled on.

    As where windows took other times than those by which the first was chosen, so that plans were compared once more.
    """
    steps, asked = run.windows["step"], run.windows["effective_batch"]
    largest, number = run.windows["micro_batch"], run.windows["accumulation_steps"]
    # What else has changed between two of them is told by itself.
    changes = np.concatenate([run.events[name]["step"] for name in ("Replanned", "MemorySaving")])

    def cut_otherwise(after: int, until: float, sizes: tuple[int, ...]) -> NDArray[Any] | None:
        is_full = (steps > after) & (steps <= until) & (asked == sum(sizes))
        return steps[is_full & ((largest != max(sizes)) | (number != len(sizes)))] if is_full.any() else None

    plans = settled(run)
    # Where samples differ in length each window is cut by its own: then those after the last plan are as well.
    rest = cut_otherwise(plans[-1][0], math.inf, plans[-1][1]) if plans else None
    if rest is None or len(rest):
        return []
    found = []
    for (after, sizes, _), (until, _, _) in pairwise(plans):
        others = cut_otherwise(after, until, sizes)
        if others is not None and len(others) and not np.any((changes > after) & (changes <= until)):
            found.append((int(others[0]), len(others), sizes))
    return found


def ran_otherwise(run: Run) -> tuple[int, tuple[int, ...]] | None:
    """Return (number, sizes) of the last steps if they ran in another plan than the last one recorded; else None.

    A resumed run may continue in another plan without recording it. Only full batches of equal samples are compared.
    """
    plans, windows = settled(run), run.windows
    if not plans or is_by_length(plans[-1][1]) or len(run.events["Shared"]["step"]):
        return None
    after, sizes, _ = plans[-1]
    if (run.events["Replanned"]["step"] > after).any():  # reported as a re-plan
        return None
    is_full = (windows["step"] > after) & (windows["effective_batch"] == sum(sizes))
    largest, number = windows["micro_batch"][is_full], windows["accumulation_steps"][is_full]
    # Samples that differ in length are split unequally, each step in its own way.
    if not len(largest) or (largest != -(-sum(sizes) // number)).any():
        return None
    differs = number != number[-1]
    count = len(number) - (int(np.flatnonzero(differs)[-1]) + 1 if differs.any() else 0)
    size, more = divmod(sum(sizes), int(number[-1]))
    ran = (size + 1,) * more + (size,) * (int(number[-1]) - more)
    return None if ran == sizes else (count, ran)


def periods(run: Run) -> list[Period]:
    """Return how windows were to be cut, in order; a prediction stands for as long as its micro-batch is planned."""
    steps = run.windows["step"]
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    # What is planned after a window is for the next ones; a re-plan is of the window that runs.
    starts = [
        *zip(planned["time"], np.searchsorted(steps, planned["step"], "right"), planned["sizes"], strict=True),
        *zip(replanned["time"], np.searchsorted(steps, replanned["step"], "left"), replanned["new"], strict=True),
    ]
    # Of the same indices; a re-plan records none.
    predictions: list[int | None] = [*planned["predicted_bytes"], *([None] * len(replanned["step"]))]
    found: list[tuple[int, int, int | None, bool]] = []  # first window, largest micro-batch, prediction, by length
    # In the order in which they happened: two of the same window tell by their time which came last.
    for index in sorted(range(len(starts)), key=lambda index: starts[index][0]):
        _, first, sizes = starts[index]
        predicted, largest = predictions[index], max(sizes)
        is_replan = index >= len(planned["step"])
        if is_replan and found and found[-1][1] == largest:  # only the number of micro-batches has changed
            continue
        found.append((int(first), largest, predicted, is_by_length(sizes)))
    # Each ends where the next begins, the last one with the run. One that a re-plan replaced at once has no window.
    return [
        Period(first=first, end=end, micro_batch=largest, predicted_bytes=predicted, is_by_length=by_length)
        for (first, largest, predicted, by_length), (end, *_) in pairwise([*found, (len(run), 0, None, False)])
        if end > first
    ]


def batch_range(values: NDArray[Any]) -> str:
    """Return the smallest and the largest effective batch, as a text."""
    if not len(values):
        return "unknown"
    # The last batch may hold the samples that were left over.
    if len(values) > 1 and values[-1] < values[:-1].min() and values[:-1].min() == values[:-1].max():
        values = values[:-1]
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def last_reason(run: Run) -> str | None:
    """Return the reason of the plan that stands at the end; None before the first plan."""
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    rows = [*zip(planned["step"] + 1, planned["time"], planned["reason"], strict=True)]
    changed = zip(*(replanned[field] for field in ("step", "time", "reason", "old", "new")), strict=True)
    rows += [(step, time, reason) for step, time, reason, old, new in changed if not is_scheduled(old, new)]
    return str(max(rows)[2]) if rows else None
