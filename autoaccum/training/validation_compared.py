"""The loss of a pass by itself: where it is in doubt what it is a mean over, a few samples are cut once more.

What a loss is a mean over is read off it, or said by the user. A run measures in its windows whether that is so; of
data that are evaluated nothing else is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.events import Notice
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.memory.waiting import Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Loss, Losses, read
from autoaccum.verification.notices import percent
from autoaccum.window.attributes import Attributes

_ENOUGH = 14
"""Samples that are compared, in micro-batches that double: more would take time where the data are few."""
_ROUNDING = {False: 3e-3, True: 0.1}
"""Shares of a loss that are taken for rounding, by whether it has 16 bits, or what it is computed by."""

_DIVIDED_LATER = (
    'Return the sum alone, divided by nothing, with reduction="sum" and num_items=(micro-batch) -> its share of what '
    "the sum of the whole window is divided by"
)


class ComparingValidator(Validator):
    """Runner of one pass, of whose loss it is measured whether it depends on cuts where that is in doubt."""

    def __init__(self, *arguments: Any, is_doubtful: bool, **options: Any) -> None:
        """Set up.

        Args:
            arguments: those of ``Validator``.
            is_doubtful: whether that is in doubt whatever graphs show, for the user says what counts.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._is_doubtful = is_doubtful
        self._has_16_bits = False

    def _run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        self._kept: dict[int, tuple[Window, Piece]] = {}  # by their places among all micro-batches
        self._num_run = 0
        return super()._run(step, epoch, training_micro_batch)

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        loss = super()._try(window, piece)
        if isinstance(loss, Shortage):
            return loss
        if piece.size >= 2 * self._trials.smallest and self._num_kept() < _ENOUGH:
            # Till all is read it is not known what graphs tell of it.
            self._kept[self._num_run] = window, piece
        self._num_run += 1
        return loss

    def _compute(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super()._compute(model, batch)
        self._has_16_bits = self._has_16_bits or loss.element_size() < 4
        return loss

    def _passed(self, losses: Losses) -> None:
        """Say by how much the loss depends on cuts."""
        if not self._kept or not (self._is_doubtful or losses.have_ones() or losses.are_in_doubt()):
            return
        # Counters of the user's own, such as a model's number of calls, are no buffers.
        attributes = Attributes(self._modules)
        try:
            found = attempt(lambda: self._share_off(losses))
        except Exception:
            found = 0.0  # of some parts there is no loss, or data are read but once
        finally:
            attributes.restore()
        if not isinstance(found, RanOut) and found > _ROUNDING[self._is_rounded()]:
            self._emit(_cut_notice(self._num_kept(), found))

    def _num_kept(self) -> int:
        return sum(piece.size for _, piece in self._kept.values())

    def _share_off(self, losses: Losses) -> float:
        """Return how far the loss of what is kept is off where it is cut, as a share of it; 0 where nothing tells."""
        with self._evaluating():
            turned = {place: self._losses_of(*kept, is_cut=False) for place, kept in self._kept.items()}
            cut = {place: self._losses_of(*kept, is_cut=True) for place, kept in self._kept.items()}
        read([*turned.values(), *cut.values()])
        loss, other, apart = (losses.joined(instead)[0] for instead in ({}, turned, cut))
        # What draws, or keeps state, is another one each time; and of one that is nearly 0 all digits are rounding,
        # which the opposite order of samples shows. Then nothing can be compared.
        if loss == apart or not abs(loss - other) <= 1e-3 * abs(loss - apart) or not math.isfinite(apart):
            return 0.0
        # All else is the same, so that a few of many samples change little of it.
        share = self._num_kept() / losses.num_samples
        return abs(loss - apart) / share / abs(loss) if loss else math.inf

    def _losses_of(self, window: Window, piece: Piece, *, is_cut: bool) -> Losses:
        """Compute samples once more: all together, in the opposite order, or cut in two."""
        positions = list(range(piece.start, piece.start + piece.size))
        # Parts differ in size where they can: of equal ones a sum looks like a mean.
        first = max(self._trials.smallest, piece.size // 3)
        parts = [positions[:first], positions[first:]] if is_cut else [positions[::-1]]
        found = Losses()
        for part in parts:
            # Not as a micro-batch of the window, whose samples lie in one order, and are the loss's to edit.
            batch = batches.to_device(window.samples(part), self._device, copy=True)
            found.add(len(part), self._loss(batch, len(part)))
            self._outputs_of(len(part))
            if self._metrics is not None:
                self._metrics.forget()
        return found

    def _is_rounded(self) -> bool:
        """Return whether anything is computed in 16 bits, as far as that is seen."""
        with self._autocast():
            casts = torch.is_autocast_enabled(self._device.type)
        tensors: Sequence[torch.Tensor] = [p for module in self._modules for p in module.parameters(recurse=False)]
        return casts or self._has_16_bits or any(t.is_floating_point() and t.element_size() < 4 for t in tensors)


def _cut_notice(num_samples: int, share: float) -> Notice:
    return Notice(
        cause=f"The loss of {num_samples} of the samples that are evaluated is {percent(share)} off where they are cut "
        "otherwise",
        consequence="The loss that evaluate returns depends on the micro-batches that fit",
        cure="Pass num_items=(micro-batch) -> how many items it is a mean over, and reduction='sum' too where it is "
        f"their sum. Of what is divided by a count that is kept from 0: {_DIVIDED_LATER}",
    )
