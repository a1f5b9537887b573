"""States how the loss of a window may arise from those of its micro-batches: the hypotheses that a run measures.

The gradient of a window is (sum_j w_j g_j) / W, g_j being that of micro-batch j's loss. A hypothesis says what w_j is,
and W. With means over items, w_j counts the items of j, and W is their sum; with sums, w_j = W = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

Hypothesis = str
"""A key of ``WORDS``. num_items: a mean over what the user counts. items: a mean over what its graph divides by. sum: a
sum over samples."""

WORDS: dict[str, str] = {
    "num_items": "a mean over what num_items counts",
    "items": "a mean over its items",
    "sum": "a sum over samples",
}
"""What people are told of each."""

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
