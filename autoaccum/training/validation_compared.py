"""The loss of a pass some of whose micro-batches are cut once more at its end: it must not depend on cuts.

What a loss is a mean over is read off it, or said by the user, and a count that is kept from 0 is not seen in that.
Windows are measured, and mended where they can be; here it is measured, and said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoaccum.data.base import Window
from autoaccum.events import Notice
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.memory.waiting import Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Loss, Losses, read
from autoaccum.verification.notices import percent

_ENOUGH = 14
"""Samples that are compared, in micro-batches that double: more would take time where the data are few."""
_MAY_BE_ROUNDING = {False: 3e-3, True: 0.1}
"""Shares of a loss that are taken for rounding, by whether it has 16 bits, or what it is computed by."""


class ComparingValidator(Validator):
    """Runner of passes, of the first of which it is measured whether its loss is the same however data are cut."""

    _is_due = True
    _has_16_bits = False

    def _run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        self._kept: dict[int, tuple[Window, Piece]] = {}  # by their places among all micro-batches
        self._num_run = 0
        try:
            return super()._run(step, epoch, training_micro_batch)
        finally:
            self._kept = {}

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        loss = super()._try(window, piece)
        if isinstance(loss, Shortage):
            return loss
        can_be_cut = piece.size >= 2 * self._trials.smallest
        if self._is_due and can_be_cut and self._num_kept() < _ENOUGH:
            # The samples are looked at when all is read, for till then it is not known what a micro-batch counts.
            self._kept[self._num_run] = window, piece
        self._num_run += 1
        return loss

    def _passed(self, losses: Losses) -> None:
        """Say by how much the loss depends on cuts."""
        self._is_due = False
        if not self._kept:
            return
        try:
            found = attempt(lambda: self._share_off(losses))
        except Exception:
            found = 0.0  # of some parts there is no loss, or no more what their window has shared
        if not isinstance(found, RanOut) and found > _MAY_BE_ROUNDING[self._is_rounded()]:
            self._emit(_cut_notice(self._num_kept(), found))

    def _num_kept(self) -> int:
        return sum(piece.size for _, piece in self._kept.values())

    def _share_off(self, losses: Losses) -> float:
        """Return how far the loss of what is kept is off where it is cut, as a share of all; 0 where nothing tells."""
        with self._evaluating():
            again = {place: self._losses_of(*kept, [kept[1].size]) for place, kept in self._kept.items()}
            apart = {place: self._losses_of(*kept, self._cut(kept[1].size)) for place, kept in self._kept.items()}
        read([*again.values(), *apart.values()])
        # As it was, as it is a second time, and as it is with other cuts.
        loss, second, cut = (losses.joined(instead)[0] for instead in ({}, again, apart))
        # What draws, or keeps state, is another one each time: then nothing can be compared.
        if loss == cut or not abs(loss - second) <= 1e-3 * abs(loss - cut) or not math.isfinite(cut):
            return 0.0
        # All else is the same, so that a few of many samples change little of it.
        share = self._num_kept() / losses.num_samples
        return abs(loss - cut) / share / abs(loss) if loss else math.inf

    def _cut(self, size: int) -> Sequence[int]:
        """Return the sizes of two parts, which differ where they can: of equal ones a sum looks like a mean."""
        first = max(self._trials.smallest, size // 3)
        return first, size - first

    def _losses_of(self, window: Window, piece: Piece, sizes: Sequence[int]) -> Losses:
        found, start = Losses(), piece.start
        for size in sizes:
            found.add(size, self._loss(window.micro_batch(start, size), size))
            start += size
            self._outputs_of(size)
            if self._metrics is not None:
                self._metrics.forget()
        return found

    def _compute(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super()._compute(model, batch)
        self._has_16_bits = self._has_16_bits or loss.element_size() < 4
        return loss

    def _is_rounded(self) -> bool:
        """Return whether anything is computed in 16 bits, as far as that is seen."""
        with self._autocast():
            casts = torch.is_autocast_enabled(self._device.type)
        tensors = [p for module in self._modules for p in module.parameters(recurse=False)]
        return casts or self._has_16_bits or any(t.is_floating_point() and t.element_size() < 4 for t in tensors)


def _cut_notice(num_samples: int, share: float) -> Notice:
    return Notice(
        cause=f"The loss of {num_samples} of the samples that are evaluated is {percent(share)} off where they are cut "
        "otherwise",
        consequence="The loss of validations, and of evaluate, depends on the micro-batches that fit",
        cure=(
            "Pass num_items=(micro-batch) -> how many items it is a mean over; of what is divided by a count that is "
            "kept from 0 return the sum, divided by nothing, with reduction='sum' beside that; where it sets samples "
            "against each other, compute it of what predict returns"
        ),
    )
