"""Weighs the terms of a loss one by one: means over different numbers of items, sums beside means.

The loss of a window is the sum of its terms, L = sum_k L_k, and each is a mean over its N_k items or a sum. A
micro-batch j gives L_jk, so L_k = sum_j (n_jk / N_k) L_jk: each term has weights of its own. One multiplication at the
end of the window cannot mend several totals N_k, so they have to be known before it begins: see ``totals``. Where they
were not, the window is run once more.

What a term is weighed with is multiplied in the backward, where the term enters the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import NamedTuple

import torch

from autoaccum.loss.conclusions import kind_of_term, stands_for_none
from autoaccum.loss.graph import only_parameters
from autoaccum.loss.hypotheses import KEPT_FROM_0, OVER_ITEMS, TermKind
from autoaccum.loss.mistakes import refuse_unknown
from autoaccum.loss.reading import Numbers
from autoaccum.loss.reductions import read, without_graph
from autoaccum.loss.stated import Computed
from autoaccum.loss.terms import Count, Division, Edge, Reduction, Term, divisor_of, without_none
from autoaccum.loss.values import Values
from autoaccum.loss.weighting import Tally, guarded, weighed
from autoaccum.window.kept import InDoubt, Least, doubtful, least_of

_CONSTANT = "\0"
"""How the names of terms of the parameters alone begin: each counts once a window, whatever it is cut into."""
REST = f"{_CONSTANT}rest"
"""Name of what no term of a loss is seen to be."""
_SAME = 1e-13
"""Relative difference up to which a total is the one that was foretold, where the loss has 64 bits."""
_SAME_IN_32_BITS = 1e-6
"""The same where it has fewer: counts may then be sums of weights in 32 bits."""
Signature = tuple[str, bool, bool]
"""The kind of a term, whether PyTorch counts its items, whether it depends on parameters alone."""


class Entry(NamedTuple):
    """A term of the losses of one micro-batch."""

    name: str
    """Which one: the losses' own, and its place in them where it is not the first."""
    edge: Edge | None
    """Where it enters its loss; None where it is all of it, or the user counts."""
    items: Count
    """What it counts."""
    term: Term | None
    """What its graph shows; None where that leaves nothing to doubt."""


@dataclass(slots=True)
class _Column:
    """One term in all micro-batches."""

    kind: TermKind
    tally: Tally
    given: list[int] = field(default_factory=list)  # indices of those that were given a weight
    values: list[torch.Tensor | None] = field(default_factory=list)
    shown: list[tuple[int, Term | None]] = field(default_factory=list)  # samples, and what its graph shows
    places: list[int] = field(default_factory=list)  # of the micro-batches that have it
    items: list[Count] = field(default_factory=list)  # what its graph counts in them
    is_agreed: bool = True  # whether all ranks have taken it for the same
    is_nothing: bool = False  # whether it adds nothing in any micro-batch, so that its total is no matter
    missing: dict[int, float] = field(default_factory=dict)  # by how much what was divided by is larger than the count

    def true_counts(self) -> list[float]:
        """Return what each micro-batch counts that has it."""
        return [count - self.missing.get(index, 0.0) for index, count in enumerate(self.tally.read())]

    def total(self) -> float:
        """Return what the window counts of it."""
        total = self.tally.total(self.kind == "sum")
        return math.fsum(self.true_counts()) if self.missing else total

    def absorb(self, other: _Column, first: int) -> None:
        """Add what another rank has of it, whose micro-batches begin with that number."""
        self.is_agreed = self.is_agreed and self.kind == other.kind
        self.tally.absorb(other.tally)
        self.given += [len(self.values) + index for index in other.given]
        self.places += [first + place for place in other.places]
        self.values += other.values
        self.shown += other.shown
        self.items += other.items


