"""The loss of a pass by itself: the first few samples tell whether losses of micro-batches add up to that of all.

A run measures it in its windows. Of data that are evaluated nothing is known but what graphs show, so that the first
samples are computed all together too. Where that is another loss, the pass begins again, joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autoaccum.data.base import Window, in_order
from autoaccum.events import Notice
from autoaccum.memory.oom import RanOut, attempt, insist
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Losses, read
from autoaccum.verification.notices import percent
from autoaccum.window.attributes import Attributes
from autoaccum.window.split_calls import Layout

_FIRST = 15
"""Times the fewest samples there may be, that are compared: micro-batches that double have 1, 2, 4 and 8 of these."""
_ROUNDING = {False: 1e-3, True: 0.04}
"""Shares of a loss that are taken for rounding, by whether it has 16 bits, or what it is computed by."""

_DIVIDED_LATER = (
    'Return the sum alone, divided by nothing, with reduction="sum" and num_items=(micro-batch) -> its share of what '
    "the sum of the whole window is divided by"
)


class _Joined(Exception):
    """The pass is to begin again."""


class ComparingValidator(Validator):
    """Runner of one pass, whose micro-batches are weighted where that is measured to be right, and else joined."""

    def __init__(self, *arguments: Any, is_stated: bool, is_given: bool, most: int, **options: Any) -> None:
        """Set up.

        Args:
            arguments: those of ``Validator``.
            is_stated: whether the user says both what is counted and what the loss is: then nothing is measured.
            is_given: whether the user says one of these, so that micro-batches are not joined instead.
            most: samples of a joined window.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._is_decided, self._is_given, self._most, self._has_16_bits = is_stated, is_given, most, False

    def _run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        try:
            return super()._run(step, epoch, training_micro_batch)
        except _Joined:
            return super()._run(step, epoch, training_micro_batch)

    def _next_size(self, seen: int, ceiling: int) -> int:
        size = super()._next_size(seen, ceiling)
        if self._is_decided:
            return size
        return max(min(_FIRST * self._trials.smallest, self._most), self._trials.first or 0)

    def _compute(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super()._compute(model, batch)
        self._has_16_bits = self._has_16_bits or loss.element_size() < 4
        return loss

    def _ran(self, window: Window, losses: Losses) -> None:
        """Decide, once the first window has run, whether losses of micro-batches may be weighted."""
        if self._is_decided:
            return
        self._is_decided = True
        insist(lambda: read([losses]), "the losses of a validation were read")
        if all(len(values) == 1 for values in losses.by_name().values()):  # of one micro-batch
            return
        is_doubtful = not self._is_given and losses.are_doubtful()
        off = self._share_off(window, losses)
        if not is_doubtful and off <= _ROUNDING[self._is_rounded()]:
            return
        if not self._is_given and self._source.num_samples is not None and self._can_be_joined(window):
            raise _Joined
        if off > _ROUNDING[self._is_rounded()]:
            self._emit(_cut_notice(window.num_samples, off))

    def _share_off(self, window: Window, losses: Losses) -> float:
        """Return how far the loss of a window is off where it is cut, as a share of it; 0 where nothing tells."""

        def found() -> float:
            whole, again = self._loss_at_once(window), self._loss_at_once(window)
            cut = losses.joined()[0]
            if math.isnan(cut) and not math.isnan(whole):
                return math.inf
            # What draws, or keeps state, is another one each time: then nothing can be compared.
            if whole == cut or not abs(whole - again) <= 1e-3 * abs(whole - cut) or math.isnan(whole):
                return 0.0
            # Of a loss that is nearly 0, beside those of its micro-batches, all digits are rounding.
            parts = [abs(value) for values in losses.by_name().values() for _, value, _ in values]
            return abs(whole - cut) / max(abs(whole), *parts)

        return float(self._measured(found, nothing=0.0))

    def _can_be_joined(self, window: Window) -> bool:
        """Return whether the loss of a window is the same where its micro-batches are joined; join them from now on."""
        layout = Layout(self._modules)

        def found() -> bool:
            whole = self._loss_at_once(window)
            self._is_joined = self._joined.follow(layout)
            losses = Losses()
            losses.add(window.num_samples, self._joined_outcome(window, max(self._fewest, window.num_samples // 3))[0])
            read([losses])
            joined = losses.joined()[0]
            return math.isclose(whole, joined, rel_tol=_ROUNDING[self._is_rounded()]) or math.isnan(whole)

        can_be = bool(self._measured(found, nothing=False))
        self._is_joined = False
        if can_be:
            self.join(lambda: layout, self._most)
        return can_be

    def _measured(self, found: Callable[[], Any], *, nothing: Any) -> Any:
        """Return what a function returns, of which nothing else remains; ``nothing`` where that cannot be computed."""
        # Counters of the user's own, such as a model's number of calls, are no buffers.
        attributes = Attributes(self._modules)
        try:
            measured = attempt(found)
        except Exception:
            return nothing  # of some parts there is no loss, or data are read but once
        finally:
            attributes.restore()
            if self._metrics is not None:
                self._metrics.forget()
        return nothing if isinstance(measured, RanOut) else measured

    def _loss_at_once(self, window: Window) -> float:
        """Return the loss of all samples of a window at once."""
        losses, count = Losses(), window.num_samples
        losses.add(count, self._loss(in_order(window), count))
        self._outputs_of(count)
        read([losses])
        return losses.joined()[0]

    def _is_rounded(self) -> bool:
        """Return whether anything is computed in 16 bits, as far as that is seen."""
        with self._autocast():
            casts = torch.is_autocast_enabled(self._device.type)
        tensors = [parameter for module in self._modules for parameter in module.parameters(recurse=False)]
        return casts or self._has_16_bits or any(t.is_floating_point() and t.element_size() < 4 for t in tensors)


def _cut_notice(num_samples: int, share: float) -> Notice:
    off = f"{percent(share)} off" if math.isfinite(share) else "no number"
    return Notice(
        cause=f"The loss of the first {num_samples} samples is {off} where they are cut otherwise",
        consequence="The loss that is evaluated depends on the micro-batches that fit",
        cure="Pass num_items=(micro-batch) -> how many items it is a mean over, and reduction='sum' too where it is "
        f"their sum. Of what is divided by a count that is kept from 0: {_DIVIDED_LATER}",
    )
