"""Foretells what terms of a loss will count in a window, from the batch: the means of several need their totals first.

What a term counts is compared with what can be counted in the leaves of a batch: samples, numbers, entries that differ
from a value such as -100, rows that have any, sums. What is the same but for a factor in every micro-batch of a window
is counted beforehand in the windows that follow. Where it turns out wrong it is given up, and the window is run again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autoaccum.data.base import Window
from autoaccum.data.randomness import preserved_randomness
from autoaccum.loss.reading import read_all
from autoaccum.loss.terms import Count, without_none
from autoaccum.window.kept import may_stand_for

Measure = tuple[Any, ...]
"""What is counted: ("samples",), or (operation, path of the leaf, whether without its first column, a value)."""
Place = tuple[str, bool]
"""A leaf: its path, and whether without its first column."""
Leaves = Mapping[str, Sequence[torch.Tensor]]
"""The numbers in a batch, by where they are."""
Counts = Mapping[str, Sequence[float]]
"""What each term counts, in each micro-batch."""

_CHUNK = 64
"""Samples that are looked at together: whatever the plan is, so that it is no matter to what is foretold."""
_SAME = 1e-9
"""Relative difference up to which counts are the same but for a factor."""
_MOST_VALUES = 16
"""Values of a leaf of which it is asked whether entries that have them are those that do not count."""
_PATIENCE = 3
"""Times that what was found may turn out wrong before no more is looked for."""
_MOST_ROWS = 1000
"""Micro-batches that are remembered to find out what each value of a leaf counts, as with weights of classes."""


class Totals:
    """What is known of how the terms of a run count."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        # By the names of terms: what counts as they do, the likeliest first, each with its factor.
        self._known: dict[str, list[tuple[Measure, float]]] = {}
        self._failures: dict[str, int] = {}
        # What each value of a leaf counts shows only when there were as many micro-batches as values: what came before.
        self._histograms: list[dict[Place, dict[float, float]]] = []
        self._counted: dict[str, list[float]] = {}

    def copy(self) -> Totals:
        """Return another one that knows the same, and learns by itself."""
        other = Totals()
        other.load_state_dict(self.state_dict())
        return other

    def foretell(self, window: Window, names: Sequence[str]) -> dict[str, float]:
        """Return what terms will count in a window, of those of which it is known."""
        # The likeliest of what has agreed with each micro-batch so far. The others come next, should it turn out wrong.
        chosen = {name: self._known[name][0] for name in names if self._known.get(name) and not self.has_given_up(name)}
        of_leaves = [measure for measure, _ in chosen.values() if measure != _SAMPLES]
        counts = {_SAMPLES: float(window.num_samples)}
        if of_leaves:
            counts |= _totals_of(window, of_leaves)
        return {name: factor * counts[measure] for name, (measure, factor) in chosen.items()}

    def learn(self, window: Window, sizes: Sequence[int], counts: Counts) -> None:
        """Find what counts as the terms do, for those of which it was not known, or known wrongly.

        Args:
            window: the samples.
            sizes: of its micro-batches.
            counts: what each term counts in them.
        """
        wrong = [name for name, found in counts.items() if any(found) and not self.has_given_up(name)]
        if not wrong:
            return
        # Of the micro-batches as they were run, for sums over a whole window are met by chance more often.
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        # All at once, for one window: the leaves of each are walked through many times.
        batches = [_read(window, range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        leaves = [_leaves(batch) for batch in batches]
        values = _values(leaves)
        measured = {_SAMPLES: [float(size) for size in sizes]}
        measured |= _count(_measures(leaves[0], values), leaves)
        self._remember(leaves, values, wrong, counts)
        for name in wrong:
            before = [measure for measure, _ in self._known.get(name, [])]
            # What was right before as well is likelier than what is right by chance in this window.
            found = _matching(counts[name], {m: measured[m] for m in before if m in measured})
            found = found or _matching(counts[name], measured)
            weighed, is_open = ([], False) if found else self._weighed(name)
            self._known[name] = found or weighed
            # Of weights that need more windows to be told nothing is known yet; that is no failure.
            if (before and not found) or not (self._known[name] or is_open):
                self._failures[name] = self._failures.get(name, 0) + 1

    def counts_in_doubt(
        self, window: Window, sizes: Sequence[int], counts: Counts, doubts: Sequence[tuple[int, str]]
    ) -> dict[tuple[int, str], float]:
        """Return what micro-batches count of terms whose counts may be kept from 0, where the batch tells.

        Args:
            window: the samples.
            sizes: of its micro-batches.
            counts: what each term counts in them, as far as its graphs show.
            doubts: of which micro-batches, and terms, that is in doubt.
        """
        names = [name for name in dict.fromkeys(name for _, name in doubts) if self._known.get(name)]
        if not (names := [name for name in names if not self.has_given_up(name)]):
            return {}
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        measures = {measure: None for name in names for measure, _ in self._known[name] if measure != _SAMPLES}
        read = zip(starts, sizes, strict=True) if measures else ()
        leaves = [_leaves(_read(window, range(at, at + size))) for at, size in read]
        measured = {_SAMPLES: [float(size) for size in sizes]} | _count(list(measures), leaves)
        found: dict[tuple[int, str], float] = {}
        for name in names:
            places = [place for place, other in doubts if other == name]
            # All that has counted as the term does, and counts so where nothing is in doubt here, has to agree.
            rows = [[factor * number for number in measured[measure]] for measure, factor in self._known[name]]
            told = {tuple(row[at] for at in places) for row in rows if _explains(row, counts[name], places)}
            if len(told) == 1:
                found |= {(at, name): count for at, count in zip(places, told.pop(), strict=True)}
        return found

    def _remember(
        self,
        pieces: Sequence[Leaves],
        values: Mapping[str, Sequence[float]],
        names: Sequence[str],
        counts: Counts,
    ) -> None:
        """Keep how often each value stood in the leaves of micro-batches, and what terms counted in them."""
        # Begun anew with other terms, for the rows of all of them belong together.
        if len(self._histograms) > _MOST_ROWS or sorted(self._counted) != sorted(names):
            self._histograms, self._counted = [], {name: [] for name in names}
        for index, leaves in enumerate(pieces):
            self._histograms.append({place: _histogram(leaves, place) for place in _places(leaves, values)})
            for name in names:
                self._counted[name].append(counts[name][index])

    def _weighed(self, name: str) -> tuple[list[tuple[Measure, float]], bool]:
        """Find a leaf whose values count each for themselves, as with weights of classes.

        Returns:
            what was found; whether there may be one, and it takes more micro-batches to tell.
        """
        # The smallest weights that explain all that was counted; where there is one answer only, they are the weights.
        is_open = False
        wanted = torch.tensor(self._counted[name], dtype=torch.float64, device="cpu")
        for place in self._histograms[0]:
            rows = [histogram.get(place, {}) for histogram in self._histograms]
            kinds = sorted({value for row in rows for value in row})
            if len(kinds) > _MOST_VALUES * 8:
                continue
            table = torch.tensor(
                [[row.get(value, 0.0) for value in kinds] for row in rows], dtype=torch.float64, device="cpu"
            )
            # Of counts that are sums of weights in 32 bits the last digits are rounding.
            weights = torch.linalg.pinv(table) @ wanted
            if not torch.allclose(table @ weights, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max())):
                continue
            # Fewer micro-batches than values are met by some weights in any case.
            if int(torch.linalg.matrix_rank(table)) < len(kinds) or len(rows) <= len(kinds):
                is_open = True
                continue
            pairs = tuple(zip(kinds, weights.tolist(), strict=True))
            return [(("weights", *place, pairs), 1.0)], False
        return [], is_open

    def has_given_up(self, name: str) -> bool:
        """Return whether nothing that can be counted in a batch counts as a term does."""
        return self._failures.get(name, 0) >= _PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Return what is known, for a checkpoint."""
        return {
            "known": dict(self._known),
            "failures": dict(self._failures),
            "histograms": [list(histogram.items()) for histogram in self._histograms],
            "counted": dict(self._counted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._known, self._failures = dict(state["known"]), dict(state["failures"])
        self._histograms, self._counted = [dict(pairs) for pairs in state["histograms"]], dict(state["counted"])


_SAMPLES: Measure = ("samples",)


def counted_beforehand(window: Window, count: Callable[[Any], Mapping[str, Count]]) -> dict[str, float]:
    """Return what the user's own functions count in a window, where it lies."""
    # They are read once more, piece by piece; where they lie on a device, it is waited for once all is counted.
    found: dict[str, list[Count]] = {}
    for start in range(0, window.num_samples, _CHUNK):
        batch = _read(window, range(start, min(start + _CHUNK, window.num_samples)))
        for name, items in count(batch).items():
            found.setdefault(name, []).append(items)
    return _summed(found)


def _read(window: Window, positions: range) -> Any:
    with preserved_randomness():  # a collate_fn may draw
        return window.samples(positions)


def _totals_of(window: Window, measures: Sequence[Measure]) -> dict[Measure, float]:
    """Count in a window, piece by piece."""
    found: dict[Measure, list[Count]] = {measure: [] for measure in measures}
    for start in range(0, window.num_samples, _CHUNK):
        leaves = _leaves(_read(window, range(start, min(start + _CHUNK, window.num_samples))))
        for measure, counts in found.items():
            counts += _counts_of(measure, leaves)
    return _summed(found)


def _summed(counts: Mapping[Any, Sequence[Count]]) -> dict[Any, float]:
    """Read all counts at once, and add up those of each name."""
    numbers = read_all([count for of_one in counts.values() for count in of_one])
    found = {}
    for name, of_one in counts.items():
        found[name] = math.fsum(map(without_none, itertools.islice(numbers, len(of_one))))
    return found


def _leaves(batch: Any) -> dict[str, list[torch.Tensor]]:
    """Return the numbers in a batch by where they are; those of a list of many also together."""
    # The boxes of each image lie in a list: each list entry has a path of its own, and one that it shares with all.
    found: dict[str, list[torch.Tensor]] = {}

    # By keys and places alone: attributes of objects are nobody's to look at.
    def walk(node: Any, paths: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(value, tuple(f"{path}.{key}" for path in paths))
        elif isinstance(node, list | tuple) and any(not isinstance(entry, int | float | str | bytes) for entry in node):
            for index, entry in enumerate(node):
                walk(entry, tuple(dict.fromkeys(f"{path}{at}" for path in paths for at in (f"[{index}]", "[*]"))))
        else:
            numbers = _numbers(node)
            if numbers is not None:
                for path in paths:
                    found.setdefault(path, []).append(numbers)

    walk(batch, ("",))
    return found


def _numbers(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, np.ndarray | list | tuple):
        try:
            leaf = torch.as_tensor(leaf)
        except (TypeError, ValueError, RuntimeError):  # texts and objects
            return None
    is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return leaf if is_plain and leaf.ndim and not leaf.is_complex() and not leaf.is_meta else None


def _values(pieces: Sequence[Leaves]) -> dict[str, list[float]]:
    """Return the values of each leaf of which entries may be left out of a count: -100, and those that it has often."""
    # Which value is ignored nobody says: it is one that stands there, more often than not the most frequent.
    found: dict[str, list[float]] = {}
    for path in pieces[0]:
        tensors = [tensor for piece in pieces for tensor in piece.get(path, ())]
        if any(tensor.is_floating_point() for tensor in tensors) and not _has_few_values(tensors):
            continue
        unique, counts = torch.cat([tensor.flatten().cpu() for tensor in tensors]).unique(return_counts=True)  # type: ignore[no-untyped-call]
        often = unique[counts.argsort(descending=True)[:_MOST_VALUES]].tolist()
        found[path] = list(dict.fromkeys([*often, *unique[:1].tolist(), *unique[-1:].tolist()]))
    return found


def _has_few_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a leaf of floats is a mask, or the like."""
    # A thousand entries are enough to tell measurements from flags.
    few = torch.cat([tensor.flatten()[:1000] for tensor in tensors])
    return len(few.unique()) <= _MOST_VALUES  # type: ignore[no-untyped-call]


def _measures(leaves: Leaves, values: Mapping[str, list[float]]) -> list[Measure]:
    """List what can be counted, the likeliest first."""
    # Entries other than some value come first, for that is how targets are ignored; then what flags and masks add up
    # to; and numbers of entries last, which pads make larger.
    found: list[Measure] = []
    # A model that foretells the next word leaves the first label out.
    for is_shifted in (False, True):
        for path, tensors in leaves.items():
            if is_shifted and any(tensor.ndim < 2 for tensor in tensors):
                continue
            found += [("other than", path, is_shifted, value) for value in values.get(path, [])]
            if any(tensor.ndim > 1 for tensor in tensors):
                found += [("rows other than", path, is_shifted, value) for value in values.get(path, [])]
            found += [(operation, path, is_shifted, 0) for operation in ("above", "sum", "numbers")]
    return found


def _places(leaves: Leaves, values: Mapping[str, Sequence[float]]) -> list[Place]:
    """Return the leaves whose values may count each for themselves: those that have few, or whole numbers."""
    return [
        (path, is_shifted)
        for is_shifted in (False, True)
        for path, tensors in leaves.items()
        if path in values and not (is_shifted and any(tensor.ndim < 2 for tensor in tensors))
    ]


def _tensors_of(leaves: Leaves, place: Place) -> list[torch.Tensor]:
    path, is_shifted = place
    return [tensor[:, 1:] if is_shifted and tensor.ndim > 1 else tensor for tensor in leaves.get(path, ())]


def _histogram(leaves: Leaves, place: Place) -> dict[float, float]:
    """Return how often each value stands in a leaf."""
    found: dict[float, float] = {}
    for tensor in _tensors_of(leaves, place):
        unique, counts = tensor.flatten().cpu().unique(return_counts=True)  # type: ignore[no-untyped-call]
        for value, count in zip(unique.tolist(), counts.tolist(), strict=True):
            found[value] = found.get(value, 0.0) + count
    return found


def _count(measures: Sequence[Measure], pieces: Sequence[Leaves]) -> dict[Measure, list[float]]:
    """Count each measure in each piece."""
    found = {(measure, at): _counts_of(measure, piece) for measure in measures for at, piece in enumerate(pieces)}
    counts = _summed(found)
    return {measure: [counts[measure, at] for at in range(len(pieces))] for measure in measures}


def _counts_of(measure: Measure, leaves: Leaves) -> list[Count]:
    """Count something in a batch, in each tensor of the leaf by itself; on a device, where that lies there."""
    operation, path, is_shifted, value = measure
    tensors = _tensors_of(leaves, (path, is_shifted))
    # A value that was never seen counts nothing, until a window shows that it does: then its total is wrong.
    if operation == "weights":
        histogram = _histogram(leaves, (path, is_shifted))
        return [weight * histogram.get(kind, 0.0) for kind, weight in value]
    return [OPERATIONS[operation](tensor, value) for tensor in tensors if len(tensor)]


OPERATIONS: dict[str, Callable[[torch.Tensor, float], Count]] = {
    "other than": lambda tensor, value: (tensor != value).sum(),
    "rows other than": lambda tensor, value: (tensor != value).reshape(len(tensor), -1).any(1).sum(),
    "above": lambda tensor, value: (tensor > value).sum(),
    "sum": lambda tensor, value: tensor.sum(dtype=torch.float64),
    "numbers": lambda tensor, value: float(tensor.numel()),
}
"""What can be counted in a leaf, each with a value; not read yet, where that would wait for a device."""


def _explains(row: Sequence[float], counts: Sequence[float], in_doubt: Sequence[int]) -> bool:
    """Return whether a term counts so in micro-batches, and some of it somewhere, where counts in doubt may be kept."""
    pairs = list(zip(row, counts, strict=True))
    certain = [pair for at, pair in enumerate(pairs) if at not in in_doubt and any(pair)]
    return (
        bool(certain)
        and all(math.isclose(*pair, rel_tol=_SAME) for pair in certain)
        and all(may_stand_for(*pairs[at]) for at in in_doubt)
    )


def _matching(counts: Sequence[float], measured: Mapping[Measure, Sequence[float]]) -> list[tuple[Measure, float]]:
    """Return what counts as a term does in every micro-batch, but for a factor: where that is 1 first."""
    # A factor is all that may lie between them: coefficients of losses, or numbers for each item.
    total = math.fsum(counts)
    found = []
    for measure, numbers in measured.items():
        whole = math.fsum(numbers)
        if whole and all(
            math.isclose(count * whole, number * total, rel_tol=_SAME, abs_tol=_SAME * abs(total))
            for count, number in zip(counts, numbers, strict=True)
        ):
            found.append((measure, total / whole))
    # Samples need no look at the batch, whatever the factor.
    found.sort(key=lambda match: match[0] != _SAMPLES and match[1] != 1)
    return found
