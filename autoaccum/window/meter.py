"""What windows take of the memory: read around them, made room for, and kept below a limit that nobody else keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.planning.history import Lengths
from autoaccum.planning.tuner import Tuner


class Gauge:
    """Reads the memory and the clock around windows, micro-batches and trials, and tells the tuner what matters."""

    def __init__(self, memory: Memory, device: torch.device, tuner: Tuner, *, watch: bool) -> None:
        """``watch``: whether the limit is kept by nobody but us, so that passing it raises no error."""
        self._memory = memory
        self._device = device
        self._tuner = tuner
        self._watch = watch
        self._window_bytes = 0  # peak of the last window that was measured
        self._before_trials = 0
        self._between_bytes = 0
        self._measures = False
        self._next_reading = 0.0
        self._tight = watch
        self._released_bytes = memory.used()
        self._passed_limit = False

    @property
    def peak_bytes(self) -> int:
        """Most in use at once since it was last read: by the last window that was measured, or just before it."""
        return max(self._window_bytes, self._between_bytes)

    def begin_window(self) -> None:
        """A window begins; it is measured unless the last reading was just now."""
        self._measures = self._tuner.searching or clock.now() >= self._next_reading
        self._between_bytes = 0
        if self._measures:  # what came between, an optimizer's step or a validation, no plan of ours can make smaller
            self._between_bytes = self._memory.peak()
            self._memory.reset_peak()
            self._before_trials = 0

    def end_window(self, sizes: tuple[int, ...], lengths: Lengths) -> tuple[int, ...] | None:
        """A window committed; returns a plan for those that follow if it passed the limit, as the one before it did."""
        if not self._measures:
            return None
        self._window_bytes = max(self._before_trials, self._memory.peak())
        self._next_reading = clock.now() + self._memory.reading_seconds
        self._tight = self._watch and (self._tuner.searching or self._window_bytes > self._tuner.target_bytes / 2)
        return self._keep_limit(sizes, lengths) if self._watch and not self._tuner.searching else None

    def _keep_limit(self, sizes: tuple[int, ...], lengths: Lengths) -> tuple[int, ...] | None:
        passed, self._passed_limit = self._passed_limit, self._window_bytes > self._tuner.target_bytes
        if not self._passed_limit:
            return None
        self.release()
        loads = self._tuner.loads(sizes, lengths)
        index = loads.index(max(loads))
        # A load beyond the tuner's largest is there because no micro-batch may have fewer samples than the smallest.
        if not passed or sizes[index] <= self._tuner.smallest or loads[index] > self._tuner.largest:
            return None
        self._tuner.passed_limit(sizes[index], self._window_bytes, length_at(lengths, sum(sizes[:index])))
        self._passed_limit = False
        return self._tuner.plan(sum(sizes), lengths)

    def make_room(self, micro_batch: int, length: int) -> None:
        """Before a micro-batch, where nobody but us keeps the limit: give back what the allocator still holds.

        A trial starts from released memory, so its peak is kept only by starting from there too; between micro-batches
        a C library's heap keeps, and scatters, tens of MiB. But giving back and getting again costs time: only when
        the peak would pass the target.
        """
        if not self._tight:
            return
        model = self._tuner.memory_model
        predicted = self._window_bytes if model is None else model.predict(micro_batch, length)
        if self._memory.used() - self._released_bytes + predicted > self._tuner.target_bytes:
            self.release()

    def release(self) -> None:
        """Give back what only the allocator still holds."""
        self._memory.release()
        self._released_bytes = self._memory.used()

    def begin_trial(self) -> float:
        """From released memory; returns the time."""
        self._before_trials = max(self._before_trials, self._memory.peak())
        self.release()
        self._memory.reset_peak()
        return self.now()

    def end_trial(self, micro_batch: int, length: int, started: float) -> None:
        """It ran well.

        Raises:
            NothingFitsError: it was the smallest, and passed the limit.
        """
        seconds = self.now() - started
        self._tuner.observe(micro_batch, self._memory.peak(), seconds, length)

    def now(self) -> float:
        """Seconds, everything that was launched on the device being done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return clock.now()


def length_at(lengths: Sequence[int] | None, position: int) -> int:
    """Of the sample there, to which those after it are padded; 1 where samples are alike."""
    return 1 if lengths is None else lengths[position]
