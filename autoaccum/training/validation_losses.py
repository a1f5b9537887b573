"""The losses of a validation's micro-batches, and the loss over everything that they come to.

What lies on a device stays there until the end, or until so much has come together, and is read by one copy: else each
micro-batch would wait for its own forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from autoaccum.loss.conclusions import conclude, stands_for_none
from autoaccum.loss.graph import only_parameters
from autoaccum.loss.reading import Numbers
from autoaccum.loss.reductions import is_one
from autoaccum.loss.reductions import read as read_loss
from autoaccum.loss.stated import Computed
from autoaccum.loss.terms import Count, Edge, Reduction, divisor_of, without_none
from autoaccum.loss.values import Values
from autoaccum.memory.oom import insist
from autoaccum.window.ending import Late
from autoaccum.window.named import named_loss

REST = "\0rest"
"""Name of what no term of a loss is seen to be."""
AT_ONCE = 1024
"""Micro-batches whose losses are read together: a device has few bytes for each, but not without end."""

Part = tuple[str, str, float, Reduction]
"""A term of a micro-batch's losses: that loss and the term by their names, its value, and how it was reduced."""


class Loss(Late, Protocol):
    """The loss of a micro-batch."""

    def parts(self) -> list[Part]:
        """Return its terms, once they are read."""


@dataclass(slots=True)
class OneLoss:
    """A loss of one term."""

    value: torch.Tensor | float
    """In memory of its own, for it is read when others have been computed."""
    reduction: Reduction
    """Without its graph."""
    num_samples: int
    """Of the micro-batch."""

    def want(self, numbers: Numbers) -> None:
        """Ask for its value, and for what it is a mean over."""
        numbers.want([self.value])
        numbers.want_of([self.reduction])

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        self.reduction = numbers.reduction(self.reduction)
        self.value = numbers.tensor(self.value) if isinstance(self.value, torch.Tensor) else self.value

    def parts(self) -> list[Part]:
        """Return its term."""
        # A mask's count is often kept from 0 by clamp(min=1): a micro-batch where nothing counts is to count nothing.
        if isinstance(self.value, torch.Tensor) and stands_for_none(self.reduction, self.value, self.num_samples)[0]:
            self.reduction = replace(self.reduction, items=0.0)
        return [("", "", float(self.value) if self.reduction.items else 0.0, self.reduction)]


@dataclass(slots=True)
class CountedLosses:
    """Losses whose items the user counts, by their names."""

    values: Mapping[str, torch.Tensor]
    counts: Mapping[str, Count]

    def want(self, numbers: Numbers) -> None:
        """Ask for their values and counts."""
        numbers.want([*self.values.values(), *self.counts.values()])

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        self.values = {name: numbers.tensor(value) for name, value in self.values.items()}
        self.counts = {name: numbers.count(count) for name, count in self.counts.items()}

    def parts(self) -> list[Part]:
        """Return each of them."""
        return [(name, name, value.item(), Reduction(self.counts[name])) for name, value in self.values.items()]


@dataclass(slots=True)
class SeveralTerms:
    """Losses of several terms, each of which is a mean over items of its own, or a sum, as its graph shows."""

    terms: list[tuple[str, str, torch.Tensor, Reduction]]
    """Of each its loss, its name, its value, and how it was reduced."""
    num_samples: int
    """Of the micro-batch."""

    def want(self, numbers: Numbers) -> None:
        """Ask for all that is to be known of them."""
        numbers.want([value for _, _, value, _ in self.terms])
        numbers.want_of([reduction for *_, reduction in self.terms])

    def take_read(self, numbers: Numbers) -> None:
        """Take that as it was read."""
        self.terms = [
            (loss, name, numbers.tensor(value), numbers.reduction(reduction))
            for loss, name, value, reduction in self.terms
        ]

    def parts(self) -> list[Part]:
        """Return each term; one that has no items counts nothing."""
        found = []
        for loss, name, value, reduction in self.terms:
            number = value.item()
            is_none = stands_for_none(reduction, value, self.num_samples)[0]
            if is_none or not math.isfinite(number) or not math.isfinite(float(reduction.items)):
                reduction, number = Reduction(0.0), 0.0
            if reduction.items or name != REST:
                found.append((loss, name, number, reduction))
        return found


def terms_of(computed: Computed, num_samples: int, values: Values, *, waits: bool) -> SeveralTerms:
    """Read the terms of losses off their graphs.

    Args:
        computed: the losses of a micro-batch.
        num_samples: its samples.
        values: what was seen while they were computed.
        waits: whether what terms are is read off a device at once.
    """
    found = SeveralTerms([], num_samples)
    for name, loss in (computed.terms or {"": computed.loss}).items():
        # What is not seen of it, constants and values that no function of Python's has returned, is the rest.
        rest, first_unseen = loss.detach().clone(), None
        for term, edge, reduction in _entries(name, loss, num_samples, waits=waits):
            value = _value(loss, edge, values)
            if value is None:
                first_unseen = reduction if first_unseen is None else first_unseen
            else:
                found.terms.append((name, term, value, reduction))
                rest = rest - value
        items = float(num_samples) if first_unseen is None else first_unseen.items
        found.terms.append((name, REST, rest, Reduction(items)))
    return found


