"""The size to try where a trial tells no more than whether it fits: what can be told apart is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoaccum.planning.costs import Trial, bounds

GRID = 0.93
"""Where errors alone tell, look for sizes this far apart, or whole numbers where these are farther."""
MOST_ERRORS = 3
"""Out-of-memory errors that such a search may end in, where it may choose all of its sizes."""


def told_apart(trials: int, errors: int) -> int:
    """Return how many sizes can be told apart by so many trials of which so many may run out of memory.

    The first of them tells two cases apart: f(d, e) = f(d - 1, e - 1) + f(d - 1, e) + 1, which is the sum of the
    binomials (d over 1) to (d over e). Known as the egg-drop problem: Boardman, "The Egg-Drop Numbers", Mathematics
    Magazine 77 (2004).

    >>> told_apart(9, 3), told_apart(7, 3), told_apart(7, 1)
    (129, 63, 7)
    """
    return sum(math.comb(trials, failed) for failed in range(1, errors + 1))


def by_errors(fits: int, beyond: int, errors: int, *, is_open: bool = False) -> int | None:
    """Return the size to try between one that fits and one beyond, where a trial tells no more than whether it fits.

    The sizes between the two are thinned out to those 0.93 apart: the largest of them that fits is at least 0.93 of
    the largest that there is. Of the fewest trials that tell these apart, with as many errors as are left, the one
    that is returned is the first: the largest below which no more are left than the rest can tell after an error.

    Args:
        fits: the largest that fits, 1 at least.
        beyond: the smallest that does not, or that is of no use.
        errors: how many may still run out of memory, 1 at least.
        is_open: whether nothing has failed: then the last size that is of use is among those to be told apart.
    """
    # What is found is at least the last of these that fits, and what there is lies below the next.
    sizes, size = [], fits
    while (size := int(size / GRID) + 1) < beyond:
        sizes.append(size)
    if is_open and beyond - 1 > max(sizes, default=fits):
        sizes.append(beyond - 1)
    if not sizes:
        return None
    trials = 1
    while told_apart(trials, errors) < len(sizes):
        trials += 1
    return sizes[min(len(sizes) - 1, told_apart(trials - 1, errors - 1))]


def errors_left(history: Sequence[Trial]) -> int:
    """Return how many more errors a search may meet; one more halving, of two, where it has met all of them."""
    fits, _ = bounds(history)
    met = sum(not trial.fits and trial.micro_batch > fits for trial in history)
    return MOST_ERRORS - met if met < MOST_ERRORS else 2
