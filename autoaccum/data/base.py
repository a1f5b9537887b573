"""States what training asks of data: windows, each readable again until the next is asked for, in a given order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from autoaccum.data.randomness import mix, preserved_randomness, seed_host
from autoaccum.memory.oom import insist

Collate = Callable[[list[Any]], Any]
"""(samples) -> a batch of them"""
PlanAt = Callable[[int], Iterable[int]]
"""(position) -> micro-batch sizes to prefetch for the window that begins there; asked for one after the other"""
Item = tuple[int, int, Any]
"""(epoch, position in the epoch, sample)"""
NextPiece = Callable[[int], tuple[int, Any]]
"""(samples wished for) -> (samples that came, the piece that holds them)"""


class Window(Protocol):
    """The samples of one optimizer step."""

    # Until the next one is asked for it may have to be run again, and any of its samples be asked for in other sizes.

    @property
    def num_samples(self) -> int:
        """Return how many samples it has."""

    @property
    def lengths(self) -> Sequence[int] | None:
        """Return how long each sample is, longest first, in the order that ``micro_batch`` serves them.

        It is None when samples are alike in length, when their length cannot be told, and when grouping them by it is
        of no use.
        """

    def micro_batch(self, start: int, size: int) -> Any:
        """Return the ``size`` samples from position ``start`` of the window, on the device, the caller's to edit."""


class Reader(Protocol):
    """One pass over the data."""

    # One window at a time, so that a stream never has to hold more samples than a step takes.

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """Return the next window, of up to ``num_samples``, and give up the one before it; None after the last.

        With ``whole`` it is None as well when fewer samples are left.
        """


class Source(Protocol):
    """Data to train on."""

    # Steps are counted in advance by it, for learning rates that fall over a run.
    num_samples: int | None
    """Samples in one pass; None when only reading tells."""

    def description(self) -> dict[str, Any]:
        """Return what tells it from other data, as JSON; read nothing that only training reads."""

    def read(self, epoch: int, plan_at: PlanAt, passed: Sequence[int] = ()) -> Reader:
        """Begin a pass over the data, in the order of that epoch.

        Args:
            epoch: which one, from 0 on.
            plan_at: says the micro-batches to come, so that workers can read ahead.
            passed: sizes of windows that an earlier process took already. The samples that follow are those that would
                follow if these had been read.
        """

    def example(self, num_samples: int) -> Any:
        """Return a batch of that many samples (repeated where there are not enough); leave the data as it was.

        Where a collate_fn takes samples of different lengths, the longest of the first few is repeated.
        """


class Order:
    """Which samples an epoch reads, in which order: a function of (seed, epoch)."""

    def __init__(
        self, num_samples: int, *, seed: int, shuffle: bool = False, sampler: Any = None, in_batches: bool = False
    ) -> None:
        """Set up an order of ``num_samples``.

        Args:
            num_samples: samples of the dataset.
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
        if sampler is not None:
            # The length of a sampler of batches is a count of batches: its samples are counted by drawing an epoch.
            self.num_samples = len(self(0)) if in_batches else len(sampler)

    def __call__(self, epoch: int) -> torch.Tensor | list[Any]:
        """Return indices into the dataset, in the order of that epoch."""
        # Mixed, for neighbouring seeds and epochs must not have orders in common; 63 bits, for torch takes a sign.
        seed = mix(self._seed, epoch) >> 1
        return insist(partial(self._drawn, epoch, seed), "the order of the samples was drawn")

    def _drawn(self, epoch: int, seed: int) -> torch.Tensor | list[Any]:
        if self._sampler is not None:
            drawn = _draw(self._sampler, epoch, seed)
            if not self._in_batches:
                return drawn
            # The user's batches say which samples come, in which order, and not how windows are cut.
            return [index for indices in drawn for index in indices]
        if self._shuffle:
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed))
        return torch.arange(self.num_samples)


def _draw(sampler: Any, epoch: int, seed: int) -> list[Any]:
    """List all that a sampler yields in an epoch.

    Its generators and the global ones are seeded for it, and put back.
    """
    # Samplers of several processes draw by the epoch that they are told, and would else repeat the first.
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generators = []
    for part in (sampler, getattr(sampler, "sampler", None)):  # a sampler of batches often wraps one of indices
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generators.append(generator)
    states = [generator.get_state() for generator in generators]
    # A sampler with a generator draws from it, and any other from the global ones, of torch, NumPy or Python.
    try:
        with preserved_randomness():
            seed_host(seed)
            for generator in generators:
                generator.manual_seed(seed)
            return list(sampler)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
