"""What training asks of data: windows, each readable again until the next is asked for; and the order of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from autoaccum.data.randomness import mix, preserved, seed_host

Collate = Callable[[list[Any]], Any]
PlanAt = Callable[[int], Iterable[int]]
"""(position) -> micro-batch sizes to prefetch for the window that begins there; asked for one after the other"""
Item = tuple[int, int, Any]
"""(epoch, position in the epoch, sample)"""
NextPiece = Callable[[int], tuple[int, Any]]
"""(samples wished for) -> (samples that came, the piece that holds them)"""


class Window(Protocol):
    """The samples of one optimizer step."""

    @property
    def num_samples(self) -> int:
        """Samples; for a stream of unknown length the most there can be."""

    @property
    def lengths(self) -> Sequence[int] | None:
        """How long each sample is, longest first, in the order that ``micro_batch`` serves them.

        None when samples are alike in length, their length cannot be told, or grouping them by it is of no use.
        """

    def micro_batch(self, start: int, size: int) -> Any:
        """The ``size`` samples from position ``start`` of the window, on the device, the caller's to edit."""


class Reader(Protocol):
    """One pass over the data."""

    def window(self, num_samples: int, whole: bool = False) -> Window | None:
        """The next window, of up to ``num_samples``; None after the last. The window before it is given up.

        With ``whole``, None too when fewer samples are left.
        """


class Source(Protocol):
    """Data to train on."""

    num_samples: int | None
    """Samples in one pass; None when only reading tells."""

    def description(self) -> dict[str, Any]:
        """What tells it from other data, as JSON; nothing is read that only training reads."""

    def read(self, epoch: int, plan_at: PlanAt, passed: Sequence[int] = ()) -> Reader:
        """One pass over the data, in the order of that epoch, from behind the windows that were ``passed`` already.

        These are sizes: the samples that follow are those that would follow if they had been read.
        """

    def example(self, num_samples: int) -> Any:
        """A batch of that many samples (repeated where there are not enough) that leaves the data as it was.

        Where a collate_fn takes samples of different lengths, the longest of the first few is repeated.
        """


class Order:
    """Which samples an epoch reads, in which order: a function of (seed, epoch)."""

    def __init__(
        self, num_samples: int, *, seed: int, shuffle: bool = False, sampler: Any = None, in_batches: bool = False
    ) -> None:
        """``sampler`` yields indices, or ``in_batches`` lists of them, and takes precedence over ``shuffle``."""
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._in_batches = in_batches
        self.num_samples = num_samples
        if sampler is not None:
            self.num_samples = len(self(0)) if in_batches else len(sampler)

    def __call__(self, epoch: int) -> torch.Tensor | list[Any]:
        """Indices into the dataset, in the order of that epoch."""
        seed = mix(self._seed, epoch) >> 1
        if self._sampler is not None:
            drawn = _draw(self._sampler, epoch, seed)
            return [index for indices in drawn for index in indices] if self._in_batches else drawn
        if self._shuffle:
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed))
        return torch.arange(self.num_samples)


def _draw(sampler: Any, epoch: int, seed: int) -> list[Any]:
    """All that a sampler yields in an epoch, with its generators and the global ones seeded, and put back."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    inner = getattr(sampler, "sampler", None)
    generators = [g for s in (sampler, inner) if isinstance(g := getattr(s, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with preserved():
        seed_host(seed)
        for generator in generators:
            generator.manual_seed(seed)
        drawn = list(sampler)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return drawn
