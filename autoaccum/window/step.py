"""What ``fit`` and ``Accumulator`` share: a window's gradient in whatever memory there is, then the optimizer's step.

Where windows come from, and what is done between them, is the caller's.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoaccum._units import format_bytes
from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, AutoaccumWarning, NothingFitsError
from autoaccum.events import Event, Notice, Planned, Replanned, StepSkipped
from autoaccum.loss.coupling import is_compiled, smallest_micro_batch
from autoaccum.loss.functions import LossOf
from autoaccum.loss.weighting import CountItems
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.planning.costs import prediction_error
from autoaccum.planning.cuts import cut
from autoaccum.planning.tuner import Tuner
from autoaccum.window.advice import Refused, advise
from autoaccum.window.optimizers import take_step
from autoaccum.window.precision import Precision, autocast
from autoaccum.window.transaction import Gradient, WindowRunner


class Engine:
    """Runs windows and steps the optimizer; what it is not allowed to decide it emits or announces."""

    def __init__(
        self,
        model: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        loss_of: LossOf,
        num_items: CountItems | None,
        micro_batch: int | None,
        max_micro_batch: int | None,
        full_window: int | None,
        memory: Memory,
        total_bytes: int,
        limit_now: Callable[[], int],
        limit_bytes: int,
        headroom: float,
        precision: Precision,
        clip_norm: float | None,
        device: torch.device,
        emit: Callable[[Event], None],
        noise_scale: bool = False,
    ) -> None:
        """Set up; everything is on the device, and the optimizer's state is allocated.

        Args:
            model: what ``loss_of`` is called with.
            modules: the model, and the loss if it is one too.
            optimizer: over their parameters.
            loss_of: (model, micro-batch) -> loss.
            num_items: (micro-batch) -> what its loss is a mean over.
            micro_batch: its samples; None to find them.
            max_micro_batch: the most samples to try at once.
            full_window: samples of the largest window of the run, where that is known.
            memory: of the device.
            total_bytes: what the device gives to this process.
            limit_now: () -> what of that may be used, as it is now.
            limit_bytes: the same, as it was.
            headroom: fraction of the limit that plans leave free.
            precision: of forwards.
            clip_norm: 2-norm to clip each window's gradient to.
            device: where to compute.
            emit: takes the events.
            noise_scale: whether windows that are cut tell of the noise in their gradient.

        Raises:
            ArgumentError: BatchNorm, and micro-batches of one sample.
        """
        smallest = smallest_micro_batch(modules)
        for name, value in (("micro_batch", micro_batch), ("max_micro_batch", max_micro_batch)):
            if value is not None and value < smallest <= (full_window or smallest):
                cure = "The model holds BatchNorm in training mode, which has no statistics of one sample."
                raise ArgumentError(name, value, f"an int of at least {smallest}", cure)
        ceilings = [samples for samples in (full_window, max_micro_batch) if samples is not None]
        self.tuner = Tuner(
            ceiling=min(ceilings, default=2**30),
            limit_bytes=limit_bytes,
            headroom=headroom,
            search=micro_batch is None,
            largest=min(micro_batch or 0, max_micro_batch or micro_batch or 0),
            smallest=smallest,
            coarse=smallest > 1 or is_compiled(model),  # statistics of a few samples are poor
            fewest=2 if noise_scale and micro_batch is None else 1,
        )
        self.optimizer = optimizer
        self.memory = memory
        self.limit_bytes = limit_bytes
        self.watch = limit_bytes < total_bytes or not memory.enforced
        self._limit_now = limit_now
        self._next_look = 0.0
        self._plan: tuple[int, ...] = ()  # that was announced for full windows
        self._growing_from: tuple[int, ...] | None = None
        self.autocast = autocast(precision, device)
        self.step = 0
        """Windows that were run and stepped on."""
        self._emit = emit
        self._announced: set[str] = set()
        self._model = model
        self._modules = modules
        self._loss_of = loss_of
        self._precision = precision
        self._device = device
        self._runner = WindowRunner(
            model=model,
            modules=modules,
            optimizer=optimizer,
            loss_of=loss_of,
            num_items=num_items,
            autocast=self.autocast,
            clip_norm=clip_norm,
            scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
            device=device,
            memory=memory,
            limit_now=limit_now,
            watch=self.watch,
            tuner=self.tuner,
            emit=emit,
            announce=self.announce,
            noise_scale=noise_scale,
        )

    def run(self, window: Window, plan: Sequence[int] | None = None) -> tuple[Gradient, int, int]:
        """The gradient of the next window: see ``WindowRunner.run``.

        Raises:
            NonFiniteLossError: the loss of the very first window is NaN or infinite; nothing is left of it.
            NothingFitsError: one sample does not fit; it says what would make it fit.
        """
        if plan is not None and max(plan) > self.tuner.largest:
            plan = None  # a size of it has run out of memory in this run
        if clock.now() >= self._next_look:
            self._look(window)
        try:
            gradient, peak_bytes, replays = self._runner.run(window, self.step + 1, plan)
            refused = None
        except NothingFitsError as error:
            refused = error.with_traceback(None)  # whose frames hold what was computed of the window
        if refused is not None:
            raise self._advised(refused, window)
        if not gradient.items:
            self.announce_once(
                Notice(
                    cause=f"Nothing in window {self.step + 1} counts: every target is ignored, or num_items is 0",
                    consequence="Such windows take no step, and their loss is nan",
                    cure="Look at the targets if there should be some",
                )
            )
        return gradient, peak_bytes, replays

    def _advised(self, refused: NothingFitsError, window: Window) -> NothingFitsError:
        samples = refused.micro_batch or 1
        advice = advise(
            Refused(
                model=self._model,
                modules=self._modules,
                optimizer=self.optimizer,
                loss_of=self._loss_of,
                batch=lambda: window.micro_batch(0, samples),
                precision=self._precision,
                device=self._device,
                memory=self.memory,
                limit_bytes=self.limit_bytes,
                peak_bytes=refused.peak_bytes,
            )
        )
        return refused.advised(advice)

    def apply(self, gradient: Gradient) -> bool:
        """One step of the optimizer; False when it was left out, for there was nothing to step on."""
        self.step += 1
        if gradient.items:
            skipped = take_step(self.optimizer, self._runner.scaler, self.step, self.memory, self.limit_bytes)
        else:
            skipped = "no micro-batch of the window has an item to learn from"
        if skipped is not None:
            self._emit(StepSkipped(step=self.step, reason=skipped))
        return skipped is None

    def apply_closure(self, closure: Callable[[], torch.Tensor]) -> None:
        """One step of an optimizer that asks for gradients itself."""
        take_step(self.optimizer, None, self.step + 1, self.memory, self.limit_bytes, closure)
        self.step += 1

    def _look(self, window: Window) -> None:
        """At the memory, before a window, for one that is short of it costs more than a look."""
        tuner, num_samples, lengths = self.tuner, window.num_samples, window.lengths
        if lengths is None:  # a short window is cut in passing: plans are those of full ones
            num_samples = max(num_samples, tuner.window[0])
        searching, old = tuner.searching, tuner.plan(num_samples, lengths)
        self.limit_bytes = self._limit_now()
        reason = tuner.look(self.limit_bytes, self.memory.strained())
        if reason is not None:
            self._growing_from = None
            self._runner.gauge.release()  # for whoever needs it
            new = tuner.plan(num_samples, lengths)
            self._emit(Replanned(step=self.step + 1, old=old, new=new, reason=reason))
        elif tuner.searching and not searching:
            self._growing_from = old
        if tuner.least_bytes > self.limit_bytes:
            self.announce_once(
                Notice(
                    cause=f"The limit is {format_bytes(self.limit_bytes)} now, and the smallest micro-batch needs "
                    f"{format_bytes(tuner.least_bytes)}",
                    consequence="Training goes on above the limit while the device lets it",
                    cure="Allow more, or stop the run",
                )
            )
        self._next_look = clock.now() + self.memory.reading_seconds

    def settle(self, num_samples: int, lengths: Sequence[int] | None = None) -> None:
        """After a full window: end the search, and the timing of plans, when nothing is left to be found out."""
        if self.tuner.settle(num_samples, lengths):
            if self._growing_from is None:
                self.announce_plan(num_samples, lengths)
            elif (new := self.tuner.plan(num_samples, lengths)) != self._growing_from:
                self._emit(Replanned(step=self.step, old=self._growing_from, new=new, reason="there is room for more"))
        if not (self.tuner.searching or self.tuner.is_timing):
            self._growing_from = None

    def resize(self, num_samples: int, lengths: Sequence[int] | None = None) -> None:
        """Full windows have so many samples from the next one on."""
        tuner = self.tuner
        old = tuner.plan(*tuner.window) if self._plan and tuner.window[0] else None
        tuner.resize(num_samples, lengths)
        self._growing_from = None
        if old is not None:  # else there is no plan yet to give up
            self._plan = tuner.plan(num_samples, lengths)
            reason = f"the effective batch is {num_samples} now"
            self._emit(Replanned(step=self.step + 1, old=old, new=self._plan, reason=reason))

    def before_trials(self, function: Callable[[int, int], None]) -> None:
        """Have it called with the samples of each micro-batch that is a trial, and their length, before that is run."""
        self._runner.before_trial = function

    def killed(self, micro_batch: int, length: int, num_samples: int) -> None:
        """The kernel has killed the last process for its memory, in such a micro-batch; the next window is so large."""
        tuner = self.tuner
        if micro_batch <= tuner.smallest:
            self.announce(
                Notice(
                    cause=f"The kernel killed the last process for its memory, in a micro-batch of {micro_batch}",
                    consequence="None is smaller, so this one may end like that too",
                    cure="Allow more memory, or train a smaller model",
                )
            )
            return
        tuner.killed(micro_batch, length)
        old, new = cut(num_samples, min(micro_batch, num_samples)), tuner.plan(num_samples)
        reason = "the kernel killed the last process for its memory"
        self._emit(Replanned(step=self.step + 1, old=old, new=new, reason=reason))

    def announce_plan(self, num_samples: int, lengths: Sequence[int] | None = None) -> None:
        """Say how such windows are cut, unless that was said before."""
        sizes = self.tuner.plan(num_samples, lengths)
        if sizes == self._plan:
            return
        self._plan = sizes
        self._emit(
            Planned(
                step=self.step,
                sizes=sizes,
                reason=self.tuner.reason(),
                predicted_bytes=self.tuner.predicted_bytes(max(self.tuner.loads(sizes, lengths))),
                prediction_error=prediction_error(self.tuner.history),
                limit_bytes=self.limit_bytes,
            )
        )

    def announce_if_not_finite(self, loss: float) -> None:
        """Once, of a loss after the first window, which was stepped on."""
        if not math.isfinite(loss):
            self.announce_once(
                Notice(
                    cause=f"The loss of window {self.step} is {loss}",
                    consequence="The step was taken, and the parameters may not be finite any more",
                    cure="Lower lr, pass clip_norm, or look for log(0) or a division by 0 in the loss",
                )
            )

    def announce_once(self, notice: Notice) -> None:
        """Unless something of the same consequence was announced."""
        if notice.consequence not in self._announced:
            self._announced.add(notice.consequence)
            self.announce(notice)

    def announce(self, notice: Notice) -> None:
        """As an event, and as a warning that points at the user's line."""
        self._emit(notice)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("autoaccum", "torch"):
            level, frame = level + 1, frame.f_back
        warnings.warn(str(notice), AutoaccumWarning, stacklevel=level)
