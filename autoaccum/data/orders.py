"""The order of samples: which ones an epoch reads, drawn from seed and epoch.

Beyond ``LARGEST_LISTED`` samples the draws of a sampler are not listed, but made as windows ask for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch

from autoaccum.data.base import Reader, Window
from autoaccum.data.digests import refuse_others
from autoaccum.data.parts import generators_of, set_epoch
from autoaccum.data.randomness import IsolatedRandomness, mix
from autoaccum.errors import DataError
from autoaccum.memory.oom import insist

LARGEST_LISTED = 10**7
"""Samples: list the draws of a sampler for an epoch with no more of them."""
_AT_ONCE = 2**16
"""Take so many indices at a time for a digest."""
_AHEAD = 4096
"""Draw so many indices at least: to change the random states for them takes as long as some hundred draws."""


class Order:
    """Which samples an epoch reads, in which order: a function of (seed, epoch)."""

    def __init__(
        self, num_samples: int, *, seed: int, shuffle: bool = False, sampler: Any = None, in_batches: bool = False
    ) -> None:
        """Set up an order of ``num_samples``.

        Args:
            num_samples: samples of an epoch.
            seed: of the shuffling.
            shuffle: whether each epoch has an order of its own; else it is that of the dataset.
            sampler: yields the indices of an epoch, or lists of them; it takes precedence over ``shuffle``.
            in_batches: whether the sampler yields lists.
        """
        # No state but these: an epoch's order is made again when a run is resumed in the midst of it.
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._in_batches = in_batches
        self.num_samples = num_samples
        # Of the newest pass, and of one that an earlier process began.
        self._newest: tuple[int, Taken] | None = None
        self._saved: dict[str, Any] | None = None

    def __call__(self, epoch: int) -> torch.Tensor | range | list[Any] | Draws:
        """Return indices into the dataset, in the order of that epoch.

        Raises:
            DataError: an earlier process was given another order in the epoch that has ended.
        """
        saved = self._saved
        if saved is not None and saved["epoch"] != epoch:
            self._saved = None
            # To draw more once more would take too long.
            if self._sampler is not None and saved["position"] <= LARGEST_LISTED:
                self._check(saved, Taken(self(saved["epoch"])))
        # Mixed, for neighbouring seeds and epochs must not have orders in common; 63 bits, for torch takes a sign.
        seed = mix(self._seed, epoch) >> 1
        return insist(partial(self._drawn, epoch, seed), "the order of the samples was drawn")

    def _drawn(self, epoch: int, seed: int) -> torch.Tensor | range | list[Any] | Draws:
        if self._sampler is not None:
            draws = Draws(self._sampler, epoch, seed, self.num_samples, in_batches=self._in_batches)
            return draws if self.num_samples > LARGEST_LISTED else draws.listed()
        if self._shuffle:
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed), device="cpu")
        return range(self.num_samples)

    def reading(self, order: Any, epoch: int, start: int, read: Callable[[], Reader]) -> Reader:
        """Return a reader in an order of an epoch, from a position on.

        Raises:
            DataError: an earlier process was given other samples before that position.
        """
        # What no sampler draws follows from the seed alone, and need not be kept.
        taken, saved, self._saved = Taken(None if self._sampler is None else order), self._saved, None
        if saved is not None:
            self._check(saved, taken)
        taken.position = start
        taken.give_up()
        self._newest = (epoch, taken)
        return _Counted(read(), taken)

    def _check(self, saved: dict[str, Any], taken: Taken) -> None:
        if taken.upto(saved["position"]) != saved["digest"]:
            refuse_others(type(self._sampler).__name__, saved["epoch"], saved["position"])

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the newest pass stands, with a digest of what was taken; None before the first."""
        if self._newest is None:
            return self._saved
        epoch, taken = self._newest
        return {"epoch": epoch, "position": taken.position, "digest": taken.upto(taken.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass compare itself with what ``state_dict`` has returned."""
        self._newest, self._saved = None, state


def count_in_batches(sampler: Any, seed: int) -> int | None:
    """Return how many samples the batches of a sampler hold in its first epoch; None if they are too many to list."""
    # Its length is a count of batches: its samples are counted by drawing an epoch.
    draws = Draws(sampler, 0, mix(seed, 0) >> 1, LARGEST_LISTED, in_batches=True)
    count = draws.skip(LARGEST_LISTED + 1)
    return None if count > LARGEST_LISTED else count


class Draws:
    """What a sampler yields in an epoch: drawn when it is asked for, and kept until it is given up.

    Its generators and the global ones are seeded for it, and have their own states again after each draw.
    """

    def __init__(self, sampler: Any, epoch: int, seed: int, num_samples: int, *, in_batches: bool = False) -> None:
        """Begin an epoch."""
        self.num_samples = num_samples
        # A sampler of batches often wraps one of indices. Those of several processes draw by the epoch that they are
        # told, and would else repeat the first.
        set_epoch(epoch, sampler, getattr(sampler, "sampler", None))
        # A sampler with generators draws from these, and any other from the global ones, of torch, NumPy or Python.
        self._drawing = IsolatedRandomness(seed, generators_of(sampler))
        with self._drawing():
            drawn = iter(sampler)
        # The user's batches say which samples come, in which order, and not how windows are cut.
        self._iterator: Iterator[Any] = (index for indices in drawn for index in indices) if in_batches else drawn
        self._kept: deque[Any] = deque()
        self._first = 0  # position of the first that is kept

    def listed(self) -> list[Any]:
        """Return all of them, however many the sampler has promised."""
        with self._drawing():
            return list(self._iterator)

    def at(self, positions: Sequence[int]) -> list[Any]:
        """Return the indices at those positions, none of which was given up.

        Raises:
            DataError: the sampler ends before.
        """
        if not positions:
            return []
        if (missing := max(positions) + 1 - self._first - len(self._kept)) > 0:
            ahead = min(max(missing, _AHEAD), self.num_samples - self._first - len(self._kept))
            with self._drawing():
                self._kept.extend(islice(self._iterator, ahead))
            if (drawn := self._first + len(self._kept)) <= max(positions):
                raise DataError(f"data: its sampler promised {self.num_samples} indices and ended after {drawn}.")
        if isinstance(positions, range) and positions.step == 1:  # a deque is slow to look into, and quick to go along
            return list(islice(self._kept, positions.start - self._first, positions.stop - self._first))
        return [self._kept[position - self._first] for position in positions]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, positions: slice) -> torch.Tensor:
        """Return the indices of a stretch of the order as a tensor."""
        return torch.tensor(self.at(range(*positions.indices(self.num_samples))), dtype=torch.int64, device="cpu")

    def forget(self, position: int) -> None:
        """Give up what lies before a position; what was not drawn yet is drawn and passed over."""
        while self._kept and self._first < position:
            self._kept.popleft()
            self._first += 1
        if self._first < position:
            self._first += self.skip(position - self._first)

    def skip(self, count: int) -> int:
        """Draw so many and keep none; return how many there were."""
        # Counted in C: to go on after 10**9 draws is to draw them again, for nothing else knows a sampler's state.
        numbered = enumerate(islice(self._iterator, count), start=1)
        with self._drawing():
            last = deque(numbered, maxlen=1)
        return last[0][0] if last else 0


class InOrder:
    """A source whose place is the place in its order."""

    _order: Order

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the newest pass stands in its order."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass compare its order with it."""
        self._order.load_state_dict(state)


class Taken:
    """What was taken of an epoch's order, and a digest of it, which is extended when it is asked for."""

    def __init__(self, order: Any) -> None:
        """Begin with nothing."""
        self.position = 0
        """Of the next window."""
        self._order = order
        self._digest = blake2b(digest_size=8)
        self._digested = 0

    def give_up(self) -> None:
        """Forget draws that no window needs any more."""
        if isinstance(self._order, Draws):
            self.upto(self.position)

    def end(self) -> None:
        """Let go of the order, whose epoch has ended."""
        self.upto(self.position)
        self._order = None

    def upto(self, position: int) -> str:
        """Return the digest of the indices before a position; give up those that were drawn for it."""
        order = self._order
        for start in range(self._digested, position, _AT_ONCE):
            stop = min(start + _AT_ONCE, position)
            if isinstance(order, Draws):
                self._digest.update(_texts(order.at(range(start, stop))))
                order.forget(stop)
            elif isinstance(order, list):
                self._digest.update(_texts(order[start:stop]))
        self._digested = max(position, self._digested)
        return self._digest.hexdigest()


def _texts(indices: list[Any]) -> bytes:
    return (repr(indices)[1:-1] + ", ").encode()


class _Counted:
    """A reader that counts what it has served, and gives draws up with the window that they were for."""

    def __init__(self, reader: Reader, taken: Taken) -> None:
        self._reader = reader
        self._taken = taken

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """Return the next window: see ``Reader``."""
        self._taken.give_up()
        window = self._reader.window(num_samples, whole)
        if window is not None:
            self._taken.position += window.num_samples
        else:
            self._taken.end()
        return window


def chosen(order: Any, positions: Sequence[int]) -> list[Any]:
    """Return the indices at those positions of an order; datasets take ints."""
    if isinstance(order, torch.Tensor):
        return order[list(positions)].tolist()
    if isinstance(order, Draws):
        return order.at(positions)
    return [order[position] for position in positions]
