"""Types of what a loss was divided by (term, division, reduction), and what users state about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch

Count = float | torch.Tensor
"""A number, or a 0-dim tensor that is not read yet, because reading would wait for the device."""
NONE = 2.0**-100
"""What stands for a count of 0 beside a sum that may have a value all the same: next to nothing beside any count. Such
a sum is divided by 1, and weighed by 1."""
Kind = Literal["mean", "sum", "unknown"]
"""How a term averages over samples; unknown where its graph leads to an operation that is not linear."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss, as its graph shows it: a sum over the micro-batch, divided by what means and factors say.

    Its numbers may lie on a device; what follows from them may be asked once ``reading.Numbers`` has read them.
    """

    means: Count = 1.0
    """The product of the divisors of its means."""
    factor: Factor = field(default_factory=lambda: Factor())
    """The constants that it is multiplied with."""
    averages: bool = False
    """Whether samples look averaged: by a mean over them, or by their number, which the program wrote down."""
    numbers: int = 0
    """How many numbers were reduced; 0 where that bounds no count."""
    counts_items: bool = False
    """Whether the divisor is that of a loss which counts its targets itself."""
    weights: tuple[tuple[torch.Tensor, int], ...] = ()
    """Weights of the samples: their sum, the least, the most, and how many samples have one."""
    ones: tuple[Count, ...] = ()
    """Weights of a single number, which may be 1."""
    operation: str = ""
    """The name of the operation that says nothing of it; empty where the graph shows how it is reduced."""

    @property
    def divisor(self) -> Count:
        """Return all that the sum was divided by."""
        return divide(self.means, self.factor.value)

    @property
    def kind(self) -> Kind:
        """Return what it looks like in this micro-batch alone."""
        if self.operation or self._are_weights_normalised():
            return "unknown"
        return "mean" if self.averages or self.is_counted else "sum"

    @property
    def is_counted(self) -> bool:
        """Tell whether tensors computed the divisor, as the count of a mask: then it is no constant of the program."""
        return self.counts_items or bool(self.factor.tensors)

    @property
    def is_one(self) -> bool:
        """Return whether the loss was divided by 1: by a count of one, or by a count of 0 that was clamped to 1."""
        if any(abs(number) == 1 for number in (*self.factor.divisors, *self.factor.multipliers)):
            return True
        if 1 in self.ones:
            return True
        value = self.factor.value
        if not self.factor.tensors or isinstance(value, torch.Tensor):
            return False
        return math.isclose(abs(value), abs(self.factor.written), rel_tol=1e-12)

    @property
    def is_compiled(self) -> bool:
        """Tell whether the graph ends where torch.compile's code begins, which says nothing of it."""
        return "CompiledFunction" in self.operation

    def in_words(self) -> str:
        """Return what says nothing of it."""
        return "code that torch.compile made" if self.is_compiled else self.operation or "weights that sum to one"

    @property
    def is_unread(self) -> bool:
        """Tell whether some of its numbers are yet to be read off a device."""
        return any(not tensor.is_cpu for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return its numbers that are tensors, and may be on a device."""
        found = [self.means, self.factor.value, *[weights for weights, _ in self.weights], *self.ones]
        return [value for value in found if isinstance(value, torch.Tensor)]

    def _are_weights_normalised(self) -> bool:
        """Return whether weights that differ sum, or average, to one.

        They do when the program divided them by their sum over the micro-batch: to cut the window changes the loss.
        """
        for weights, numbers in self.weights:
            total, least, most = weights.tolist()
            if least != most and any(math.isclose(total, one, rel_tol=1e-3) for one in (1, numbers)):
                return True
        return False


class Division(NamedTuple):
    """Where what depends on the batch is divided by a number on a device."""

    node: Any
    """The division, or the product with what is one over it."""
    place: int
    """Which of its inputs depends on the batch."""
    is_product: bool
    """Whether it is a product."""
    number: torch.Tensor
    """What it is divided by, or multiplied with."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the loss of one micro-batch was reduced."""

    items: Count
    """The divisor of its first term: what it counts for in the window."""
    terms: tuple[Term, ...] = ()
    """Those that depend on the batch; empty for one mean that leaves nothing to doubt."""
    constants: tuple[Count, ...] = ()
    """The factors of terms that depend on parameters alone, such as a weight penalty."""
    divisions: tuple[Division, ...] = ()
    """Where something is divided by what is not read yet, and may be 0."""

    @property
    def is_sum(self) -> bool:
        """Tell whether the loss looks like a sum over samples, from this micro-batch alone."""
        return bool(self.terms) and all(term.kind == "sum" for term in self.terms)


@dataclass(frozen=True, slots=True)
class Factor:
    """The constants between the root of a loss and one of its terms."""

    value: Count = 1.0
    """Their product, where a divisor d counts as 1 / d."""
    divisors: tuple[float, ...] = ()
    """Numbers that the program wrote down to divide by, each twice at most: a recurrence has hundreds of one."""
    multipliers: tuple[float, ...] = ()
    """Numbers that it wrote down to multiply with, likewise."""
    written: float = 1.0
    """The product of all of these, where a divisor d counts as 1 / d."""
    tensors: Literal["", "Div", "Mul"] = ""
    """How constants came in that tensors computed: not at all, by division alone, or also by multiplication."""

    def times(self, operation: str, value: Count, is_number: bool) -> Factor:
        """Return the factor with one more constant.

        Args:
            operation: ``"Mul"`` or ``"Div"``.
            value: the constant.
            is_number: whether the program wrote it down as a number; else a tensor held it.
        """
        product = divide(self.value, value) if operation == "Div" else self.value * value
        if not is_number:
            return replace(self, value=product, tensors="Mul" if "Mul" in (operation, self.tensors) else "Div")
        if value == 0:  # the loss is not finite, and shall be seen to be so
            return self
        number = float(value)
        if operation == "Div":
            divisors = _with(self.divisors, number)
            return replace(self, value=product, divisors=divisors, written=self.written / number)
        multipliers = _with(self.multipliers, number)
        return replace(self, value=product, multipliers=multipliers, written=self.written * number)


def _with(numbers: tuple[float, ...], number: float) -> tuple[float, ...]:
    return numbers if numbers.count(number) > 1 else (*numbers, number)


def divide(first: Count, second: Count) -> Count:
    """Divide two counts; by a number that is 0 to infinity.

    The divisor of a mean over nothing, which is 0 / 0, is infinite too: it had no items.
    """
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first / second
    return first / second if second else math.inf


@overload
def divisor_of(items: float) -> float: ...
@overload
def divisor_of(items: torch.Tensor) -> torch.Tensor: ...
def divisor_of(items: Count) -> Count:
    """Return what a sum is divided by that counts so many: these, and 1 for ``NONE``."""
    if isinstance(items, torch.Tensor):
        return torch.where(items == NONE, 1.0, items)
    return 1.0 if items == NONE else items


def without_none(items: Count) -> Count:
    """Return 0 for ``NONE``, and any other count as it is."""
    if isinstance(items, torch.Tensor):
        return torch.where(items.abs() <= NONE, 0.0, items)
    return 0.0 if abs(items) <= NONE else items


Hypothesis = str
"""A key of ``events.HYPOTHESES``: num_items, a mean over what the user counts; items, a mean over what its graph
divides by; sum, a sum over samples."""

Doubt = tuple[str, str]
"""(why micro-batches may not add up to the loss of their window, what to do about it)"""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the micro-batches of a window, seen together, are."""

    is_sum: bool
    """Whether their sum is divided by what each was, rather than by the total of it."""
    doubt: Doubt | None = None
    """(why they may not add up to the loss of the window, what to do)"""


PLAIN_MEAN = Conclusion(is_sum=False)
"""The conclusion for losses whose graph leaves nothing to doubt, as for those whose items a user counts."""
PLAIN_SUM = Conclusion(is_sum=True)
"""The conclusion for losses that were measured to be sums."""


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
