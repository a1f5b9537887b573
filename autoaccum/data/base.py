"""States what training asks of data: windows, each readable again until the next is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

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

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions as one batch, where they lie: on the host, unless the data is not."""


def in_order(window: Window) -> Any:
    """Return all samples of a window as one batch, on the device, in the order of the data."""
    # Windows of samples of different lengths serve the longest first.
    own = getattr(window, "in_order", None)
    return window.micro_batch(0, window.num_samples) if own is None else own()


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
        """Return what tells it from other data, as JSON, with a digest where it is in memory; read nothing else."""

    def read(self, epoch: int, plan_at: PlanAt, passed: Iterable[int] = ()) -> Reader:
        """Begin a pass over the data, in the order of that epoch.

        Args:
            epoch: which one, from 0 on.
            plan_at: says the micro-batches to come, so that workers can read ahead.
            passed: sizes of windows that an earlier process took already. The samples that follow are those that would
                follow if these had been read.
        """

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the newest pass stands behind its last window, for a checkpoint; None before the first pass.

        By a digest a later process knows whether the samples that it passes over are those that were trained on.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where ``state_dict`` was asked for.

        ``read`` raises a DataError where other samples lead there than those that were trained on.
        """

    def example(self, num_samples: int) -> Any:
        """Return a batch of that many samples (repeated where there are not enough); leave the data as it was.

        Where a collate_fn takes samples of different lengths, the longest of the first few is repeated.
        """

    def form(self, num_samples: int) -> Any:
        """Return a batch with the entries of those that are read, so many samples or more; None if it may do harm."""
