"""The order of samples: which ones an epoch reads, drawn from seed and epoch; not listed where they are many.

Up to ``LARGEST_LISTED`` samples the order of an epoch is a list. Beyond that it is worked out position by position: a
shuffled one by a permutation that needs no memory, and a sampler's draws as they are asked for, window after window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from math import isqrt
from typing import Any

import numpy as np
import torch

from autoaccum.data.base import Reader, Window
from autoaccum.data.randomness import IsolatedRandomness, mix
from autoaccum.errors import DataError
from autoaccum.memory.oom import insist

LARGEST_LISTED = 10**7
"""Samples: list the order of an epoch with no more of them. As a tensor it takes 80 MB and a tenth of a second."""
_ROUNDS = 8
"""Rounds of the permutation: four for each half. Luby and Rackoff (1988) show three to be enough to look random."""
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

    def __call__(self, epoch: int) -> torch.Tensor | list[Any] | Unlisted:
        """Return indices into the dataset, in the order of that epoch."""
        # Mixed, for neighbouring seeds and epochs must not have orders in common; 63 bits, for torch takes a sign.
        seed = mix(self._seed, epoch) >> 1
        return insist(partial(self._drawn, epoch, seed), "the order of the samples was drawn")

    def _drawn(self, epoch: int, seed: int) -> torch.Tensor | list[Any] | Unlisted:
        if self._sampler is not None:
            draws = Draws(self._sampler, epoch, seed, self.num_samples, in_batches=self._in_batches)
            return draws if self.num_samples > LARGEST_LISTED else draws.listed()
        if self._shuffle:
            if self.num_samples > LARGEST_LISTED:
                return Permutation(self.num_samples, seed)
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed), device="cpu")
        return (
            InTurn(self.num_samples)
            if self.num_samples > LARGEST_LISTED
            else torch.arange(self.num_samples, device="cpu")
        )

    def description(self) -> dict[str, Any]:
        """Return what a run that goes on has to know of the order beside its seed."""
        # Earlier versions listed this order too, and drew another one: their runs cannot go on in this one.
        is_permuted = self._sampler is None and self._shuffle and self.num_samples > LARGEST_LISTED
        return {"order": "worked out by position"} if is_permuted else {}


def count_in_batches(sampler: Any, seed: int) -> int | None:
    """Return how many samples the batches of a sampler hold in its first epoch; None if they are too many to list."""
    # Its length is a count of batches: its samples are counted by drawing an epoch.
    draws = Draws(sampler, 0, mix(seed, 0) >> 1, LARGEST_LISTED, in_batches=True)
    count = draws.skip(LARGEST_LISTED + 1)
    return None if count > LARGEST_LISTED else count


class Unlisted(ABC):
    """An order of an epoch that is nowhere as a whole: indices by their position in it."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    @abstractmethod
    def at(self, positions: Sequence[int]) -> list[Any]:
        """Return the indices at those positions, each of which is in the epoch."""

    def __getitem__(self, positions: slice) -> torch.Tensor:
        """Return the indices of a stretch of the order as a tensor."""
        return torch.tensor(self.at(range(*positions.indices(self.num_samples))), dtype=torch.int64, device="cpu")


class InTurn(Unlisted):
    """The order that the dataset has."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def at(self, positions: Sequence[int]) -> list[Any]:
        """Return the positions themselves."""
        return list(positions)


class Permutation(Unlisted):
    """A random order of any number of samples, of which any position can be asked for.

    A number below a * b is taken for a pair of one below a and one below b. To each half in turn a hash of the other
    half is added, which can be undone, whatever the hash: a Feistel network, in the variant for any a and b of Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). So it maps the pairs one to one. Of a pair that stands
    for no sample the image is taken again, until it does: a cycle of the map cannot leave the samples for good.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        """Set up the order of that seed."""
        self.num_samples = num_samples
        # Nearly equal, so that each half has as many others to be hashed by; a * b is above the samples by less than a.
        self._a = isqrt(max(num_samples - 1, 0)) + 1
        self._b = -(-num_samples // self._a)
        self._keys = [np.uint64(mix(seed, number)) for number in range(_ROUNDS)]

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the indices at those positions."""
        found = self._once(np.asarray(positions, np.uint64))
        while (outside := np.flatnonzero(found >= self.num_samples)).size:
            found[outside] = self._once(found[outside])
        return found.tolist()  # type: ignore[no-any-return]

    def _once(self, numbers: Any) -> Any:
        """Map numbers below a * b one to one."""
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = np.divmod(numbers, b)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _hashed(left, key) % b) % b
            else:
                left = (left + _hashed(right, key) % a) % a
        return left * b + right


def _hashed(numbers: Any, key: np.uint64) -> Any:
    """Return 64 bits for each number: the finaliser of splitmix64, as in ``randomness.mix``, of many at once."""
    numbers = numbers + key  # modulo 2**64, as arrays are added
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class Draws(Unlisted):
    """What a sampler yields in an epoch: drawn when it is asked for, and kept until it is given up.

    Its generators and the global ones are seeded for it, and have their own states again after each draw.
    """

    def __init__(self, sampler: Any, epoch: int, seed: int, num_samples: int, *, in_batches: bool = False) -> None:
        """Begin an epoch."""
        self.num_samples = num_samples
        # Samplers of several processes draw by the epoch that they are told, and would else repeat the first.
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        generators = []
        for part in (sampler, getattr(sampler, "sampler", None)):  # a sampler of batches often wraps one of indices
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generators.append(generator)
        # A sampler with a generator draws from it, and any other from the global ones, of torch, NumPy or Python.
        self._randomness = IsolatedRandomness(seed)
        self._states = []
        for generator in generators:
            outside = generator.get_state()
            self._states.append((generator, generator.manual_seed(seed).get_state()))
            generator.set_state(outside)
        with self._drawing():
            drawn = iter(sampler)
        # The user's batches say which samples come, in which order, and not how windows are cut.
        self._iterator: Iterator[Any] = (index for indices in drawn for index in indices) if in_batches else drawn
        self._kept: deque[Any] = deque()
        self._first = 0  # position of the first that is kept

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let all generators go on, within it, from where the last draw left them."""
        outside = [generator.get_state() for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            with self._randomness():
                yield
        finally:
            self._states = [(generator, generator.get_state()) for generator, _ in self._states]
            for (generator, _), state in zip(self._states, outside, strict=True):
                generator.set_state(state)

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


class Forgetful:
    """A reader in an order whose draws are given up with the window that they were for."""

    def __init__(self, reader: Reader, draws: Draws, start: int) -> None:
        """Set up; ``start`` is the position of the first window."""
        self._reader = reader
        self._draws = draws
        self._position = start

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """Return the next window: see ``Reader``."""
        self._draws.forget(self._position)
        window = self._reader.window(num_samples, whole)
        if window is not None:
            self._position += window.num_samples
        return window


def reading(order: object, start: int, read: Callable[[], Reader]) -> Reader:
    """Return a reader in an order, from a position on, that keeps no more of it than a window needs."""
    if not isinstance(order, Draws):
        return read()
    order.forget(start)
    return Forgetful(read(), order, start)


def chosen(order: Any, positions: Sequence[int]) -> list[Any]:
    """Return the indices at those positions of an order; datasets take ints."""
    if isinstance(order, torch.Tensor):
        return order[list(positions)].tolist()
    if isinstance(order, Unlisted):
        return order.at(positions)
    return [order[position] for position in positions]
