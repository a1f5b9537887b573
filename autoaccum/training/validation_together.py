"""The loss on held-out data of a model that FSDP2 shards: all ranks run the same forwards, each of which asks all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from autoaccum.data import randomness
from autoaccum.data.base import Window
from autoaccum.events import Validated
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.memory.waiting import Patience, Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.planning.halving import Halving
from autoaccum.ranks.group import Group
from autoaccum.ranks.sharded import Elsewhere, Sharded
from autoaccum.training.metrics import Metrics
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Loss

METRICS, REHEARSAL, FORWARD = "a try of metrics", "a rehearsal of validation", "a forward of validation"
"""Kinds of what ranks run together, by which what is left of one that failed is known."""


class ValidatorOfAll(Validator):
    """Runner of validations of which every rank runs all: the same samples, in the same micro-batches."""

    def __init__(
        self, *arguments: Any, group: Group, sharded: Sharded, smallest: Callable[[], int], **options: Any
    ) -> None:
        """Set up for the ranks of a group.

        Args:
            arguments: those of ``Validator``.
            group: the ranks.
            sharded: the model, as they run it.
            smallest: returns the fewest samples that training has found its model to need.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._group, self._sharded, self._smallest = group, sharded, smallest
        self._trials = Halving(self._limits)
        self._is_rehearsed = False
        self._heard: list[bool] = []  # of the last forward, whether it is to be made smaller on any rank

    def run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        """Run one pass, in micro-batches that fit training on all ranks, and return the first rank's loss."""
        # Each rank has found sizes of its own in training, with a backward: the smallest of them fits all without one.
        told = self._group.exchange((training_micro_batch, self._smallest()))
        self.set_fewest(max(self._fewest, *(smallest for _, smallest in told)))
        # A loss that draws would be another on each rank.
        states = randomness.get_state(self._device)
        randomness.set_state(self._group.from_first(lambda: states), self._device)
        try:
            return self._run(step, epoch, min(largest for largest, _ in told))
        finally:
            randomness.set_state(states, self._device)

    def _agreed(self, found: Validated) -> Validated:
        """Return what the first rank tells of a pass: callbacks decide by it, alike on all ranks."""
        return self._group.exchange(found)[0]

    def try_metrics(self, metrics: Metrics) -> None:
        """Call each function on one sample and on two; see ``Validator``. Memory that runs out in it ends all ranks."""
        # Nothing is known yet of what these forwards launch, so that nobody could make up for one that has failed.
        self._sharded.run(lambda: self._try_metrics(metrics), lambda: True, lambda _: False, kind=METRICS)
        self._sharded.reset()
        gc.collect()  # training rehearses next, which cannot be made up for either

    def _rehearse(self, window: Window) -> None:
        """Run a forward twice, so that it is known what to make up for in those that come after it."""
        # The first may find out that a loss cannot be read in one way, and run another forward.
        size = min(window.num_samples, self._fewest)
        # Here nobody can be made up for, so that what is held without need goes first.
        gc.collect()
        self._release()
        for kind in (REHEARSAL, FORWARD):
            self._forward(lambda: self._outcome(lambda: window.micro_batch(0, size), size), lambda: True, kind)
        self._is_rehearsed = True

    def _forward(self, compute: Callable[[], Any], told: Callable[[], Any], kind: str = FORWARD) -> Any:
        found: list[Any] = []

        def run() -> None:
            found[:] = [compute()]
            # Without a backward some parts would stay gathered, and the next forward launch less than this one.
            self._sharded.reset()

        self._heard = self._sharded.run(run, told, kind=kind)
        return found[0]

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        self._group.exchange(True)  # in which is heard of a rank that has failed since the last forward
        if not self._is_rehearsed:
            self._rehearse(window)
        if self._is_cluttered():
            self._release()
        # Where nobody else keeps the limit a size that passes it is given up, on all ranks.
        if not self._is_enforced:
            self._memory.reset_peak()
        peak_bytes = 0

        def is_too_large() -> bool:
            nonlocal peak_bytes
            peak_bytes = 0 if self._is_enforced else self._memory.peak()
            return not self._limits.allows(peak_bytes, is_few=piece.size <= self._fewest)

        def compute() -> Any:
            return self._outcome(lambda: window.micro_batch(piece.start, piece.size), piece.size)

        try:
            outcome = attempt(lambda: self._forward(compute, is_too_large))
        # Of a size that failed elsewhere this rank has a loss as well, which is thrown away: samples count once.
        except Elsewhere as error:
            self._computed = None
            return Shortage(micro_batch=piece.size, peak_bytes=0, error=error)
        if isinstance(outcome, RanOut):
            return self._ran_out(piece, outcome)
        # Said by whoever passed its limit, and heard by all with the end of the forward: they go on alike.
        if any(self._heard):
            self._memory.release()
            if piece.size <= self._fewest:
                is_own = self._heard[self._group.rank]
                why = self._nothing_fits(piece.size, peak_bytes) if is_own else Elsewhere()
                return Shortage(micro_batch=piece.size, peak_bytes=peak_bytes, error=why, ran=True)
        loss: Loss
        loss, sums, outputs = outcome
        # Not sooner: what ran out of memory on any rank is run again, and would count twice.
        self._beside.absorb(outputs)
        if self._metrics is not None:
            self._metrics.keep(sums)
        self._trials.fitted(piece, None)
        if any(self._heard):  # it ran all the same, so its loss counts
            self._trials.ran_out(piece)
        return loss

    def _make_do(self, shortage: Shortage, piece: Piece, patience: Patience) -> None:
        if not isinstance(shortage.error, Elsewhere):
            super()._make_do(shortage, piece, patience)
        elif piece.size > self._fewest:
            self._trials.ran_out(piece)
