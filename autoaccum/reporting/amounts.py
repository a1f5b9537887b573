"""Numbers, rates and durations as texts."""

from __future__ import annotations

import math
from itertools import pairwise


def format_rate(per_second: float) -> str:
    """Format a rate for people.

    >>> format_rate(17023.4), format_rate(17.0234)
    ('17,023', '17.02')
    """
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> [format_seconds(s) for s in (0.0123, 1.5, 75, 7380, 200_000)]
    ['12 ms', '1.5 s', '1 min 15 s', '2 h 3 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.001 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    # The largest unit that there is one of, and of the next smaller one the rest.
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (part, part_name) in pairwise(units):
        if seconds >= size:
            rest = int(seconds % size) // part
            return f"{int(seconds // size)} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError(seconds)
