"""The losses of a validation's micro-batches, and the loss over everything that they come to.

What lies on a device stays there until the end, or until so much has come together, and is read by one copy: else each
micro-batch would wait for its own forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoaccum.loss.conclusions import BY_ONE, PENALTIES, SEVERAL, conclude, stands_for_none
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reading import Numbers
from autoaccum.loss.terms import Reduction, divisor_of, without_none
from autoaccum.memory.oom import insist
from autoaccum.window.ending import Late
from autoaccum.window.named import named_loss

AT_ONCE = 1024
"""Micro-batches whose losses are read together: a device has few bytes for each, but not without end."""

Part = tuple[str, float, Reduction]
"""A loss of a micro-batch: its name, its value, and how it was reduced."""


@dataclass(slots=True)
class Loss:
    """The loss of a micro-batch, or several that are added."""

    values: Mapping[str, torch.Tensor]
    """Each by its name, "" for one alone, in memory of its own: it is read when others have been computed."""
    reductions: Mapping[str, Reduction]
    """How each was reduced, without its graph."""
    num_samples: int
    """Of the micro-batch."""

    def want(self, numbers: Numbers) -> None:
        """Ask for the values, and for what they are means over."""
        numbers.want(self.values.values())
        numbers.want_of(self.reductions.values())

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        self.values = {name: numbers.tensor(value) for name, value in self.values.items()}
        self.reductions = {name: numbers.reduction(reduction) for name, reduction in self.reductions.items()}

    def parts(self) -> list[Part]:
        """Return each, once they are read; one that is over nothing counts nothing."""
        found = []
        for name, value in self.values.items():
            number, reduction = value.item(), self.reductions[name]
            # A mask's count is often kept from 0 by clamp(min=1).
            is_none = not math.isfinite(float(reduction.items)) or stands_for_none(reduction, number, self.num_samples)
            reduction = replace(reduction, items=0.0) if is_none else reduction
            found.append((name, number if reduction.items else 0.0, reduction))
        return found


class Losses:
    """The losses of all micro-batches so far."""

    def __init__(self) -> None:
        """Begin with none."""
        self._unread: list[tuple[int, Loss]] = []
        # Each micro-batch's by itself, joined at the end: how they go together shows only when all are there.
        self._found: list[tuple[int, list[Part]]] = []

    @property
    def num_samples(self) -> int:
        """Count the samples of those that were read."""
        return sum(size for size, _ in self._found)

    def add(self, num_samples: int, loss: Loss) -> None:
        """Add that of a micro-batch."""
        # Nothing is read here, where the next forward is to be launched.
        self._unread.append((num_samples, loss))
        if len(self._unread) >= AT_ONCE:
            insist(lambda: read([self]), "the losses of a validation were read")

    def want(self, numbers: Numbers) -> None:
        """Ask for those that are yet to be read."""
        for _, loss in self._unread:
            loss.want(numbers)

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        for _, loss in self._unread:
            loss.take_read(numbers)
        # All of them or none: where memory runs out on the way it is done again.
        found = [(num_samples, loss.parts()) for num_samples, loss in self._unread]
        self._found += found
        self._unread = []

    def joined(self, hypothesis: Hypothesis | None = None) -> tuple[float, dict[str, float]]:
        """Return the loss over everything, of what was read, NaN where nothing counts; and each of several, by name.

        Args:
            hypothesis: what losses were measured to be; None where graphs alone tell.
        """
        # One that some micro-batches lack is joined over the others.
        found = {name: _joined(values, hypothesis) for name, values in self.by_name().items()}
        totals = {name: total for name, total in found.items() if total is not None}
        named = {named_loss(name): total for name, total in totals.items() if name}
        return sum(totals.values()) if totals else math.nan, named

    def are_doubtful(self) -> bool:
        """Return whether graphs speak against one weight for micro-batches, as by terms with different counts."""
        # Of all micro-batches together, for one alone leaves more in doubt.
        columns = [list(zip(*values, strict=True)) for values in self.by_name().values()]
        return any(_is_doubtful(sizes, column) for sizes, _, column in columns if len(sizes) > 1)

    def by_name(self) -> dict[str, list[tuple[int, float, Reduction]]]:
        """Return (samples, value, how it was reduced) of each loss in each micro-batch that has it."""
        found: dict[str, list[tuple[int, float, Reduction]]] = {}
        for size, parts in self._found:
            for name, value, reduction in parts:
                found.setdefault(name, []).append((size, value, reduction))
        return found


def read(late: Sequence[Late]) -> None:
    """Read all that is left on a device, together."""
    numbers = Numbers()
    for each in late:
        each.want(numbers)
    numbers.read()
    for each in late:
        each.take_read(numbers)


def _is_doubtful(sizes: Sequence[int], reductions: Sequence[Reduction]) -> bool:
    is_unknown = any(term.kind == "unknown" for reduction in reductions for term in reduction.terms)
    return is_unknown or conclude(sizes, reductions).doubt in (SEVERAL, BY_ONE, PENALTIES)


def _joined(values: list[tuple[int, float, Reduction]], hypothesis: Hypothesis | None) -> float | None:
    """Return a loss over everything; None where nothing counts."""
    there = [(size, value, reduction) for size, value, reduction in values if float(reduction.items)]
    if not any(without_none(float(reduction.items)) for _, _, reduction in there):
        return None
    counts = [float(reduction.items) for _, _, reduction in there]
    is_sum = hypothesis == "sum"
    if hypothesis is None:
        is_sum = conclude([size for size, _, _ in there], [reduction for _, _, reduction in there]).is_sum
    weighted = sum(value * divisor_of(count) for (_, value, _), count in zip(there, counts, strict=True))
    # A sum has the same divisor in every micro-batch, whatever is in it; divided by one of them it is the sum of all.
    # Of a single micro-batch there is nothing to compare, and both are the same.
    return weighted / (counts[0] if is_sum and len(there) > 1 else sum(counts))
