"""Losses that are returned by name: what each adds to its window, and the weights of those whose items the user counts.

Each of several losses is a mean over its N_k items, and the loss of the window is L = sum_k L_k. With n_jk items of
loss k in micro-batch j, L_k = sum_j (n_jk / N_k) L_jk. So sum_k (n_jk / N_k) L_jk is what micro-batch j adds to the
window's loss, and its gradient to the window's gradient. The totals N_k are counted before the window is run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch

from autoaccum.data.base import Window
from autoaccum.data.randomness import preserved_randomness
from autoaccum.step.loss_functions import refuse_unknown
from autoaccum.step.loss_graph import read_reduction
from autoaccum.step.readback import Numbers, read_all
from autoaccum.step.terms import Computed, Count, Division, divisor_of, without_none

_SAMPLES_AT_ONCE = 64
"""Samples that are counted together before a window: the same for all plans, so that sums are the same."""
_SAME = {True: 1e-13, False: 1e-6}
"""Relative difference up to which totals are the same, by whether the loss has 64 bits."""


@dataclass(slots=True)
class _MicroBatch:
    """The losses of one."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """What was returned, or what each loss adds to the window where the user counts items."""
    counts: dict[str, Count] = field(default_factory=dict)
    """What the user counts of each; empty where all losses of a micro-batch have one weight."""


class Named:
    """The losses of a window's micro-batches by their names."""

    def __init__(self, num_samples: int, totals: Mapping[str, float]) -> None:
        """Begin a window.

        Args:
            num_samples: its samples.
            totals: how many items of each loss it holds, as far as that is known; samples stand for the others.
        """
        self._num_samples, self._totals = num_samples, totals
        self._micro_batches: dict[int, _MicroBatch] = {}  # those that have losses with names
        self._counted: set[str] = set()  # losses whose items the user counts, in some micro-batch at least

    def keep(self, index: int, losses: Mapping[str, torch.Tensor]) -> None:
        """Keep the losses of the micro-batch of that index; they have one weight, that of their sum."""
        self._micro_batches[index] = _MicroBatch({name: loss.detach().clone() for name, loss in losses.items()})

    def weigh(
        self, index: int, computed: Computed, counted: Mapping[str, Count], num_samples: int
    ) -> tuple[torch.Tensor | None, tuple[Division, ...]]:
        """Return what a micro-batch adds to the loss of the window, None where that is nothing.

        Args:
            index: which micro-batch of the window.
            computed: its losses.
            counted: how many items of each it holds; a loss of which that is not said is a mean over samples.
            num_samples: its samples.

        Returns:
            that; and the divisions in it whose divisor is on a device, and may be 0.

        Raises:
            ArgumentError: all counts are of other losses.
        """
        refuse_unknown(counted, computed.terms)
        self._counted.update(counted)
        losses = dict(computed.terms) or {"": computed.loss}
        found = self._micro_batches[index] = _MicroBatch()
        widest = torch.promote_types(computed.loss.dtype, torch.float32)  # in 16 bits weights would be rounded
        weighed, divisions = list[torch.Tensor](), list[Division]()
        for name, loss in losses.items():
            items = found.counts[name] = self._items(name, counted, num_samples)
            if not isinstance(items, torch.Tensor) and not items:
                continue
            wide = loss.to(widest)
            if isinstance(items, torch.Tensor):
                items = items.to(widest)
                divisions += read_reduction(loss, num_samples, waits=False).divisions
                wide = torch.where(items != 0, wide, 0)  # a mean over nothing is no number
            weighed.append(wide * (divisor_of(items) / self._total(name)))
            found.values[name] = weighed[-1].detach()
        if not weighed:
            return None, ()
        # Numbers that stand in the place of losses are added as well; they are no part of the gradient.
        rest = computed.rest * num_samples / self._num_samples
        return reduce(add, weighed) + rest, tuple(divisions)

    def _items(self, name: str, counted: Mapping[str, Count], num_samples: int) -> Count:
        if name not in counted:  # in no micro-batch, or in others alone
            return 0.0 if name in self._totals else float(num_samples)
        # Where the window holds none, what stands for a count of 0 counts nothing either.
        is_none = num_samples == self._num_samples or self._totals.get(name) == 0
        return without_none(counted[name]) if is_none else counted[name]

    def _total(self, name: str) -> float:
        return self._totals.get(name) or float(self._num_samples)

    def without_micro_batches(self) -> Named:
        """Return the same without any, to absorb those of all ranks."""
        return Named(self._num_samples, self._totals)

    def absorb(self, other: Named, first: int) -> None:
        """Add the micro-batches of another rank, whose first one has that index in the window."""
        self._micro_batches |= {first + index: each for index, each in other._micro_batches.items()}
        self._counted |= other._counted

    def want(self, numbers: Numbers) -> None:
        """Ask for the counts that lie on a device."""
        for each in self._micro_batches.values():
            numbers.want(each.counts.values())

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        for each in self._micro_batches.values():
            each.counts = {name: numbers.count(count) for name, count in each.counts.items()}

    # What follows is asked once all has been read.

    def counting(self, sizes: Sequence[int]) -> list[float]:
        """Return the samples of each micro-batch of which any loss has items; 0 of the others.

        Args:
            sizes: the samples of each.
        """
        counts = [self._micro_batches[index].counts.values() for index in range(len(sizes))]
        return [float(size * any(of_each)) for size, of_each in zip(sizes, counts, strict=True)]

    def has_late_zero(self) -> bool:
        """Return whether a count that was read at the end is 0: its loss was not left out."""
        return any(not each.counts.get(name, 1.0) for each in self._micro_batches.values() for name in each.values)

    def other_totals(self, *, is_wide: bool) -> dict[str, float] | None:
        """Return how many items of each loss the window holds; None where it was weighed with these.

        Args:
            is_wide: whether the loss has 64 bits.
        """
        counts: dict[str, list[float]] = {}
        for each in self._micro_batches.values():
            for name, count in each.counts.items():
                if name in self._counted:
                    counts.setdefault(name, []).append(float(without_none(count)))
        totals = {name: math.fsum(of_one) for name, of_one in counts.items()}
        is_same = all(
            math.isclose(total, self._total(name), rel_tol=_SAME[is_wide]) for name, total in totals.items() if total
        )
        return None if is_same else totals

    def losses(self, shares: Sequence[float]) -> dict[str, torch.Tensor]:
        """Return what each loss adds to that of the window, by names such as ``loss/words``.

        Args:
            shares: how much of the window each micro-batch is; of no matter where the user counts items.
        """
        found: dict[str, torch.Tensor] = {}
        for index, each in self._micro_batches.items():
            # What counts nothing has no value, which shows at the end only where counts are on a device.
            there = [name for name in each.values if shares[index] and each.counts.get(name, 1.0)]
            for name, value in ((name, each.values[name]) for name in there):
                wide = value.to(torch.promote_types(value.dtype, torch.float32))
                part = value if each.counts else wide * shares[index]
                found[name] = found[name] + part if name in found else part
        return {named_loss(name): total for name, total in found.items() if name}


def named_loss(name: str) -> str:
    """Return the name by which a report has one of several losses: that of an output may be the same."""
    return f"loss/{name}"


def counted_beforehand(window: Window, count: Callable[[Any], Mapping[str, Count]]) -> dict[str, float]:
    """Return how many items of each loss a window holds, where it lies: as the user's own functions count them."""
    # Read once more, piece by piece; where counts lie on a device, it is waited for once all is counted.
    found: dict[str, list[Count]] = {}
    for start in range(0, window.num_samples, _SAMPLES_AT_ONCE):
        with preserved_randomness():  # a collate_fn may draw
            batch = window.samples(range(start, min(start + _SAMPLES_AT_ONCE, window.num_samples)))
        for name, items in count(batch).items():
            found.setdefault(name, []).append(items)
    numbers = read_all([items for of_one in found.values() for items in of_one])
    return {
        name: math.fsum(map(without_none, itertools.islice(numbers, len(of_one)))) for name, of_one in found.items()
    }
