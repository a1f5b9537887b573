"""Reads memory, clock and compiler around windows and micro-batches. It decides nothing."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.errors import ArgumentError
from autoaccum.events import Compiled, Event, Notice
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.planning.attempts import Piece, Reading
from autoaccum.step import notices
from autoaccum.step.job import Autocast
from autoaccum.step.python_state import surroundings_of
from autoaccum.step.terms import LossOf

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
        self.is_tight = not is_enforced
        """Whether room is to be made before a piece: nobody else keeps the limit, and windows need half of it."""
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
        LISTENER.is_listening()
        self._heard = LISTENER.heard  # what came between, as in a validation, is none of it
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
        self.is_tight = not self._is_enforced and (is_searching or self._window_bytes > target_bytes / 2)
        return self._window_bytes

    def measuring(self, trial: Piece) -> _OfTrial:
        """Return the context to run a trial in, which is also its reading afterwards."""
        if self.before_trial is not None:
            self.before_trial(trial.size, trial.length)
        return _OfTrial(self, self._memory, trial)

    def compiled(self) -> Heard | None:
        """Return what was compiled since the last piece of this window, or since its begin; None where nothing was."""
        if LISTENER.heard is self._heard:
            return None
        before, self._heard = self._heard, LISTENER.heard
        return self._heard.since(before)

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

    @property
    def takes_steps(self) -> bool:
        """Return whether the peak of an optimizer's step is read: after a window that was measured."""
        return self._is_measuring and self._memory.can_enforce  # elsewhere tensors are not told from the rest

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take the peak of an optimizer's step within this."""
        self._memory.reset_peak()  # what came before has been read at the window's end
        yield
        self.floor_bytes = max(self.floor_bytes, self._memory.usage().allocated_peak_bytes)

    def make_room(self, piece: Piece) -> None:
        """Release cached memory if a piece, which is not a trial, would exceed the target beside it.

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

    def __enter__(self) -> _OfTrial:
        self._started, self._ooms, self.start_bytes = self._meter.begin_trial()
        return self

    def __exit__(self, *raised: object) -> None:
        # Of a trial that failed no more is to be learnt, and to wait for the device may raise once more.
        if raised[0] is None:
            self.seconds = self._meter.now() - self._started
            usage = self._memory.usage()
            self.take(usage.peak_bytes, usage.allocated_peak_bytes, fell_short=usage.ooms > self._ooms)


RECURRING = 4
"""Say what may be done about it once so many micro-batches of a run have had something compiled, and then one more.

