"""States how the loss of a window may arise from those of its micro-batches: the hypotheses that a run measures.

The gradient of a window is (sum_j w_j g_j) / W, g_j being that of micro-batch j's loss. A hypothesis says what w_j is,
and W. With means over items, w_j counts the items of j, and W is their sum; with sums, w_j = W = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

SUMS: tuple[Hypothesis, ...] = ("sum", "sum and penalties")
"""Those by which each micro-batch counts once, whatever it holds."""

Doubt = tuple[str, str]
"""(why micro-batches may not add up to the loss of their window, what to do about it)"""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the micro-batches of a window, seen together, are."""

    is_sum: bool
    """Whether their sum is divided by what each was, rather than by the total of it."""
    doubt: Doubt | None = None
    """(why they may not add up to the loss of the window, what to do)"""


PLAIN_MEAN = Conclusion(is_sum=False)
"""The conclusion for losses whose graph leaves nothing to doubt, as for those whose items a user counts."""
PLAIN_SUM = Conclusion(is_sum=True)
"""The conclusion for losses that were measured to be sums."""
