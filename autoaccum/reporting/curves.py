"""Curves of at most a few thousand points that look like those of a million windows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]
"""Numbers, shape ``(n,)``."""

BINS = 1000
"""Draw a curve of more than twice so many points by the least and the greatest value of so many parts."""
SMOOTH = 100
"""Take means over twice the windows divided by this, about each window: shorter runs are drawn as they are."""


def smoothed(x: Values, y: Values) -> tuple[Values, Values]:
    """Return a curve of means: of each value, or ``binned`` one, and of those around it, a fiftieth of them all.

    What is not finite is left out. A value says nothing of places far from it, however large it is.

    >>> smoothed(np.array([8, 16]), np.array([1.0, np.inf]))[1].tolist()
    [1.0, nan]
    """
    at, _, mean, _ = binned(x, y)
    around = np.ones(2 * (len(at) // SMOOTH) + 1)
    # Sums by convolution and not as differences of a running sum: there one huge value would cost all later ones their
    # digits. At the ends there are fewer values around, so each sum is divided by how many it is of.
    number = np.convolve(np.isfinite(mean), around, "same")
    sums = np.convolve(np.nan_to_num(mean), around, "same")
    return at, np.where(number > 0, sums / np.maximum(number, 1), np.nan)


def binned(x: Values, y: Values) -> tuple[Values, Values, Values, Values]:
    """Return x, and the least, mean and greatest finite y, of 1000 parts; at most 2000 points are as they are."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= 2 * BINS:
        return x, y, y, y
    # reduceat takes the values from each start to the next; no part is empty, for there are more values than parts.
    starts = np.linspace(0, len(x), BINS, endpoint=False).astype(int)
    number = np.add.reduceat(np.isfinite(y).astype(int), starts)
    sums = np.add.reduceat(np.nan_to_num(y), starts)
    mean = np.where(number > 0, sums / np.maximum(number, 1), np.nan)
    # fmin and fmax leave NaN out, unless there is nothing else.
    return x[starts], np.fmin.reduceat(y, starts), mean, np.fmax.reduceat(y, starts)


def thinned(x: Values, y: Values) -> tuple[Values, Values]:
    """Return a curve of at most 2000 points that looks the same: of each part the least and the greatest value."""
    at, low, _, high = binned(x, y)
    if len(at) == len(x):
        return at, high
    # Both at the part's first x, in the order in which the curve goes on: one that rises goes through the least first.
    first = np.searchsorted(x, at)
    last = np.append(first[1:], len(x)) - 1
    rises = y[last] >= y[first]
    pairs = np.stack((np.where(rises, low, high), np.where(rises, high, low)), axis=1)
    return np.repeat(at, 2), pairs.ravel()
