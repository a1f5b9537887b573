"""Plans, for people who only want the arithmetic: how a window is cut on every rank.

>>> plan(effective_batch=256, max_micro_batch=100).sizes
(86, 85, 85)
>>> plan(effective_batch=7, max_micro_batch=2, world_size=2).ranks
((2, 2), (2, 1))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoaccum._checks import positive_int
from autoaccum.errors import ArgumentError
from autoaccum.planning.cuts import near_equal

MOST_PIECES = 10**7
"""Micro-batches, over all ranks, that a plan may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The sizes of the micro-batches that a window is cut into, on every rank."""

    # Rank by rank and not as two numbers, for neither need divide the other: shares and sizes differ by one.
    ranks: tuple[tuple[int, ...], ...]
    """Each rank's micro-batch sizes in samples, in order; a rank beyond the effective batch has none."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the samples of every micro-batch, rank after rank.

        They sum to the effective batch and differ by one at most.
        """
        return tuple(size for rank in self.ranks for size in rank)

    @property
    def effective_batch(self) -> int:
        """Return the samples per optimizer step, over all ranks."""
        return sum(self.sizes)

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches per optimizer step on one rank, the busiest where they differ."""
        # The first ranks have the larger shares: see ``near_equal``.
        return len(self.ranks[0])


def plan(effective_batch: int, max_micro_batch: int, world_size: int = 1) -> Plan:
    """Return the fewest near-equal micro-batches, none above ``max_micro_batch``, that sum to ``effective_batch``.

    Args:
        effective_batch: samples per optimizer step, over all ranks.
        max_micro_batch: samples that fit into one forward and backward on one device.
        world_size: ranks that share the window.

    Raises:
        ArgumentError: an argument is not an int of at least 1, or there would be more micro-batches than can be held.
    """
    positive_int("effective_batch", effective_batch, "Pass the samples you want per optimizer step.")
    positive_int("max_micro_batch", max_micro_batch, "Pass the samples that fit on the device at once.")
    positive_int("world_size", world_size, "Pass the number of processes that train together.")
    # Each has an entry of its own: a plan of more could not be held, and would be no use.
    each = -(-effective_batch // world_size)
    if world_size > MOST_PIECES or world_size * -(-each // max_micro_batch) > MOST_PIECES:
        accepted = f"a plan of at most {MOST_PIECES:,} micro-batches over {world_size} ranks"
        raise ArgumentError("max_micro_batch", max_micro_batch, accepted, "Check which of the numbers is too large.")
    # Between ranks first, then each rank's share by itself, so that no rank has two samples more than another.
    shares = near_equal(effective_batch, world_size)
    # As many steps on every rank, where it has the samples for them: a rank with fewer would wait for the others.
    # The first share is the largest.
    steps = -(-shares[0] // max_micro_batch)
    return Plan(ranks=tuple(near_equal(share, min(steps, share)) for share in shares))


def sizes_text(sizes: Iterable[int]) -> str:
    """Return a plan as micro-batch x number, the largest first.

    >>> sizes_text((86, 85, 85))
    '86 x 1 + 85 x 2'
    """
    # A plan may have thousands of micro-batches, of two sizes at most unless samples differ in length.
    return " + ".join(f"{size} x {count}" for size, count in sorted(Counter(sizes).items(), reverse=True))
