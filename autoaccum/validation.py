"""The loss on held-out data: a micro-batch of its own, and no trace on training."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autoaccum import randomness
from autoaccum.data import Source, Window
from autoaccum.errors import NothingFitsError
from autoaccum.events import Event, OutOfMemory, Validated
from autoaccum.losses import LossOf
from autoaccum.memory import Memory
from autoaccum.oom import is_out_of_memory
from autoaccum.weighting import CountItems, count_items


class Validator:
    """Runs passes over validation data."""

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        *,
        loss_of: LossOf,
        num_items: CountItems | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        memory: Memory,
        limit_bytes: int,
        emit: Callable[[Event], None],
    ) -> None:
        self._model = model
        self._source = source
        self._loss_of = loss_of
        self._num_items = num_items
        self._autocast = autocast
        self._device = device
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._emit = emit
        self._micro_batch: int | None = None

    def run(self, step: int, epoch: int, training_micro_batch: int) -> None:
        """One pass. It begins with training's micro-batch, which fits without a backward; later with its own."""
        started = time.perf_counter()
        size = self._micro_batch or training_micro_batch
        training = {module: module.training for module in self._model.modules()}
        states = randomness.get_state(self._device)
        self._model.eval()
        loss_sum = items = 0.0
        num_samples = 0
        try:
            reader = self._source.read(0, lambda position: (size,))
            while (window := reader.window(size)) is not None:
                position = 0
                while position < window.num_samples:
                    outcome = self._loss(window, position, min(size, window.num_samples - position))
                    if outcome is None:
                        size = self._shrink(min(size, window.num_samples - position), step)
                        continue
                    count, loss, num_items = outcome
                    if count == 0:
                        break
                    loss_sum += loss * num_items
                    items += num_items
                    position += count
                num_samples += position
        finally:
            for module, mode in training.items():
                module.training = mode
            randomness.set_state(states, self._device)
        self._micro_batch = size
        self._emit(
            Validated(
                step=step,
                epoch=epoch,
                loss=loss_sum / items if items else float("nan"),
                num_samples=num_samples,
                micro_batch=size,
                seconds=time.perf_counter() - started,
            )
        )

    def _loss(self, window: Window, position: int, size: int) -> tuple[int, float, float] | None:
        """(samples, mean loss, items) of a micro-batch; None when it ran out of memory."""
        try:
            count, batch = window.micro_batch(position, size)
            num_items = count_items(self._num_items, batch, count) if count else 0.0
            if num_items == 0:
                return count, 0.0, 0.0
            with torch.no_grad(), self._autocast():
                return count, self._loss_of(self._model, batch).item(), num_items
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _shrink(self, failed: int, step: int) -> int:
        gc.collect()
        self._memory.release()
        self._emit(OutOfMemory(step=step, phase="validation", micro_batch=failed))
        if failed == 1:
            raise NothingFitsError(phase="validation", micro_batch=1, peak_bytes=None, limit_bytes=self._limit_bytes)
        return failed // 2
