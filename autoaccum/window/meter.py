"""Reads memory, clock and compiler around windows and their micro-batches, and returns readings. It decides nothing."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.planning.attempts import NOT_MEASURED, Piece, Reading

_SAME = 1.001
"""Bytes in use beside those of before, up to which nothing was left that a replay would miss: a number or two."""


class Heard(NamedTuple):
    """What the compiler has done in this process."""

    compilations: int = 0
    """Functions, or parts of them between graph breaks, that were compiled. Their backwards are no others."""
    seconds: float = 0.0
    """How long that took, with backwards that were compiled later."""
    recordings: int = 0
    """CUDA graphs that were recorded."""

    def since(self, before: Heard) -> Heard:
        """Return what has been done since ``before``."""
        return Heard(
            self.compilations - before.compilations, self.seconds - before.seconds, self.recordings - before.recordings
        )

    def and_(self, more: Heard) -> Heard:
        """Return this and more of it."""
        return Heard(
            self.compilations + more.compilations, self.seconds + more.seconds, self.recordings + more.recordings
        )


class _Listener:
    """What the compiler calls as it begins and as it is done; one for the process, so that no run leaves its own."""

    def __init__(self) -> None:
        self.heard = Heard()
        self._started = 0.0

    def is_listening(self) -> bool:
        """Listen from now on, where there is anything to be heard; return whether there is."""
        # Whatever compiles has loaded this, which takes a second: nothing is compiled where nobody has.
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if handler is None:
            return False
        if self.end not in handler.end_callbacks:  # torch.compiler.reset() has dropped it, or it is the first time
            handler.register_start_callback(self.begin)
            handler.register_end_callback(self.end)
        return True

    def begin(self, _: object) -> None:
        self._started = clock.now()

    def end(self, arguments: Any) -> None:
        done, seconds, recordings = self.heard
        trigger = arguments.callback_trigger.name
        seconds += clock.now() - self._started
        self.heard = Heard(done + (trigger == "DYNAMO"), seconds, recordings + (trigger == "CUDAGRAPH_RECORDING"))


LISTENER = _Listener()


def heard() -> Heard:
    """Return what the compiler has done in this process since anyone first asked for it here."""
    LISTENER.is_listening()
    return LISTENER.heard


class Meter:
    """The instruments of one run."""

    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        *,
        is_enforced: bool,
        needs_room: Callable[[int, Piece, int], bool],
    ) -> None:
        """Set up.

        Args:
            memory: what is read.
            device: whose work a reading of the clock waits for.
            is_enforced: whether the device refuses what passes the limit. Where nobody keeps it but us, what only the
                allocator holds is given back before it would make a micro-batch pass the limit.
            needs_room: (bytes that only the allocator holds, the piece to come, the peak of the last window) -> whether
                they stand in its way: see ``Tuner.needs_room``.
        """
        self._memory = memory
        self._device = device
        self._is_enforced = is_enforced
        self._needs_room = needs_room
        self.floor_bytes = 0
        """The most that tensors held in an optimizer's step: no plan makes it smaller. 0 where nobody tells."""
        self.before_trial: Callable[[int, int], None] | None = None
        """Called with the samples of each trial, and their length, before it is run."""
        self._heard = Heard()  # of the compiler, up to now
        self._window_bytes = 0  # peak of the last window that was measured
        self._before_trials = 0  # peak of this window, up to its last trial, which starts a new one
        self._between_bytes = 0  # peak of what came before this window
        self._is_measuring = False  # whether this window's peak is read
        self._next_reading = 0.0  # the time from which on the peak is read again
        # Whether what the allocator holds may matter: only where nobody else keeps the limit, and not once windows have
        # shown that they need no more than half of the target.
        self._is_tight = not is_enforced
        # In use after memory was last given back: what is used beyond that between micro-batches, the allocator holds.
        self._released_bytes = 0 if is_enforced else memory.used()
        self._least_bytes = 0.0  # the least that tensors held after a rollback, since cycles were last looked for

    @property
    def peak_bytes(self) -> int:
        """Return the most in use at once by the last window that was measured, or just before it."""
        return max(self._window_bytes, self._between_bytes)

    def now(self) -> float:
        """Return the seconds of the clock, once everything that was launched on the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return clock.now()

    def begin_window(self, *, is_searching: bool) -> None:
        """Begin a window; its peak is measured in a search, and else unless the last reading was just now."""
        self._heard = heard()  # what came between, as in a validation, is none of it
        self._is_measuring = is_searching or clock.now() >= self._next_reading
        self._between_bytes = 0
        if self._is_measuring:  # what came between, an optimizer's step or a validation, no plan can make smaller
            self._between_bytes = self._memory.peak()
            self._memory.reset_peak()
            self._before_trials = 0

    def end_window(self, *, is_searching: bool, target_bytes: int) -> int | None:
        """End a window that has committed; return its peak in bytes, or None if it was not measured."""
        if not self._is_measuring:
            return None
        self._window_bytes = max(self._before_trials, self._memory.peak())
        self._next_reading = clock.now() + self._memory.reading_seconds
        self._is_tight = not self._is_enforced and (is_searching or self._window_bytes > target_bytes / 2)
        return self._window_bytes

    def measuring(self, piece: Piece) -> Reading:
        """Return the context to run a piece in, which is also its reading afterwards."""
        if piece.is_trial:
            if self.before_trial is not None:
                self.before_trial(piece.size, piece.length)
            return _OfTrial(self, self._memory, piece)
        if self._is_tight:
            self._make_room(piece)
        return NOT_MEASURED

    def compiled(self) -> Heard | None:
        """Return what was compiled since the last piece of this window, or since its begin; None where nothing was."""
        before, self._heard = self._heard, heard()
        return None if self._heard is before else self._heard.since(before)

    def peak(self) -> int:
        """Return the most in use at once since the peak was last reset, in bytes."""
        return self._memory.peak()

    def collect(self) -> None:
        """Free what an attempt that was rolled back has left in reference cycles, which may hold tensors."""
        # To look for them takes as long as a window of a small model: only where more is there than after the last
        # look, or ever since. A process's resident bytes do not tell: its heap keeps what tensors have given back.
        used_bytes = self._memory.usage().allocated_bytes if self._memory.enforced else math.inf
        if used_bytes > _SAME * self._least_bytes:
            gc.collect()
            used_bytes = self._memory.usage().allocated_bytes
            self._least_bytes = used_bytes
        self._least_bytes = min(self._least_bytes, used_bytes)

    def release(self) -> None:
        """Give back what only the allocator still holds."""
        self._memory.release()
        if not self._is_enforced:
            self._released_bytes = self._memory.used()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take the peak of an optimizer's step within this, after a window that was measured."""
        if not (self._is_measuring and self._memory.can_enforce):  # elsewhere tensors are not told from the rest
            yield
            return
        self._memory.reset_peak()  # what came before has been read at the window's end
        yield
        self.floor_bytes = max(self.floor_bytes, self._memory.usage().allocated_peak_bytes)

    def _make_room(self, piece: Piece) -> None:
        """Give memory back before a piece whose peak it would push past the target.

        A trial starts from released memory, so its peak is kept only by starting from there too; between micro-batches
        a C library's heap keeps, and scatters, tens of MiB. But giving back and getting again costs time.
        """
        held_bytes = self._memory.used() - self._released_bytes
        if self._needs_room(held_bytes, piece, self._window_bytes):
            self.release()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out of the window's peak what is run within this."""
        self._before_trials = max(self._before_trials, self._memory.peak())
        try:
            yield
        finally:
            # Most windows that are looked at run nothing aside. Where the device keeps the limit, its cache is in
            # nobody's way, and to empty it makes the device wait.
            if not self._is_enforced:
                self.release()
            self._memory.reset_peak()

    def begin_trial(self) -> tuple[float, int, int | None]:
        """Start a trial from released memory.

        Returns:
            the time, how often the allocator has found no memory so far, and what tensors hold; None where nobody
            tells them from the rest.
        """
        # The peak is begun anew for it, so that the window's up to here has to be kept.
        usage = self._memory.usage()
        self._before_trials = max(self._before_trials, usage.peak_bytes)
        self.release()
        self._memory.reset_peak()
        return self.now(), usage.ooms, usage.allocated_bytes if self._memory.can_enforce else None


class _OfTrial(Reading):
    """The reading of a trial: complete once its context has ended well."""

    __slots__ = ("_memory", "_meter", "_ooms", "_started")

    def __init__(self, meter: Meter, memory: Memory, piece: Piece) -> None:
        super().__init__(piece)
        self._meter = meter
        self._memory = memory
        self._started = 0.0
        self._ooms = 0

    def __enter__(self) -> Reading:
        self._started, self._ooms, self.start_bytes = self._meter.begin_trial()
        return self

    def __exit__(self, *raised: object) -> None:
        # Of a trial that failed no more is to be learnt, and to wait for the device may raise once more.
        if raised[0] is None:
            self.seconds = self._meter.now() - self._started
            usage = self._memory.usage()
            self.take(usage.peak_bytes, usage.allocated_peak_bytes, fell_short=usage.ooms > self._ooms)