class Terms:
    """The terms of the losses of a window, each weighed by itself."""

    def __init__(
        self,
        num_samples: int,
        kinds: Mapping[str, TermKind],
        totals: Mapping[str, float],
        *,
        deferred: bool,
        is_unforeseen: bool = False,
        stated: str | Mapping[str, str] | None = None,
    ) -> None:
        """Begin a window.

        Args:
            num_samples: its samples.
            kinds: what each term is, by its name; of one that is missing its own graph says so.
            totals: what each mean is known to count in the window.
            deferred: whether counts are read at its end.
            is_unforeseen: whether totals were never known in time, so that any guess of one is as good as another.
            stated: what the user says of each, or of all: that it is a mean, or a sum.
        """
        self._stated = stated
        self._num_samples = num_samples
        self._kinds = kinds
        self._totals = totals
        self._deferred, self._is_unforeseen = deferred, is_unforeseen
        self._columns: dict[str, _Column] = {}
        self._sizes: list[int] = []
        # What was not seen of losses, by their names: (index of the micro-batch, the rest, of which terms).
        self._rests: dict[str, list[tuple[int, torch.Tensor, list[str]]]] = {}
        self._loss_of: dict[str, str] = {}  # by the name of each term, that of the loss that it is of
        self._signatures: dict[str, list[Signature]] = {}  # the terms that each loss has had, at most
        self.differs = False
        """Whether a loss has other terms in some micro-batches, and it cannot be told which."""
        self.lacks_values = False
        """Whether terms were met whose values were not seen, so that the rest of each loss stands for them."""

    def add(
        self,
        computed: Computed,
        counted: Mapping[str, Count],
        num_samples: int,
        values: Values | None,
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[Reduction, Callable[[], None]]:
        """Take the losses of a micro-batch.

        Args:
            computed: the losses, one at least.
            counted: what the user counts of each.
            num_samples: samples of the micro-batch.
            values: what was seen while they were computed.
            scale: multiplies a loss with the scale of 16 bits.

        Returns:
            how the sum of all was reduced, without its graph; what runs the backward.
        """
        # Without names there is one loss, whose terms have their places in its graph for names.
        losses = list((computed.terms or {"": computed.loss}).items())
        refuse_unknown(counted, computed.terms)
        self._sizes.append(num_samples)
        weights: list[tuple[Edge, Count | None]] = []
        seeds: list[Count | None] = []
        reductions: list[Reduction] = []
        divisions: list[Division] = []  # which nothing is to go through where they are by 0
        for root, (name, loss) in enumerate(losses):
            # What is not seen of it, constants and values that no function of Python's has returned, is the rest.
            rest, unseen = loss.detach(), list[str]()
            entries, reduction = self._read(name, loss, counted.get(name), num_samples)
            divisions += reduction.divisions
            reductions.append(reduction)
            # The weights of terms are multiplied on their way into the loss; that of a loss with one term at its root.
            seeds.append(1.0 if reduction.edges or (entries and entries[0].edge) else None)
            # A penalty is the same in every micro-batch: each gives its share, so that it counts once a window. These
            # are weights of samples, like those of a mean over samples, and are kept like a term of their own.
            for index, edge in enumerate(reduction.edges):
                entries.append(Entry(f"{_CONSTANT}{name}.{index}", edge, num_samples, None))
            self._match(name, entries)
            for entry in entries:
                value = self._value(loss, entry.edge, values)
                if value is None:
                    unseen.append(entry.name)
                else:
                    rest = rest - value
                self._loss_of[entry.name] = name
                weight = self._weigh(entry, value, loss.dtype)
                if entry.edge is None:
                    seeds[root] = weight
                else:
                    weights.append((entry.edge, weight))
            if len(unseen) == len(entries):  # nothing was taken off it, which would have made another one
                rest = rest.clone()
            self._rests.setdefault(name, []).append((len(self._sizes) - 1, rest, unseen))
        roots = [
            (scale(loss), seed)
            for (_, loss), seed in zip(losses, seeds, strict=True)
            if seed is not None and loss.requires_grad
        ]

        # One backward for all losses, for they share the graph of the model, which is freed by it.
        def backward() -> None:
            if roots:
                with weighed(weights), guarded(divisions):
                    torch.autograd.backward([loss for loss, _ in roots], [_seed(loss, seed) for loss, seed in roots])

        return without_graph(reductions[0]) if len(losses) == 1 else _merged(reductions), backward

    def _read(
        self, name: str, loss: torch.Tensor, counted: Count | None, num_samples: int
    ) -> tuple[list[Entry], Reduction]:
        """Return the terms of a loss."""
        if counted is not None:
            # Its weights are those of its penalties, too, for they sum to one.
            on_device = isinstance(counted, torch.Tensor) and loss.grad_fn is not None
            divisions = read(loss, num_samples, waits=False).divisions if on_device else ()
            return [Entry(name or "0", None, counted, None)], Reduction(counted, divisions=divisions)
        # What a program returns where there is nothing to learn from, such as torch.zeros(()), is no term at all: to
        # count its samples would be to count some that have no item. A leaf that is a loss is one.
        if loss.grad_fn is None:
            return ([Entry(name or "0", None, num_samples, None)] if loss.requires_grad else []), Reduction(0.0)
        if name and only_parameters(loss.grad_fn):  # a penalty that was given by itself
            return [Entry(f"{_CONSTANT}{name}", None, num_samples, None)], Reduction(0.0, constants=(1.0,))
        reduction = read(loss, num_samples, waits=not self._deferred)
        if not reduction.terms:
            return [Entry(name or "0", None, reduction.items, None)], reduction
        # The first one bears the name of its loss, for most losses have one term; others are told by their places.
        found = []
        for index, (term, edge) in enumerate(zip(reduction.terms, reduction.entries, strict=True)):
            own = str(index) if not name else f"{name}.{index}" if index else name
            items = num_samples if term.kind == "unknown" and not term.numbers else term.divisor
            found.append(Entry(own, edge, items, term))
        return found, reduction

    def _match(self, name: str, entries: Sequence[Entry]) -> None:
        """Notice a loss that lacks a term: those behind it would be taken for others."""
        self._match_signatures(name, [_signature(entry) for entry in entries])

    def _match_signatures(self, name: str, own: list[Signature]) -> None:
        most = self._signatures.setdefault(name, own)
        if len(own) == len(most):
            return
        short, long = sorted((own, most), key=len)
        self._signatures[name] = long
        # It is the last ones that are missing if these are the first, and are not the last as well.
        self.differs = self.differs or short != long[: len(short)] or short == long[-len(short) :]

    def _value(self, loss: torch.Tensor, edge: Edge | None, values: Values | None) -> torch.Tensor | None:
        """Return what a term adds to the loss; None where that was not seen."""
        if edge is None:
            return loss.detach().clone()  # it may lie in memory that the next one is written to
        # A graph keeps no values. What made the term is the input of the addition by which it enters the loss; from
        # there on it may be multiplied once more, as in (a + b) / 2.
        value = None if values is None else values.of(edge.node.next_functions[edge.place][0])
        if value is None or edge.above is None:
            self.lacks_values = True
            return None
        return value * edge.above

    def _weigh(self, entry: Entry, value: torch.Tensor | None, dtype: torch.dtype) -> Count | None:
        """Return the weight of a term in a micro-batch; None where it counts nothing there."""
        column = self._columns.get(entry.name)
        if column is None:
            column = self._columns[entry.name] = self._column(entry)
        num_samples = self._sizes[-1]
        # A sum counts once in each micro-batch; what nothing tells is taken for a mean over samples, and measured.
        items: Count = 1.0 if column.kind == "sum" else entry.items if column.kind in OVER_ITEMS else num_samples
        is_whole = num_samples == self._num_samples
        if entry.term is None and (is_whole or self._totals.get(entry.name) == 0):
            items = without_none(items)  # nothing in the window counts
        # None where it has no items: its 0 / 0 must not reach any parameter.
        # Of a window in one piece there is nothing to guess.
        if self._deferred and isinstance(items, torch.Tensor) and is_whole:
            column.tally.take_all(items)
            # Where it is ``NONE`` there is no 0 / 0, which nothing would go through.
            weight: Count | None = 1.0 if entry.term is not None else (items != 0).to(torch.float32)
        else:
            weight = column.tally.weight(num_samples, items, dtype, is_stated=entry.term is None)
        column.shown.append((num_samples, entry.term))
        column.items.append(entry.items)
        column.places.append(len(self._sizes) - 1)
        if weight is not None:
            column.given.append(len(column.values))
        column.values.append(value)
        return weight

    def _column(self, entry: Entry) -> _Column:
        kind: TermKind = "samples"
        if not entry.name.startswith(_CONSTANT):
            kind = self._kinds.get(entry.name) or self._said(entry.name) or kind_alone(entry.term)
        total = {"samples": float(self._num_samples), "sum": 1.0}.get(kind) or self._totals.get(entry.name, 0.0)
        if self._sizes == [self._num_samples] and kind in OVER_ITEMS and not self._deferred:
            # Nothing is to be foretold of it.
            total = float(entry.items)  # of a window in one piece: whatever it counts
            total = total if math.isfinite(total) else 0.0
        if not total and self._deferred and self._is_unforeseen:
            total = float(self._num_samples)  # as good as the first micro-batch's count, and nothing waits for it
        return _Column(kind, Tally(self._num_samples, deferred=self._deferred, total=total))

    def _said(self, name: str) -> TermKind | None:
        """Return what the user says of a term."""
        said = self._stated if isinstance(self._stated, str | None) else self._stated.get(name)
        return None if said is None else "sum" if said == "sum" else "items"

    # What follows is asked once the last micro-batch has been added.

    def absorb(self, other: Terms) -> None:
        """Add the micro-batches of another rank, which come after those that are there; all of it was read."""
        first = len(self._sizes)
        self._sizes += other._sizes
        self._loss_of.update(other._loss_of)
        for name, column in other._columns.items():
            if name not in self._columns:
                self._columns[name] = _Column(column.kind, Tally(self._num_samples, deferred=False))
            self._columns[name].absorb(column, first)
        for name, rests in other._rests.items():
            moved = [(first + place, rest, unseen) for place, rest, unseen in rests]
            self._rests.setdefault(name, []).extend(moved)
        for name, signatures in other._signatures.items():
            self._match_signatures(name, signatures)
        self.differs = self.differs or other.differs
        self.lacks_values = self.lacks_values or other.lacks_values

    def are_of_all(self, sizes: Sequence[int]) -> bool:
        """Return whether these are the micro-batches that were added, none of which was weighed otherwise."""
        return self._sizes == list(sizes)

    def want(self, numbers: Numbers) -> None:
        """Ask for all that the window's end is decided by, of what lies on a device."""
        for column in self._columns.values():
            column.tally.want(numbers)
            numbers.want([*column.values, *column.items])
            for _, term in column.shown:
                numbers.want(() if term is None else term.numbers_unread())
        for rests in self._rests.values():
            numbers.want(rest for _, rest, _ in rests)

    def take_read(self, numbers: Numbers) -> None:
        """Take that as it was read."""
        # Whatever is decided below then asks the host, as it does where everything has been there all along.
        for column in self._columns.values():
            column.tally.take_read(numbers)
            column.values = [None if value is None else numbers.tensor(value) for value in column.values]
            column.items = list(map(numbers.count, column.items))
            column.shown = [(size, None if term is None else numbers.term(term)) for size, term in column.shown]
        for name, rests in self._rests.items():
            self._rests[name] = [(place, numbers.tensor(rest), unseen) for place, rest, unseen in rests]

    def doubtful(self, before: Mapping[str, Least]) -> tuple[list[InDoubt], dict[str, Least]]:
        """Return where terms may count less than their graphs show. Waits for the device.

        Args:
            before: the lowest count of each term in the windows before.

        Returns:
            these; and the lowest counts with those of this window.
        """
        found: list[InDoubt] = []
        least = dict(before)
        for name, column in self._columns.items():
            if column.kind not in OVER_ITEMS or len(self._sizes) < 2:
                continue
            counts, terms = column.tally.read(), [term for _, term in column.shown]
            least[name] = least_of(counts, terms, before.get(name, Least()))
            # Where nothing adds anything it is no matter what counts.
            column.is_nothing = all(
                _is_zero(value) for value, count in zip(column.values, counts, strict=True) if count
            )
            if column.is_nothing:
                continue
            is_known, also_ones = column.kind in KEPT_FROM_0, column.kind == "items or one"
            for index in doubtful(counts, terms, column.values, least[name], is_known=is_known, also_ones=also_ones):
                # Until it is known it is taken for what it was elsewhere.
                is_zero = _is_zero(column.values[index])
                assumed = 0.0 if is_known and is_zero else counts[index]
                found.append(InDoubt(column.places[index], name, counts[index], assumed, is_zero))
        return found, least

    def settle(self, doubts: Sequence[InDoubt], true: Mapping[tuple[int, str], float]) -> list[InDoubt]:
        """Put in what micro-batches truly count where that is known; return where it is not, of what is in doubt.

        The weight of a micro-batch is what its loss was divided by, whatever that stands for: only the total has to be
        mended.
        """
        for doubt in doubts:
            column = self._columns[doubt.name]
            index = column.places.index(doubt.index)
            found = true.get((doubt.index, doubt.name), doubt.assumed)
            if not found and _is_zero(column.values[index]):
                column.tally.leave_out(index)
            elif found != doubt.count:
                # Weights that add up to little add something all the same.
                column.missing[index] = doubt.count - found
        return [doubt for doubt in doubts if (doubt.index, doubt.name) not in true]

    def counts(self, kinds: Mapping[str, TermKind]) -> dict[str, list[float]]:
        """Return what each mean over items counts in each micro-batch; waits for the device."""
        # By what terms are, not by what they were taken for: that may be about to be mended.
        found = {}
        for name, kind in kinds.items():
            column = self._columns.get(name)
            if kind in OVER_ITEMS and column is not None and not column.is_nothing:
                counts = [0.0] * len(self._sizes)
                read = column.true_counts() if column.kind in OVER_ITEMS else [float(items) for items in column.items]
                for place, count in zip(column.places, read, strict=True):
                    counts[place] = count if math.isfinite(count) else 0.0
                found[name] = counts
        return found

    def counting(self) -> tuple[list[float], list[float]]:
        """Return the samples of each micro-batch in which any term counts something, 0 of the others; and all do."""
        # Terms count in numbers of their own, which add up to nothing: samples stand for all of them.
        in_any, in_all = [0.0] * len(self._sizes), list(map(float, self._sizes))
        for name, column in self._columns.items():
            for place, count in zip(column.places, column.tally.read(), strict=True):
                if not count:
                    in_all[place] = 0.0
                elif not name.startswith(_CONSTANT):
                    in_any[place] = float(self._sizes[place])
        return in_any, in_all

    def has_late_zero(self) -> bool:
        """Return whether a count that was read at the end is 0, and its term was not left out; before ``settle``."""
        for column in self._columns.values():
            counts = column.tally.read()
            if not all(counts[index] for index in column.given):
                return True
        return False

    def kinds(self) -> dict[str, TermKind]:
        """Return what each term is, as all micro-batches of the window show it together."""
        # Of one micro-batch a sum and a mean may look alike; sizes and counts that differ tell them apart.
        kinds: dict[str, TermKind] = {}
        for name, column in self._columns.items():
            if name.startswith(_CONSTANT):
                continue
            terms = [term for _, term in column.shown]
            known = self._kinds.get(name) or self._said(name) or (column.kind if None in terms else None)
            kinds[name] = known or kind_of_term([size for size, _ in column.shown], terms)  # type: ignore[arg-type]
        return kinds

    def used_kinds(self) -> dict[str, TermKind]:
        """Return what each term was taken for."""
        # What ranks have taken for different things was taken for none.
        return {
            name: column.kind
            for name, column in self._columns.items()
            if column.is_agreed and not name.startswith(_CONSTANT)
        }

    def true_totals(self, kinds: Mapping[str, TermKind], *, is_wide: bool) -> dict[str, float] | None:
        """Return what each mean over items counts in the window, where that is not what it was weighed with.

        Args:
            kinds: what the terms are.
            is_wide: whether the loss has 64 bits.
        """
        # Only where it matters: a weight that is off by rounding is as right as any.
        same = _SAME if is_wide else _SAME_IN_32_BITS
        totals = {name: total for name, counts in self.counts(kinds).items() if (total := math.fsum(counts))}
        for name, total in totals.items():
            column = self._columns[name]
            if column.kind not in OVER_ITEMS or not math.isclose(column.tally.guess, total, rel_tol=same):
                return totals
        return None

    def are_known(self, foretold: Mapping[str, float]) -> bool:
        """Return whether what was foretold of the window's totals is what they were weighed with in the end."""
        # Those that count nothing in this window say nothing of it.
        used = {name: column.tally for name, column in self._columns.items() if column.kind in OVER_ITEMS}
        return all(
            math.isclose(foretold.get(name, 0.0), tally.guess, rel_tol=_SAME_IN_32_BITS)
            for name, tally in used.items()
            if any(tally.read())
        )

    def are_there(self) -> bool:
        """Return whether there is any term."""
        return bool(self._columns)

    def are_several(self) -> bool:
        """Return whether there is more than one term."""
        return len(self._columns) > 1

    def apart(self) -> list[tuple[str, str, float, Reduction]]:
        """Return each term of a single micro-batch: its loss, its name, its value, and how it was reduced."""
        # Of validation, which joins them at its end: there is no window whose totals could be wrong.
        found = []
        for name, column in self._columns.items():
            (value,), (items,), ((size, term),) = column.values, column.items, column.shown
            reduction = Reduction(items, () if term is None else (term,))
            if value is None:
                continue
            # A count that is no number is that of a mean over nothing; one of 1 may have been kept from 0.
            number = value.item()
            is_none = stands_for_none(reduction, value, size)[0]
            if is_none or not math.isfinite(number) or not math.isfinite(float(items)):
                reduction, number = Reduction(0.0), 0.0
            found.append((self._loss_of[name], name, number, reduction))
        for name, ((_, rest, unseen),) in self._rests.items():
            if math.isfinite(number := rest.item()):
                items = self._columns[unseen[0]].items[0] if unseen else float(self._sizes[0])
                found.append((name, REST, number, Reduction(items)))
        return found

    def leave_out(self, num_samples: int) -> None:
        """Take a micro-batch that has no loss."""
        self._sizes.append(num_samples)

    def losses(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the window, and what each of several adds to it, by names such as ``loss/words``."""
        # Each term over its own items, and penalties once: together they are the loss of the whole window.
        parts: list[tuple[str, torch.Tensor]] = []
        for name, column in self._columns.items():
            of = self._loss_of[name]
            found = [
                (value, share)
                for value, share in zip(column.values, self._shares(column), strict=True)
                if share and value is not None
            ]
            if not column.missing and len(found) == len([count for count in column.tally.read() if count]):
                joined = [column.tally.loss([value for value, _ in found], column.kind == "sum")] if found else []
                parts.extend((of, part) for part in joined)
            else:
                parts.extend((of, value * share) for value, share in found)
        parts.extend((of, self._rest(of)) for of in self._rests)
        # In this order whatever is asked for: the sum of floats depends on it. They may be of several types.
        total = reduce(add, [part for _, part in parts]).detach()
        # Without a name it is the loss itself; and of one that counts nothing in this window there is nothing to say.
        counting = {self._loss_of[name] for name, column in self._columns.items() if any(column.tally.read())}
        named = {}
        for name in self._rests:  # in the order of the user's
            if name and name in counting:
                named[named_loss(name)] = reduce(add, [part for of, part in parts if of == name]).detach()
        return total, named

    def _shares(self, column: _Column) -> list[float]:
        """Return how much of the window's term each micro-batch is that has it."""
        counts = column.tally.read()
        total = column.total() if any(counts) else 1.0
        return [divisor_of(count) / total for count in counts]

    def _rest(self, name: str) -> torch.Tensor:
        """Return what no term of a loss is seen to be: constants, and terms whose values were not seen."""
        shares, rests = [], []
        for place, rest, unseen in self._rests[name]:
            share = self._sizes[place] / self._num_samples
            if unseen:
                column = self._columns[unseen[0]]
                share = self._shares(column)[column.places.index(place)]
            rests.append(rest)
            shares.append(share)
        wide = torch.promote_types(rests[0].dtype, torch.float32)
        # Shares add up to one in 64 bits, which not all devices have.
        exact = wide if rests[0].device.type == "mps" else torch.float64
        found = torch.stack([rest.to(rests[0].device, exact) for rest in rests])
        weights = torch.tensor(shares, dtype=exact, device=found.device)
        # A loss with a term that has no items is no number: the others tell what is constant.
        seen = weights * found.isfinite()
        total = (found.nan_to_num(0.0, 0.0, 0.0) * seen).sum() * (weights.sum() / seen.sum().clamp(min=1e-30))
        return total.to(wide)


def _is_zero(value: torch.Tensor | None) -> bool:
    return value is not None and not value.tolist()  # which reads it without an operation


def named_loss(name: str) -> str:
    """Return the name by which a report has one of several losses: that of an output may be the same."""
    return f"loss/{name}"


def _signature(entry: Entry) -> Signature:
    """Return what tells a term from others, whatever it counts."""
    if entry.term is None:
        return "mean", True, entry.name.startswith(_CONSTANT)
    return entry.term.kind.replace("unknown", "mean"), entry.term.is_items, False


def kind_alone(term: Term | None) -> TermKind:
    """Return what a term is taken for by what one micro-batch shows."""
    # PyTorch's own means, and what the user counts, show no term.
    if term is None:
        return "items"
    if term.kind == "unknown":
        return "samples"
    return "sum" if term.kind == "sum" else "items"


def _seed(loss: torch.Tensor, weight: Count) -> torch.Tensor:
    return weight.to(loss.dtype) if isinstance(weight, torch.Tensor) else torch.full_like(loss, weight)


def _merged(reductions: Sequence[Reduction]) -> Reduction:
    """Return the terms of several losses as those of their sum."""
    # As the graph of their sum would show them, one loss after the other.
    terms = tuple(term for reduction in reductions for term in reduction.terms or (_plain(reduction),))
    constants = tuple(constant for reduction in reductions for constant in reduction.constants)
    return Reduction(reductions[0].items, terms, constants)


def _plain(reduction: Reduction) -> Term:
    return Term("mean", divisor=reduction.items, is_items=True)
