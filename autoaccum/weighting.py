"""How micro-batches of unequal weight add up to the gradient of their window.

The window's loss is the mean over its N items, L = (1/N) sum_i l_i. A micro-batch j of n_j items gives the mean over
its own, L_j = (1/n_j) sum_{i in j} l_i, so L = sum_j (n_j / N) L_j, and by linearity the same holds of the gradients.

N is known only when the whole window has been seen. So each micro-batch is weighted with n_j / G, G being a constant
guess of N, and the accumulated gradient is multiplied once by G / N at the end. With the number of samples as items
the guess is right and there is nothing to multiply; else it keeps magnitudes where float16 can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError

CountItems = Callable[[Any], Any]
"""(micro-batch) -> number of items that the loss averages over: an int, a float or a tensor of one element."""


def count_items(num_items: CountItems | None, batch: Any, num_samples: int) -> float:
    """Items of a micro-batch: its samples, unless the user counts otherwise.

    Raises:
        ArgumentError: the user's count is negative, or not a number.
    """
    if num_items is None:
        return num_samples
    counted = num_items(batch)
    accepted = "a function (micro-batch) -> a count of at least 0"
    try:
        items = float(counted)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError("num_items", counted, accepted) from None
    if not 0 <= items < float("inf"):
        raise ArgumentError("num_items", items, accepted)
    return items


@torch.no_grad()
def scale_gradients(parameters: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply the gradients in place, in one launch."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