A first size, a second one for which sizes become symbols, and single samples, which never do, are three.
"""
CURE = "Compile it with mode='default' or 'max-autotune-no-cudagraphs': graphs keep nothing between calls."
"""What to do instead of CUDA graphs."""


class Compilations:
    """Watches what is compiled in the micro-batches of one run."""

    def __init__(self, device: torch.device, expect: Callable[[], None], *, are_known: bool = False) -> None:
        """Set up for a device.

        Args:
            device: where micro-batches run.
            expect: called when something was compiled, for each size may cost as much.
            are_known: whether something of the run was found to be compiled.
        """
        self._device = device
        self._expect = expect
        self.size = 0
        """The samples of the micro-batch that runs at this moment; 0 while none does."""
        self.of_window: dict[int, Heard] = {}
        """What was compiled in this window, by the samples of the micro-batch: then its time tells nothing."""
        self._has_graphs = keeps_graphs(device)  # somebody else's, by now
        self._total = Heard()  # in all windows
        self._sizes: list[int] = []  # of all micro-batches in which a forward was compiled
        self._are_known = are_known
        self.allowed: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context of forwards, in which compiled code runs or, where it is forgone, what it was made of."""

    # Called where something was compiled, and not for each micro-batch: see ``Meter.compiled``.

    def note(self, piece: Piece, reading: Reading | None, new: Heard) -> None:
        """Note what was compiled while a piece ran, and that its reading then tells of that rather than of the piece.

        Raises:
            ArgumentError: CUDA graphs were captured, and the next micro-batch writes over their memory.
        """
        had_graphs, self._has_graphs = self._has_graphs, keeps_graphs(self._device)
        # Found out by what happens: nothing that holds them need be in reach of whoever looks for them beforehand.
        if new.recordings or (self._has_graphs and not had_graphs):
            raise graphs_refused("a function that records CUDA graphs")
        if reading is not None:
            reading.is_cold = True
        self.of_window[piece.size] = self.of_window.get(piece.size, Heard()).and_(new)
        if new.compilations:  # else a backward, whose forward was counted before
            self._sizes.append(piece.size)
            self._total = self._total.and_(new)
        self._expect()

    def tell(self, step: int, emit: Callable[[Event], None], say_once: Callable[[Notice], None]) -> None:
        """Tell what was compiled in a window, and what may be done where there is no end to it."""
        for size, new in self.of_window.items():
            emit(Compiled(step=step, micro_batch=size, compilations=new.compilations, seconds=new.seconds))
        if len(self._sizes) > RECURRING:
            limit = torch._dynamo.config.recompile_limit
            say_once(notices.compiles_on(len(self._sizes), sorted(set(self._sizes)), self._total.seconds, limit))
        self.of_window = {}

    def are_there(self) -> bool:
        """Return whether something of the run is known to be compiled."""
        return self._are_known or bool(self._sizes)

    @property
    def are_forgone(self) -> bool:
        """Return whether forwards run as they are written, whatever was compiled."""
        return self.allowed is not nullcontext

    def forgo(self) -> None:
        """Run forwards as they are written from now on."""
        # All of what was compiled: nobody knows which part of it holds the loss.
        self.allowed = partial(torch.compiler.set_stance, "force_eager")

    @contextmanager
    def allowed_within(self, other: Autocast) -> Iterator[None]:
        """Enter the context of forwards, and another one within it."""
        with self.allowed(), other():
            yield

    def sparing(self, loss_of: LossOf) -> LossOf:
        """Return a loss whose micro-batches say that their number of samples varies, so that it is compiled for any."""

        def spared(model: Any, batch: Any) -> Any:
            # A first size would be compiled as a constant, and the second one anew.
            mark(batch, self.size)
            return loss_of(model, batch)

        return spared


def mark(batch: Any, num_samples: int) -> None:
    """Mark the dimension of each tensor that is as long as there are samples, the first of several, as one that varies.

    Another one that happens to be as long is compiled for any length too, which costs a little speed and nothing else.
    """
    if num_samples < 2:  # the compiler takes 1 for a case of its own, whatever is said of it
        return
    for leaf in flatten(batch)[0]:
        # A nested one may have no shape to be asked for, and its compiler takes care of what varies.
        if isinstance(leaf, torch.Tensor) and not leaf.is_nested and num_samples in leaf.shape:
            # Weakly: where it cannot be kept open, as in a model that asks for 16 samples, that is no error.
            torch._dynamo.maybe_mark_dynamic(leaf, leaf.shape.index(num_samples))


def compiled_parts(model: object, modules: Iterable[nn.Module], functions: Iterable[object]) -> list[Any]:
    """Return what torch.compile has made, of the model, of any module within, or of functions and what they hold."""
    held = surroundings_of(functions)
    layers = [layer for module in (*modules, *held.modules) for layer in module.modules()]
    # A module that was compiled in place keeps beside it what was made of it.
    in_place = [getattr(layer, "_compiled_call_impl", None) for layer in (model, *layers)]
    found = [part for part in (model, *layers, *in_place, *held.compiled) if hasattr(part, "get_compiler_config")]
    return list({id(part): part for part in found}.values())


def keeps_graphs(device: torch.device) -> bool:
    """Return whether PyTorch keeps CUDA graphs of compiled code on a device, recorded or soon to be."""
    # It keeps them in a tree for each device, which begins with the first run of a function that is to be captured.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return trees.get_manager(index, create_if_none_exists=False) is not None


def captures(part: Any) -> bool:
    """Return whether something that was compiled is to be captured in CUDA graphs."""
    return bool((part.get_compiler_config() or {}).get("triton.cudagraphs"))


def graphs_refused(what: str) -> ArgumentError:
    """Return the error for what was compiled to CUDA graphs."""
    return ArgumentError("model", what, "a model without CUDA graphs", CURE)