def _entries(
    name: str, loss: torch.Tensor, num_samples: int, *, waits: bool
) -> Iterator[tuple[str, Edge | None, Reduction]]:
    """Yield the name of each term of a loss, where it enters it, None where it is all of it, and how it is reduced."""
    of_samples = Reduction(float(num_samples))
    if loss.grad_fn is None:  # of what a program returns where there is nothing to compute there is no term
        if loss.requires_grad:
            yield name or "0", None, of_samples
        return
    if name and only_parameters(loss.grad_fn):  # a penalty that was given by itself
        yield name, None, of_samples
        return
    reduction = read_loss(loss, num_samples, waits=waits)
    # The first one bears the name of its loss, for most losses have one term; others are told by their places.
    for index, (term, edge) in enumerate(zip(reduction.terms, reduction.entries, strict=True)):
        own = str(index) if not name else f"{name}.{index}" if index else name
        items = num_samples if term.kind == "unknown" and not term.numbers else term.divisor
        yield own, edge, Reduction(items, (term,))
    if not reduction.terms:
        yield name or "0", None, Reduction(reduction.items)
    for index, edge in enumerate(reduction.edges):  # of parameters alone
        yield f"{name} penalty {index}", edge, of_samples


def _value(loss: torch.Tensor, edge: Edge | None, values: Values) -> torch.Tensor | None:
    """Return what a term adds to a loss; None where that was not seen."""
    if edge is None:
        return loss.detach().clone()  # it may lie in memory that the next one is written to
    # A graph keeps no values. What made the term is the input of the addition by which it enters the loss; from there
    # on it may be multiplied once more, as in (a + b) / 2.
    value = values.of(edge.node.next_functions[edge.place][0])
    return None if value is None or edge.above is None else value * edge.above


class Losses:
    """The losses of all micro-batches so far."""

    def __init__(self) -> None:
        """Begin with none."""
        self._unread: list[tuple[int, Loss]] = []
        # Each micro-batch's by itself, joined at the end: how they go together shows only when all are there.
        self._found: list[tuple[int, list[Part]]] = []

    @property
    def num_samples(self) -> int:
        """Count the samples of those that were read."""
        return sum(size for size, _ in self._found)

    def add(self, num_samples: int, loss: Loss) -> None:
        """Add that of a micro-batch."""
        # Nothing is read here, where the next forward is to be launched.
        self._unread.append((num_samples, loss))
        if len(self._unread) >= AT_ONCE:
            insist(lambda: read([self]), "the losses of a validation were read")

    def want(self, numbers: Numbers) -> None:
        """Ask for those that are yet to be read."""
        for _, loss in self._unread:
            loss.want(numbers)

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        for _, loss in self._unread:
            loss.take_read(numbers)
        # All of them or none: where memory runs out on the way it is done again.
        found = [(num_samples, loss.parts()) for num_samples, loss in self._unread]
        self._found += found
        self._unread = []

    def joined(self, instead: Mapping[int, Losses] | None = None) -> tuple[float, dict[str, float]]:
        """Return the loss over everything, of what was read, NaN where nothing counts; and each of several, by name.

        Args:
            instead: losses that take the place of a micro-batch's, by its index.
        """
        # Each term over its own items, as in training; one that some micro-batches lack is joined over the others.
        of_terms = self._of_terms(instead or {})
        totals = {key: total for key, of_term in of_terms.items() if (total := _joined_term(of_term)) is not None}
        # What is left of a loss whose terms are seen, and of which none counts anything, is no value of it.
        seen, counting = ({loss for loss, name in found if name != REST} for found in (of_terms, totals))
        named: dict[str, float] = {}
        for (loss, _), total in totals.items():
            if loss and (loss in counting or loss not in seen):
                named[named_loss(loss)] = named.get(named_loss(loss), 0.0) + total
        return sum(totals.values()) if totals else math.nan, named

    def _of_terms(self, instead: Mapping[int, Losses]) -> dict[tuple[str, str], list[tuple[int, float, Reduction]]]:
        """Return (samples, value, how it was reduced) of each micro-batch that has a term, by the names of terms."""
        of_terms: dict[tuple[str, str], list[tuple[int, float, Reduction]]] = {}
        for place, own in enumerate(self._found):
            for size, parts in instead[place]._found if place in instead else [own]:
                for loss, name, value, reduction in parts:
                    of_terms.setdefault((loss, name), []).append((size, value, reduction))
        return of_terms

    def have_ones(self) -> bool:
        """Return whether some were divided by 1, and are not 0: a count that is kept from 0 may be that of none."""
        return any(value and is_one(found) for of in self._of_terms({}).values() for _, value, found in of)

    def are_in_doubt(self) -> bool:
        """Return whether the graphs of some do not tell what they come to together."""
        # As windows are concluded: of all micro-batches together, for one alone leaves more in doubt.
        columns = [list(zip(*of_term, strict=True)) for of_term in self._of_terms({}).values()]
        return any(conclude(sizes, reductions).doubt is not None for sizes, _, reductions in columns)


def read(late: Sequence[Late]) -> None:
    """Read all that is left on a device, together."""
    numbers = Numbers()
    for each in late:
        each.want(numbers)
    numbers.read()
    for each in late:
        each.take_read(numbers)


def _joined_term(values: list[tuple[int, float, Reduction]]) -> float | None:
    """Return a term of the loss over everything; None where nothing counts."""
    there = [(size, value, reduction) for size, value, reduction in values if float(reduction.items)]
    if not any(without_none(float(reduction.items)) for _, _, reduction in there):
        return None
    counts = [float(reduction.items) for _, _, reduction in there]
    found = conclude([size for size, _, _ in there], [reduction for _, _, reduction in there])
    weighted = sum(value * divisor_of(count) for (_, value, _), count in zip(there, counts, strict=True))
    # A sum has the same divisor in every micro-batch, whatever is in it; divided by one of them it is the sum of all.
    # Of a single micro-batch there is nothing to compare, and both are the same.
    return weighted / (counts[0] if found.is_sum and len(there) > 1 else sum(counts))
