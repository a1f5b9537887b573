"""States how the loss of a window may arise from those of its micro-batches: the hypotheses that a run measures.

The gradient of a window is (sum_j w_j g_j) / W, g_j being that of micro-batch j's loss. A hypothesis says what w_j is,
and W. With means over items, w_j counts the items of j, and W is their sum; with sums, w_j = W = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autoaccum.loss.conclusions import conclude
from autoaccum.loss.reductions import Reduction

Hypothesis = Literal["num_items", "items", "samples", "sum", "sum and penalties"]
"""num_items: a mean over what the user counts. items: a mean over what its graph divides by. samples: a mean over
samples. sum: a sum over samples. sum and penalties: the same, but terms of parameters alone stand in it once."""

WORDS: dict[Hypothesis, str] = {
    "num_items": "a mean over what num_items counts",
    "items": "a mean over the items that its graph counts",
    "samples": "a mean over samples",
    "sum": "a sum over samples",
    "sum and penalties": "a sum over samples, beside terms of the parameters alone",
}
"""What people are told of each."""


def is_sum(hypothesis: Hypothesis) -> bool:
    """Return whether by a hypothesis each micro-batch counts once, whatever it holds."""
    return hypothesis in ("sum", "sum and penalties")


def in_order(sizes: Sequence[int], reductions: Sequence[Reduction], *, counts_items: bool) -> list[Hypothesis]:
    """List the hypotheses in the order in which they are to be measured: what is likely first.

    Args:
        sizes: samples of some micro-batches.
        reductions: what the graph of each one's loss shows.
        counts_items: whether the user counts items.
    """
    # What the graph proposes comes before what it does not, so that most runs measure one hypothesis only.
    sums: list[Hypothesis] = ["sum"]
    if any(reduction.constants for reduction in reductions):
        sums = ["sum and penalties", "sum"]
    means: list[Hypothesis] = ["items", "samples"]
    sums_first = bool(reductions) and conclude(sizes, reductions).is_sum
    found = [*sums, *means] if sums_first else [*means, *sums]
    return ["num_items", *found] if counts_items else found
