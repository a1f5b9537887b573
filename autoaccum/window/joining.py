"""Joins what the ranks have computed of a window, so that its end is decided as if one rank had run all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError
from autoaccum.loss.terms import Reduction
from autoaccum.loss.weighting import Tally
from autoaccum.ranks.group import Group, undisturbed
from autoaccum.ranks.shares import of_all_ranks
from autoaccum.window.job import Job
from autoaccum.window.terms import Terms
from autoaccum.window.transaction import Transaction


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a rank tells of its micro-batches, all of it on the host."""

    num_samples: int
    """Of the window, as it was asked of this rank."""
    sizes: Sequence[int]
    reductions: Sequence[Reduction]
    losses: Sequence[torch.Tensor | None]
    counts: Sequence[float]
    late: Sequence[int]
    """Indices of those whose count was read at the end."""
    guess: float
    """What it has taken the window to count; 0 where it had nothing to count."""
    dropped: Sequence[int]
    """Where those begin whose loss was not a number."""
    norms: dict[int, torch.Tensor]
    """Of what each of them adds to the gradient."""
    have_gradients: Sequence[bool]
    """Of the parameters, in their order."""
    has_changed: bool
    """Whether it has seen what no window before has shown."""
    outputs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The micro-batches of all ranks, one rank's after the other's."""

    sizes: list[int]
    reductions: list[Reduction]
    losses: list[torch.Tensor | None]
    tally: Tally
    dropped: list[int]
    norms: dict[int, torch.Tensor]
    have_gradients: list[bool]
    """Whether any rank has one, of each parameter."""
    has_changed: bool


def told(trained: Sequence[torch.Tensor], tally: Tally, **found: Any) -> Told:
    """Return what this rank tells of its micro-batches.

    Raises:
        ArgumentError: a gradient is sparse.
    """
    if any(p.grad is not None and p.grad.is_sparse for p in trained):
        cure = "Pass sparse=False to the embedding, or train on one process."
        raise ArgumentError("ranks", "together", "dense gradients", cure)
    # What an accelerator has counted was read with all else at the share's end.
    counts = tuple(tally.read())
    gradients = [p.grad is not None for p in trained]
    return Told(counts=counts, late=tuple(tally.late), guess=tally.guess, have_gradients=gradients, **found)


def share_of_one(num_samples: int) -> ArgumentError:
    """Return the error for a share of one sample, of which the model cannot compute a loss."""
    cure = "Each rank needs two samples of every window: take fewer ranks, more samples, or drop_last=True."
    return ArgumentError("effective_batch", num_samples, "windows of two samples for each rank", cure)


def join(told: Sequence[Told], num_samples: int) -> Joined:
    """Return what all ranks have told, as if it were one's.

    Raises:
        ArgumentError: it is of other windows on other ranks, as a function for the effective batch may have it.
    """
    asked = [each.num_samples for each in told]
    if len(set(asked)) > 1:
        accepted = f"the same window on all ranks, which were asked for {asked} samples"
        raise ArgumentError("effective_batch", num_samples, accepted)
    # Each has weighed by a guess of its own. That of the first which had anything to weigh stands for all of them.
    guess = next((each.guess for each in told if each.guess), 0.0)
    late: list[int] = []
    dropped: list[int] = []
    norms: dict[int, torch.Tensor] = {}
    # Ranks count their micro-batches and samples from 0; of the window they come one rank's after the other's.
    index = position = 0
    for each in told:
        late += [index + place for place in each.late]
        dropped += [position + place for place in each.dropped]
        norms |= {index + place: norm * (each.guess / guess) for place, norm in each.norms.items()}
        index, position = index + len(each.sizes), position + sum(each.sizes)
    return Joined(
        sizes=[size for each in told for size in each.sizes],
        reductions=[reduction for each in told for reduction in each.reductions],
        losses=[loss for each in told for loss in each.losses],
        tally=Tally.of([count for each in told for count in each.counts], late, num_samples=num_samples, guess=guess),
        dropped=dropped,
        norms=norms,
        have_gradients=[any(found) for found in zip(*(each.have_gradients for each in told), strict=True)],
        has_changed=any(each.has_changed for each in told),
    )


class SharedTransaction(Transaction):
    """A window of which several ranks run a share each; its end is decided on all of them, by the same numbers."""

    def __init__(self, job: Job, group: Group, **options: Any) -> None:
        """Set up for a group; ``options`` are those of ``Transaction``."""
        super().__init__(job, **options)
        self.group = self._group = group

    def begin(self, window: Window) -> None:
        """Begin a window, of which a share was passed."""
        super().begin(window)
        self._begin_anew(of_all_ranks(window).num_samples)

    def _read_end(self) -> None:
        """Join what all ranks have run of the window, gradients too: from here on each of them has the same."""
        super()._read_end()
        trained = self._gradients.trained()
        # An optimizer may have been given parameters of another type since; there is time for that as yet.
        self._group.prepare([p for p in trained if p.requires_grad])
        own = told(
            trained,
            self._tally,
            num_samples=self._num_samples,
            sizes=self._sizes,
            reductions=self._reductions,
            losses=self._losses,
            dropped=self._dropped,
            norms=self._norms,
            has_changed=self.signs.have_changed,
            outputs=self.outputs.told(),
        )
        heard = self._group.exchange(own)
        self.is_joined = True
        with undisturbed():  # nothing may fail before gradients are added up, for which others wait
            joined = join(heard, self._num_samples)
        self._sizes, self._reductions, self._losses = joined.sizes, joined.reductions, joined.losses
        self._tally, self._dropped, self._norms = joined.tally, joined.dropped, joined.norms
        self.signs.have_changed = joined.has_changed
        summed = [p for p, is_there in zip(trained, joined.have_gradients, strict=True) if is_there]
        self._group.add_up(summed, own.guess / joined.tally.guess if joined.tally.guess else 1.0)
        self.outputs.hear([each.outputs for each in heard])

    def _open_terms(self) -> Terms:
        """Refuse to weigh terms one by one.

        Raises:
            ArgumentError: always.
        """
        cure = "Its terms count different items, which one process weighs one by one. Train on one process."
        raise ArgumentError("ranks", "together", "a loss of one term", cure)
