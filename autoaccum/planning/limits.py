"""The limit that plans keep to, and the target below it, as they were last heard of."""

from __future__ import annotations

CLEARLY_OVER = 1.05
"""Times the limit from which on it is passed where nobody else keeps it: a heap is a little over now and then."""
FEW = 4
"""Let micro-batches of up to so many times the smallest use the headroom: one sample more saves a fifth of them."""


class Limits:
    """What micro-batches may take."""

    def __init__(self, limit_bytes: int, headroom: float, *, is_enforced: bool = False) -> None:
        """Begin with a limit, of which plans leave the fraction ``headroom`` free.

        Args:
            limit_bytes: what may be used.
            headroom: the fraction of it that plans leave free.
            is_enforced: whether the device refuses what passes it: then few samples may try all of it, at the cost of
                one error.
        """
        self.headroom = headroom
        self.may_use_all = is_enforced
        """Whether micro-batches of few samples may use the headroom; until one of them has failed."""
        self.least_bytes = 0
        """The peak of the smallest micro-batch; 0 until it is known."""
        self.floor_bytes = 0
        """The most of what no plan makes smaller, such as an optimizer's step; 0 while nothing is known of it."""
        self.heed(limit_bytes)

    def heed(self, limit_bytes: int) -> None:
        """Take over the limit as it is now."""
        # The target goes with it, and is kept: it is asked for in every window.
        self.limit_bytes = limit_bytes
        """Bytes that this process may use."""
        self.target_bytes = self.target_of(limit_bytes)
        """The peak that plans keep to."""

    def target_of(self, limit_bytes: int) -> int:
        """Return the peak that plans would keep to under such a limit."""
        return target_bytes(limit_bytes, self.headroom, max(self.least_bytes, self.floor_bytes))

    def learn_least(self, peak_bytes: int) -> None:
        """Take over the peak of the smallest micro-batch, which moves the target where little is free above it."""
        # Were the target below what the smallest needs, every trial that is larger would be refused.
        self.least_bytes = peak_bytes
        self.heed(self.limit_bytes)

    def learn_floor(self, peak_bytes: int) -> None:
        """Take over the peak of what no plan makes smaller: micro-batches that take no more cost nothing."""
        if peak_bytes > self.floor_bytes:
            self.floor_bytes = peak_bytes
            self.heed(self.limit_bytes)

    def few(self, smallest: int) -> int:
        """Return the samples up to which a micro-batch may use the headroom: the smallest may, there is no other."""
        return FEW * smallest if self.may_use_all else smallest

    def allows(self, peak_bytes: int, *, is_few: bool) -> bool:
        """Return whether a peak is acceptable: a micro-batch of few samples may use the headroom."""
        return peak_bytes <= (self.limit_bytes if is_few else self.target_bytes)


def target_bytes(limit_bytes: int, headroom: float, least_bytes: int) -> int:
    """Return the peak that plans keep to.

    Args:
        limit_bytes: what this process may use.
        headroom: the fraction of it that is kept free.
        least_bytes: the peak of what there is under any plan, the smallest micro-batch say; 0 while it is not known.

    >>> target_bytes(1000, 0.05, 400), target_bytes(1000, 0.05, 980)
    (950, 999)
    """
    target = int(limit_bytes * (1 - headroom))
    if not target < least_bytes <= limit_bytes:
        return target
    # The least there can be is past it already, and within the limit: free stays the same fraction of what is left
    # above that.
    return int(least_bytes + (limit_bytes - least_bytes) * (1 - headroom))
