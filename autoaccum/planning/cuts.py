"""Cuts of windows into micro-batches: arithmetic alone, for every window of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

Lengths = Sequence[int] | None
"""How long each sample of a window is, the longest first; None where they are alike."""


def are_alike(lengths: Lengths) -> bool:
    """Return whether the samples of a window all have one length, as those of a batch that was padded."""
    return lengths is None or lengths[0] == lengths[-1]  # sorted by length


def is_padded(lengths: Lengths) -> bool:
    """Return whether they are told to have one length, which may be another one in each window."""
    return lengths is not None and are_alike(lengths)


@lru_cache(maxsize=64)
def near_equal(total: int, count: int) -> tuple[int, ...]:
    """Return ``count`` sizes that sum to ``total`` and differ by one at most, the larger first.

    So memory peaks early in a window: where it does not suffice, little work is lost.
    """
    size, larger = divmod(total, max(count, 1))  # a rank without samples has no micro-batches: 0 of 0
    return (size + 1,) * larger + (size,) * (count - larger)


@lru_cache(maxsize=64)
def cut(num_samples: int, max_micro_batch: int, min_micro_batch: int = 1) -> tuple[int, ...]:
    """Return the sizes of ``plan`` on one rank, without its checks: for every window of a run.

    None is below ``min_micro_batch``, unless the window is; that may take a size beyond ``max_micro_batch``: 5 samples
    in micro-batches of 2 and none of 1 are (3, 2).
    """
    fewest = -(-num_samples // max_micro_batch)  # rounded up: fewer would be too large
    most = num_samples // min_micro_batch  # rounded down: more would be too small
    return near_equal(num_samples, max(1, min(fewest, most)))


AS_CHEAP = 0.01
"""Take plans for equally fast whose times differ by less than this fraction."""


def cheapest(
    num_samples: int, max_micro_batch: int, seconds: Callable[[int], float], min_micro_batch: int = 1
) -> tuple[int, ...]:
    """Return the near-equal cut of a window that takes least time, of those with micro-batches of an allowed size.

    Of cuts that are as cheap one into equal sizes is preferred, for it needs no second size to be compiled or to
    fragment the allocator's memory, and then the one with the fewest micro-batches.

    Args:
        num_samples: samples of the window.
        max_micro_batch: the largest size that fits.
        seconds: (micro-batch) -> its time.
        min_micro_batch: the smallest size, unless the window is smaller.

    >>> steps = lambda size: -(-size // 32)  # a device that takes samples by 32
    >>> cheapest(256, 100, steps)
    (64, 64, 64, 64)
    """
    fewest = len(cut(num_samples, max_micro_batch, min_micro_batch))
    most = max(fewest, num_samples // max(min_micro_batch, 1))
    # Numbers of micro-batches that may be the fastest. A window of n samples has n of them, but only about 2 * sqrt(n)
    # different largest sizes.
    counts, count = {fewest, most}, fewest
    while count < most:
        # Time is a straight line in the count while the sizes are the same two: its ends are enough. The next largest
        # size is reached with the count rounded up, and the count rounded down is the last before it.
        size = -(-num_samples // count) - 1
        counts |= {num_samples // size, -(-num_samples // size)}
        count = -(-num_samples // size)
    times = {count: _time(num_samples, count, seconds) for count in counts if fewest <= count <= most}
    bound = min(times.values()) * (1 + AS_CHEAP)
    as_cheap = [count for count, time in times.items() if time <= bound]
    return near_equal(num_samples, min(as_cheap, key=lambda count: (num_samples % count > 0, count)))


def _time(num_samples: int, count: int, seconds: Callable[[int], float]) -> float:
    """Return the seconds of a window that is cut into ``count`` near-equal micro-batches."""
    size, larger = divmod(num_samples, count)
    time_of_larger = seconds(size + 1) if larger else 0.0
    return larger * time_of_larger + (count - larger) * seconds(size)


def cut_by_weight(weights: Sequence[int], max_weight: int, min_micro_batch: int = 1) -> tuple[int, ...]:
    """Return the sizes of the fewest micro-batches that weigh at most ``max_weight``, padding included.

    They are made as equal in weight as their number allows. One with fewer than twice ``min_micro_batch`` samples may
    weigh more, for it cannot be cut in two.

    Args:
        weights: the weight of each sample, the heaviest first: neighbours are padded least.
        max_weight: the most that a micro-batch may weigh, which is its samples times the weight of its first: the
            others are padded to that.
        min_micro_batch: the smallest size, unless there are fewer samples.

    >>> cut_by_weight([100, 60, 50, 20, 20, 10, 10, 10], max_weight=120)
    (1, 2, 5)
    """
    fewest = _fill(weights, max_weight, min_micro_batch)
    # To fill one after the other leaves little for the last. The least weight with which as few are enough makes them
    # equal: it is looked for by bisection, between half the weight, which rarely is enough, and all of it.
    low, high = max_weight // 2, max_weight
    while high - low > max(1, max_weight // 64):
        middle = (low + high) // 2
        sizes = _fill(weights, middle, min_micro_batch)
        if len(sizes) > len(fewest):
            low = middle
        else:
            fewest, high = sizes, middle
    return fewest


def _fill(weights: Sequence[int], max_weight: int, min_micro_batch: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches that take as many of the samples as they may, one after the other."""
    sizes: list[int] = []
    position = 0
    while left := len(weights) - position:
        size = min(left, max(max_weight // weights[position], min_micro_batch, 1))
        # Too few would be left for one more: take them too, or leave it some of these where there are enough.
        if 0 < left - size < min_micro_batch:
            size = left if left < 2 * min_micro_batch else left - min_micro_batch
        sizes.append(size)
        position += size
    return tuple(sizes)
