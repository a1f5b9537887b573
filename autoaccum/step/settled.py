"""What windows have in common once they have settled, so that the next one need not find it out again.

Two windows in a row are settled if they were cut alike, and their micro-batches had the same graphs and counted the
same. The next one is run as they were: sizes, weights and divisors are known. Each micro-batch is compared with what
is expected of it; a window that differs is rolled back and run again like one of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autoaccum.step.item_counts import Tally
from autoaccum.step.terms import Conclusion, Hypothesis, Reduction


class Expected(NamedTuple):
    """What a micro-batch of a settled window is expected to show."""

    nodes: int
    """Nodes that its forward makes in the autograd graph."""
    root: str
    """The name of the last one, whose output is the loss."""
    reduction: Reduction
    """How the loss is reduced."""
    weight: float
    """What its gradient is multiplied by."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A window that the next one is expected to be like."""

    sizes: tuple[int, ...]
    """Its micro-batches."""
    expected: tuple[Expected, ...]
    """What each of them has shown."""
    hypothesis: Hypothesis | None
    """What micro-batches were measured to add up to."""
    conclusion: Conclusion
    """What they were taken for, seen together."""
    tally: Tally
    """What they count."""
    items: float
    """The sum of that."""
    correction: float
    """What its gradient was multiplied by at its end."""

    def loss(self, losses: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the loss of a window from those of its micro-batches; None if one may be a mean over nothing."""
        is_sum = self.conclusion.is_sum
        if len(losses) > 1 and not is_sum and not all(map(read_now, losses)):
            return None
        return self.tally.loss(losses, is_sum)


def read_now(number: torch.Tensor) -> float:
    """Return a number that lies on the host, without an operation, which a dispatch mode would see and may fail on."""
    return number.tolist()  # type: ignore[return-value]


def are_plain(reductions: Sequence[Reduction]) -> bool:
    """Return whether losses were reduced by numbers alone, which can be compared with those of another window."""
    for found in reductions:
        are_tensors = [isinstance(number, torch.Tensor) for number in (found.items, *found.constants)]
        if found.divisions or any(are_tensors) or any(term.tensors() for term in found.terms):
            return False
    return True
