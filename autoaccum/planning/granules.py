"""Cuts windows into micro-batches that hold whole groups of samples: the arithmetic of ``batch_norm="ghost:32"``.

A *granule* is a run of samples of the window that no cut may divide: samples 0 to 31, 32 to 63, and so on. The last one
has what is left of the window. A rest of one sample joins the granule before it, for one has no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoaccum.planning import cuts

OF_FEW = 4
"""Measure with groups of so many samples: statistics of two are a sign, whose gradient is next to nothing."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Whose statistics BatchNorm layers in training mode normalise by."""

    kind: Literal["micro", "ghost", "frozen"] = "micro"
    """Those of a micro-batch, of groups of the window, or the running ones, which stay as they are."""
    group: int = 1
    """Samples of a group; 1 where there are no groups."""

    def of_few(self) -> Statistics:
        """Return the same of groups that are no larger than they have to be, so that few samples show what they do."""
        return Statistics(self.kind, min(self.group, OF_FEW))

    def __str__(self) -> str:
        """Return it as users write it."""
        return f"ghost:{self.group}" if self.kind == "ghost" else self.kind


MICRO = Statistics()
"""The statistics that PyTorch's own layers take: of whatever they are called with."""


@lru_cache(maxsize=256)
def granules(num_samples: int, granule: int) -> tuple[int, ...]:
    """Return the samples of each granule of a window, in order; a micro-batch that holds whole ones has the same.

    >>> granules(70, 32), granules(65, 32), granules(64, 32), granules(1, 32)
    ((32, 32, 6), (32, 33), (32, 32), (1,))
    """
    whole, rest = divmod(num_samples, granule)
    sizes = [granule] * whole
    # So it is the number of samples that decides, and neither where a micro-batch begins nor what comes after it.
    if rest == 1 and whole:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return tuple(sizes)


def joined(counts: Sequence[int], num_samples: int, granule: int) -> tuple[int, ...]:
    """Return the samples of micro-batches that hold so many granules of a window each.

    >>> joined((2, 1), 70, 32)
    (64, 6)
    """
    sizes = [count * granule for count in counts]
    sizes[-1] += num_samples - sum(sizes)  # the last granule may have fewer samples than the others, or one more
    return tuple(sizes)


@lru_cache(maxsize=64)
def cut(num_samples: int, max_micro_batch: int, min_micro_batch: int, granule: int) -> tuple[int, ...]:
    """Return micro-batches of whole granules, as near to equal as these allow, the larger first.

    None is above ``max_micro_batch`` but a single granule, and none below ``min_micro_batch`` but that of a window of
    less, or the last one, which may be the rest of a window.

    >>> cut(256, 100, 32, 32), cut(70, 32, 32, 32), cut(65, 32, 32, 32), cut(65, 64, 32, 32)
    ((96, 96, 64), (32, 32, 6), (32, 33), (32, 33))
    """
    number = len(granules(num_samples, granule))
    each = -(-number // most_granules(num_samples, max_micro_batch, granule))
    fewest = max(1, min(each, number // fewest_granules(min_micro_batch, granule)))
    sizes = joined(cuts.near_equal(number, fewest), num_samples, granule)
    # With a rest of one the last micro-batch may be one sample too large: then there has to be one more.
    while max(sizes) > max(max_micro_batch, granule + 1, min_micro_batch) and fewest < number:
        fewest += 1
        sizes = joined(cuts.near_equal(number, fewest), num_samples, granule)
    # Where more than a granule is asked for at least, it is asked for of the last one too.
    while min_micro_batch > granule and sizes[-1] < min_micro_batch and fewest > 1:
        fewest -= 1
        sizes = joined(cuts.near_equal(number, fewest), num_samples, granule)
    return sizes


def most_granules(num_samples: int, max_micro_batch: int, granule: int) -> int:
    """Return how many granules of such a window a micro-batch of so many samples holds; one at least."""
    if max_micro_batch >= num_samples:
        return len(granules(num_samples, granule))
    return max(1, max_micro_batch // granule)


def fewest_granules(min_micro_batch: int, granule: int) -> int:
    """Return how many granules hold so many samples."""
    return -(-min_micro_batch // granule)


def cut_by_weight(weights: Sequence[int], max_weight: int, min_micro_batch: int, granule: int) -> tuple[int, ...]:
    """Return micro-batches of whole granules by weight: see ``cuts.cut_by_weight``.

    >>> cut_by_weight([50, 40, 30, 20, 10, 10, 10], max_weight=160, min_micro_batch=2, granule=2)
    (2, 5)
    """
    num_samples, number = len(weights), len(granules(len(weights), granule))
    # Each granule weighs as its first sample does, the longest, to which the others are padded.
    heads = [granule * weights[index * granule] for index in range(number)]
    fewest = fewest_granules(min_micro_batch, granule)
    sizes = joined(cuts.cut_by_weight(heads, max_weight, fewest), num_samples, granule)
    head = weights[num_samples - sizes[-1]]
    if sizes[-1] * head > max_weight and sizes[-1] >= 2 * max(granule, min_micro_batch):  # by its rest of one sample
        last = granules(num_samples, granule)[-1] + (fewest - 1) * granule
        sizes = (*sizes[:-1], sizes[-1] - last, last)
    return sizes


def cheapest(
    num_samples: int, max_micro_batch: int, seconds: Callable[[int], float], min_micro_batch: int, granule: int
) -> int:
    """Return the samples of the largest micro-batch of the cut that takes least time: see ``cuts.cheapest``."""
    number, most = len(granules(num_samples, granule)), most_granules(num_samples, max_micro_batch, granule)
    if num_samples > max_micro_batch:  # the last one may hold a rest besides
        most = max(1, min(most, number - 1))
    fewest = fewest_granules(min_micro_batch, granule)
    found = cuts.cheapest(number, most, lambda count: seconds(count * granule), fewest)[0]
    return num_samples if found == number else found * granule


def within(size: int, num_samples: int, granule: int) -> int:
    """Return the samples of the whole granules that a size holds: one granule at least, or all of the window.

    >>> within(70, 256, 32), within(20, 256, 32), within(20, 20, 32)
    (64, 32, 20)
    """
    return min(num_samples, size) if size >= num_samples else max(1, size // granule) * granule
