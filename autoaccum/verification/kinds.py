"""Notices samples of a kind that was not there before: the first ignored target, the first negative, another class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from autoaccum.data import batches
from autoaccum.memory.oom import insist
from autoaccum.verification.leaves import has_numbers, numbers_of

_MOST_NUMBERS = 1024
"""Numbers of a sample's tensor that are looked at: labels, masks and tokens have few, and what has more is an input."""
_MOST_WAITING = 65_536
"""Numbers of micro-batches that wait to be looked at all together."""
_DECADES = 12
"""Powers of ten that are told apart: a label of 255 or 999 among ten classes is another kind."""
_NOTHING = "what counts nothing"
_JOINED = "micro-batches joined: "


class Kinds:
    """What the batches of a run have held so far, as far as it decides what a loss counts."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._known: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a window."""
        # Rows of each tensor by their width, not looked at yet.
        self._waiting: dict[tuple[int, int], list[Any]] = {}
        self._numbers = 0  # that wait
        # Facts of those that were, on their device: nothing waits for them until the window's end.
        self._facts: dict[int, Any] = {}
        self._shapes: set[tuple[int, tuple[int, ...]]] = set()

    def look_at(self, batch: Any) -> None:
        """Look at a micro-batch."""
        for index, leaf in enumerate(batches.flatten(batch)[0]):
            if not has_numbers(leaf) or 0 in leaf.shape:
                continue
            self._shapes.add((index, leaf.shape[1:]))
            # Before anything is copied: what has more is as large as an image.
            if math.prod(leaf.shape[1:]) > _MOST_NUMBERS or (numbers := numbers_of(leaf)) is None:
                continue
            width = numbers.shape[1:].numel()
            rows = numbers.reshape(-1, width)
            if rows.device.type != "cpu":
                self._keep(index, _facts_of(rows, torch))
                continue
            # On the host all are looked at together: to begin an operation takes longer than to do it. They are NumPy's
            # meanwhile, which is no memory that micro-batches are planned by.
            self._waiting.setdefault((index, width), []).append(rows.numpy().copy())
            self._numbers += rows.numel()
            if self._numbers > _MOST_WAITING:
                self._gather()

    def _gather(self) -> None:
        for (index, _), waiting in self._waiting.items():
            self._keep(index, _facts_of(np.concatenate(waiting), np))
        self._waiting, self._numbers = {}, 0

    def _keep(self, index: int, facts: Any) -> None:
        known = self._facts.get(index)
        # One for all micro-batches: a window of many takes no more memory than one of few.
        self._facts[index] = (
            facts if known is None else (torch if isinstance(facts, torch.Tensor) else np).minimum(known, facts)
        )

    def new(self) -> set[str]:
        """Return what this window holds and none before it did; waits for the device."""
        return self._read() - self._known

    def accept(self) -> None:
        """Take what this window holds for known."""
        self._known |= self._read()

    def accept_nothing(self) -> None:
        """Take it for known that what has no loss that is a number counts nothing."""
        self._known.add(_NOTHING)

    def accept_joined(self, size: int) -> None:
        """Take it for known that two micro-batches of so many samples have the loss of both joined."""
        self._known.add(f"{_JOINED}{size}")

    @property
    def largest_joined(self) -> int:
        """Return the most samples of which that is known."""
        sizes = [int(fact.removeprefix(_JOINED)) for fact in self._known if fact.startswith(_JOINED)]
        return max(sizes, default=0)

    @property
    def nothing_is_known(self) -> bool:
        """Return whether that is known."""
        return _NOTHING in self._known

    def _read(self) -> set[str]:
        # Outside of any micro-batch, so that no smaller one could help.
        return insist(self._here, "the kinds of samples were read")

    def _here(self) -> set[str]:
        self._gather()
        found = {f"{index}: {tuple(shape)}" for index, shape in self._shapes}
        for index, facts in self._facts.items():
            low, least_high, minus_high, least_size, minus_size, least, minus_nan = facts.tolist()
            shown = {
                "zeros": least == 0,
                "negatives": low < 0,
                "nothing but zeros": least_size == 0,
                "nothing but negatives": least_high < 0,
                "several values": low != -minus_high,
                "no numbers": minus_nan < 0,
            }
            decades = range(1, _DECADES + 1)
            shown |= {f"numbers beyond 1e{decade}": -minus_size >= 10.0**decade for decade in decades}
            found.update(f"{index}: {name}" for name, is_there in shown.items() if is_there)
        return found

    def state_dict(self) -> list[str]:
        """Return what is known, for a checkpoint."""
        return sorted(self._known)

    def load_state_dict(self, known: list[str]) -> None:
        """Put back what ``state_dict`` returned."""
        self._known = set(known)


def _facts_of(rows: Any, xp: Any) -> Any:
    """Return (7,), of rows of numbers by NumPy or PyTorch: the least number, the least that is the most of its row,
    minus the most, the least absolute value that is the largest of its row, minus the largest, the least, minus whether
    one is NaN. The least of such facts are those of several batches.
    """
    is_nan = xp.isnan(rows)
    rows = xp.where(is_nan, xp.ones_like(rows), rows)
    low, high = xp.amin(rows, axis=1), xp.amax(rows, axis=1)
    size, nan = xp.maximum(high, -low), xp.amax(is_nan * xp.ones_like(rows), axis=1)
    return xp.amin(xp.stack([low, high, -high, size, -size, xp.amin(xp.abs(rows), axis=1), -nan]), axis=1)
