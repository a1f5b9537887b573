"""Weights micro-batches so that they add up to the gradient of their window.

The window's loss is the mean over its N items, L = (1/N) sum_i l_i. A micro-batch j of n_j items gives the mean over
its own, L_j = (1/n_j) sum_{i in j} l_i, so L = sum_j (n_j / N) L_j, and by linearity the same holds of the gradients.

N is known only when the whole window has been seen. So each micro-batch is weighted with n_j / G, G being a constant
guess of N, and the accumulated gradient is multiplied once by G / N at the end. With the number of samples as items
the guess is right and there is nothing to multiply; else it keeps magnitudes where float16 can hold them.

A loss that is a sum, divided by no count but perhaps by a constant d, has n_j = d in every micro-batch and N = d too.

The weights n_j / N sum to one, so a term that does not depend on the batch, such as a penalty on the parameters, is
counted once. Beside a sum they are all one, and there such a term is scaled where it enters the loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autoaccum.loss.terms import Count, Edge, Reduction


class Tally:
    """The items of a window: weights while its micro-batches run, shares in the whole at its end."""

    def __init__(self, num_samples: int, *, deferred: bool, total: float = 0.0) -> None:
        """Begin a window of ``num_samples``; counts are read at once, or all at its end when ``deferred``.

        Where the window's ``total`` is known, it is the guess.
        """
        self._num_samples = num_samples
        self._deferred = deferred
        self._counts: list[Count] = []  # n_j of each micro-batch so far; 0 where it had no items
        self._guess = total  # G: guessed from the first micro-batch that has items, and 0 until then

    def weight(self, num_samples: int, items: Count, dtype: torch.dtype = torch.float32) -> Count | None:
        """Return the weight of the next micro-batch, n_j / G; None when it has no items.

        Args:
            num_samples: its samples.
            items: its items.
            dtype: of its loss, which the weight is rounded to.
        """
        if isinstance(items, torch.Tensor):
            # The first count is read in any case, for the guess is made of it.
            if self._deferred and self._guess:
                self._counts.append(items)
                return items.to(torch.promote_types(dtype, torch.float32)) / self._guess
            items = items.item()
        self._counts.append(items)
        if not items or not math.isfinite(items):  # 0, or 0 / 0, the mean over nothing
            self._counts[-1] = 0.0
            return None
        if not self._guess:
            # Not from next to nothing, as a divisor kept from 0 is: all later weights would be immense.
            per_sample = items / num_samples if abs(items) > 1e-3 * num_samples else 1.0
            self._guess = per_sample * self._num_samples
            if dtype.itemsize == 2:
                # The weight is rounded to the loss's type, of 16 bits: a power of two leaves small counts exact.
                self._guess = math.copysign(2.0 ** round(math.log2(abs(self._guess))), self._guess)
        return items / self._guess

    @property
    def guess(self) -> float:
        """Return what the window was taken to count, in weighing its micro-batches."""
        return self._guess

    def read(self) -> list[float]:
        """Return the counts of all micro-batches so far; those that were deferred are read in one go."""
        waiting = [count for count in self._counts if isinstance(count, torch.Tensor)]
        if waiting:
            read = torch.stack(waiting).tolist()
            values = iter(value if math.isfinite(value) else 0.0 for value in read)  # 0 / 0 counts nothing
            self._counts = [next(values) if isinstance(count, torch.Tensor) else count for count in self._counts]
        return self._counts  # type: ignore[return-value]

    def leave_out(self, index: int) -> None:
        """Count nothing for that micro-batch: it had no items after all, and a gradient of 0."""
        self._counts[index] = 0.0

    def total(self, is_sum: bool) -> float:
        """Return what the window's sum is divided by: all of its items, or what each micro-batch's sum was."""
        counts = [count for count in self.read() if count]
        # The divisors of a sum are the same constant in all micro-batches, so that the first one stands for them.
        return counts[0] if is_sum else sum(counts)

    def correction(self, is_sum: bool) -> float:
        """Return G / N, which the accumulated gradient has to be multiplied with."""
        return self._guess / self.total(is_sum)

    def loss(self, losses: list[torch.Tensor], is_sum: bool) -> torch.Tensor:
        """Return the loss of the window.

        Args:
            losses: of the micro-batches that had items.
            is_sum: whether they are sums over samples.
        """
        if len(losses) == 1:  # a window that is not cut, whose loss needs no arithmetic
            return losses[0].to(torch.promote_types(losses[0].dtype, torch.float32))
        stacked = torch.stack(losses)
        wide = torch.promote_types(stacked.dtype, torch.float32)  # in 16 bits a sum of losses would lose digits
        counts = [count for count in self.read() if count]
        # Most windows are of equal counts: these need no tensor of shares, which would have to be sent to the device.
        if min(counts) == max(counts):
            return stacked.sum(dtype=wide) if is_sum else stacked.mean(dtype=wide)
        total = self.total(is_sum)
        shares = torch.tensor([count / total for count in counts], dtype=wide, device=stacked.device)
        return stacked.to(wide) @ shares


class Seeds:
    """What backwards start from: the same as to multiply a loss, without an operation and its backward."""

    def __init__(self) -> None:
        """Begin with none."""
        self._seeds: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # by weight, for weights recur

    def of(self, weight: Count, loss: torch.Tensor) -> torch.Tensor:
        """Return the seed of a loss that has this weight."""
        if isinstance(weight, torch.Tensor):
            return weight.to(loss.dtype)
        key = (weight, loss.dtype)
        if key not in self._seeds or self._seeds[key]._version:  # a backward of a user's own may have written to it
            if len(self._seeds) > 1000:  # weights of counted items hardly ever recur
                self._seeds.clear()
            self._seeds[key] = torch.full_like(loss, weight, requires_grad=False)
        return self._seeds[key]


@contextmanager
def counted_once(reduction: Reduction, share: float) -> Iterator[None]:
    """Scale, within it, what a backward gives to terms that depend on parameters alone.

    Args:
        reduction: of the loss, with its graph.
        share: of this micro-batch in its window; the shares of all of them add up to one.
    """
    # By hooks on the additions through which they enter the loss, not on the terms, which may share nodes with others.
    with weighed([(edge, share) for edge in reduction.edges]):
        yield


@contextmanager
def weighed(terms: Sequence[tuple[Edge, Count | None]]) -> Iterator[None]:
    """Multiply, within it, what a backward gives to terms.

    Args:
        terms: where each enters the loss, and its weight; None: nothing goes there, not even 0, which a division by 0
            under it would make NaN.
    """
    weights: dict[Any, dict[int, Count | None]] = defaultdict(dict)
    for edge, weight in terms:
        weights[edge.node][edge.place] = weight
    handles = [node.register_hook(_weighing(of_node)) for node, of_node in weights.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weighing(weights: Mapping[int, Count | None]) -> Callable[[Any, Any], Any]:
    """Make a hook for a node that multiplies its gradients for some inputs, each with its weight."""

    def hook(to_inputs: tuple[torch.Tensor | None, ...], _: object) -> tuple[torch.Tensor | None, ...]:
        weighed = list(to_inputs)
        for index, weight in weights.items():
            gradient = to_inputs[index]
            if gradient is not None:
                weighed[index] = None if weight is None else gradient * weight
        return tuple(weighed)

    return hook
