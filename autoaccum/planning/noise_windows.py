"""Which windows of a run are measured for the noise scale: ever fewer, by their number alone.

The scale moves fast when a run begins and ever more slowly then, so that windows are measured the more seldom the more
there were. As nothing but the number decides, a run that is resumed, replayed or repeated measures the same ones.
"""

from __future__ import annotations

OFTEN = 16
"""Windows of a run of which each one is measured; of the next as many it is every second one, then every third."""

SELDOM = 64
"""Measure one of so many windows at least."""

WORTH = 4
"""Windows that an estimate stands for at most: those before it were not measured, but are as like it as it is."""

_CIRCLE = 2**32
_GOLDEN = 2_654_435_769  # of the circle, by the golden ratio


def gap(number: int, most: int = SELDOM) -> int:
    """Return of how many windows one is measured, once ``number`` of them were run; ``most`` at most.

    >>> [gap(number) for number in (0, 15, 16, 32, 10_000)]
    [1, 1, 2, 3, 64]
    """
    return min(most, number // OFTEN + 1)


def is_due(number: int, most: int = SELDOM) -> bool:
    """Return whether the window after ``number`` others is one of those that are measured.

    >>> [number for number in range(16, 32) if is_due(number)]
    [18, 20, 23, 25, 26, 28, 31]
    """
    # Multiples of the golden ratio fall evenly on a circle, and nothing has to be remembered of the window before. Each
    # n-th window might always be the same of an epoch, and so of data that are not shuffled always the same samples.
    return number * _GOLDEN % _CIRCLE * gap(number, most) < _CIRCLE


def worth(number: int, most: int = SELDOM) -> int:
    """Return how many windows the estimate from the one after ``number`` others stands for."""
    return min(gap(number, most), WORTH)
