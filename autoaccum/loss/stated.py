"""States what users say of losses: what a function of theirs returns, what it is a mean over, and whether it is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch

T = TypeVar("T")
CountItems = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | Sequence[Callable[[Any], Any]]
"""(micro-batch) -> number of items that the loss averages over: an int, a float or a tensor of one element. Of several
losses one for each, or a function that returns one for each: by their names, or in their order."""
Reducing = Literal["mean", "sum"] | None
"""What a user says that the loss of a micro-batch is; None where that is measured."""


class Computed(NamedTuple):
    """A loss of several that are added, or one with something beside it."""

    loss: torch.Tensor
    """A scalar: the sum of all."""
    terms: Mapping[str, torch.Tensor] = {}
    """Each of several, by its name, or by its place in a sequence; empty where there is one."""
    outputs: Mapping[str, Any] = {}
    """What was returned beside them, by name."""
    rest: float = 0.0
    """The sum of numbers that stand in the place of losses."""


LossOf = Callable[[Any, Any], torch.Tensor | Computed]
"""(model, batch) -> scalar loss, a mean or a sum over the batch; or several, or what stands beside it"""


def total(computed: torch.Tensor | Computed) -> torch.Tensor:
    """Return the loss alone, the sum of several."""
    return computed.loss if isinstance(computed, Computed) else computed


# Losses have names from here on, those of a sequence too, so that all that is kept of them is kept in one way.
def by_name(given: Mapping[Any, T] | Sequence[T]) -> dict[str, T]:
    """Return what is given for each of several losses by their names, which are their places in a sequence."""
    return {str(name): one for name, one in (given.items() if isinstance(given, Mapping) else enumerate(given))}
