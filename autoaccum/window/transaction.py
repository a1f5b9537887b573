"""A window as a transaction: forward and backward of all its micro-batches, or no trace of them and another try.

The accumulation step is ``WindowRunner._attempt``.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoaccum.data.base import Window
from autoaccum.errors import LossSideEffectError, NonFiniteLossError, NothingFitsError
from autoaccum.events import Event, Notice, OutOfMemory, Replanned
from autoaccum.loss.conclusions import Conclusion, conclude, stands_for_none
from autoaccum.loss.coupling import Crossing, batch_norm_notices, couples_samples, coupling_notice, crossings
from autoaccum.loss.functions import LossOf
from autoaccum.loss.reductions import Count, Reduction, read, without_graph
from autoaccum.loss.weighting import (
    CountItems,
    Tally,
    by_user,
    clip_gradients,
    contradiction,
    counted_once,
    doubt_notice,
    penalty_notice,
    scale_gradients,
)
from autoaccum.memory.base import Memory
from autoaccum.memory.devices import is_slow_to_read
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.cuts import cut
from autoaccum.planning.noise import Noise, Part, estimate
from autoaccum.planning.tuner import Tuner
from autoaccum.window import contributions
from autoaccum.window.meter import Gauge, length_at
from autoaccum.window.precision import half_precision_notices
from autoaccum.window.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """A window whose gradient is in ``.grad``, complete, unscaled and clipped: ready for the optimizer."""

    sizes: tuple[int, ...]
    """The micro-batches it was made of."""
    loss: torch.Tensor
    """Mean over the window's items; on the device."""
    grad_norm: torch.Tensor | None
    """2-norm before clipping; on the device."""
    items: float
    """What the loss is a mean over."""
    parts: tuple[Part, ...] = ()
    """What each micro-batch adds to it, where that is measured: before clipping."""
    noise: Noise | None = None
    """What they tell of the noise in it, where that is measured and can be told."""
    doubts: tuple[Notice, ...] = ()
    """Why it may not be the gradient of the whole window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """An attempt that ran out of memory, in numbers alone: an exception would pin the tensors that must be freed."""

    micro_batch: int
    length: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Again:
    """An attempt that went well, but whose end showed what should have been known at its beginning.

    A micro-batch had no items, and its backward may have given NaN; or terms beside a sum were taken for beside a mean.
    """

    sizes: tuple[int, ...]


class WindowRunner:
    """Runs windows until their gradient is there, in whatever memory there is."""

    def __init__(
        self,
        *,
        model: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss_of: LossOf,
        num_items: CountItems | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        memory: Memory,
        limit_now: Callable[[], int],
        watch: bool,
        tuner: Tuner,
        emit: Callable[[Event], None],
        announce: Callable[[Notice], None],
        noise_scale: bool = False,
    ) -> None:
        """Set up.

        Args:
            model: what ``loss_of`` is called with.
            modules: whose buffers a forward may change, and whose parameters it gives gradients to.
            optimizer: whose parameters' gradients make up the window's.
            loss_of: (model, micro-batch) -> loss, a mean or a sum.
            num_items: (micro-batch) -> what its loss is a mean over; None: it is read off the loss.
            autocast: makes the context of each forward.
            clip_norm: the 2-norm to clip the window's gradient to; None: it is not even measured.
            scaler: for float16; None without it.
            device: where to compute.
            memory: of that device.
            limit_now: () -> bytes that may be used.
            watch: whether the limit is kept by nobody but us, so that passing it raises no error.
            tuner: says the sizes.
            emit: takes the events.
            announce: takes what cannot be exact, once.
            noise_scale: whether windows that are cut tell of the noise in their gradient.
        """
        self._model = model
        self._optimizer = optimizer
        self._loss_of = loss_of
        self._num_items = num_items
        self._autocast = autocast
        self._clip_norm = clip_norm
        self.scaler = scaler
        self._device = device
        self._memory = memory
        self._limit_now = limit_now
        self._tuner = tuner
        self._emit = emit
        self._announce = announce
        self._announced: set[str] = set()
        self._noise_scale = noise_scale
        self._modules = modules
        self._parameters = [p for module in modules for p in module.parameters()]
        self._checked = False  # whether a first window had a finite loss
        self._has_sums: bool | None = None
        self._examining = True  # until a window has been cut, what may couple its samples is looked for
        self._deferred = is_slow_to_read(device)
        self.before_trial: Callable[[int, int], None] | None = None
        self._snapshot = Snapshot(modules, device)
        self._snapshot.take()  # so that its memory is there before the first window
        self._seeds: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self.gauge = Gauge(memory, device, tuner, watch=watch)

    def run(self, window: Window, step: int, plan: Sequence[int] | None = None) -> tuple[Gradient, int, int]:
        """Forward and backward of a window, replayed in smaller sizes until it fits.

        Args:
            window: the samples.
            step: the optimizer step that they are for: the first is 1.
            plan: sizes to use; None: those that the tuner chooses.

        Returns:
            the gradient, the most device memory in use since it was last read in bytes, the number of replays.

        Raises:
            NothingFitsError: one sample does not fit; the window has left no mark.
        """
        self.gauge.begin_window()
        self._snapshot.take()
        self.drop_gradients()
        sizes: Iterable[tuple[int, bool]]
        lengths = window.lengths
        sizes = self._tuner.sizes(window.num_samples, lengths) if plan is None else [(size, False) for size in plan]
        replays = 0
        started = self.gauge.now() if self._tuner.is_timing else 0.0
        # The recovery is out here because an exception that is being handled pins, through its traceback, the frames
        # of the failed forward, and with them the very tensors that have to go (pytorch/pytorch#18853).
        while not isinstance(outcome := self._attempt(window, sizes), Gradient):
            self.roll_back()
            if isinstance(outcome, _Again):
                new = outcome.sizes
            else:
                replays += 1
                new = self._shrink(outcome, window, step)
            sizes = [(size, False) for size in new]
        if started and not replays:
            self._tuner.timed(self.gauge.now() - started, window.num_samples, lengths)
        self._tuner.committed(outcome.sizes, lengths)
        if len(outcome.sizes) > 1:
            self._say_what_is_not_exact(outcome)
        smaller = self.gauge.end_window(outcome.sizes, lengths)
        if smaller is not None:
            self._emit(Replanned(step=step, old=outcome.sizes, new=smaller, reason="over the memory limit"))
        return outcome, self.gauge.peak_bytes, replays

    def _attempt(self, window: Window, sizes: Iterable[tuple[int, bool]]) -> Gradient | _Failure | _Again:
        done: list[int] = []
        losses: list[torch.Tensor | None] = []
        reductions: list[Reduction] = []
        shown: list[Reduction] = []
        num_samples, examining, num_items = window.num_samples, self._examining, self._num_items
        tally = Tally(num_samples, deferred=self._deferred)
        lengths = window.lengths
        position, size, length = 0, 0, 1
        met: list[tuple[int, set[Crossing]]] = []
        norms: dict[int, torch.Tensor] = {}
        try:
            for size, is_trial in sizes:
                length = length_at(lengths, position)
                if is_trial:
                    if self.before_trial is not None:
                        self.before_trial(size, length)
                    started = self.gauge.begin_trial()
                else:
                    self.gauge.make_room(size, length)
                batch = window.micro_batch(position, size)
                reduction = None if num_items is None else by_user(num_items, batch)
                if reduction is None or isinstance(reduction.items, torch.Tensor) or reduction.items:
                    examines = examining and (size < num_samples or not self._checked)
                    gradients = self._gradients() if examines else None
                    with self._autocast():
                        loss = self._loss_of(self._model, batch)
                    if reduction is None:
                        reduction = read(loss, size)
                    if examines:
                        if gradients != self._gradients():
                            raise LossSideEffectError("training_step or the model")
                        if size < num_samples:
                            met.append((size, crossings(loss, size)))
                            shown.append(without_graph(read(loss, size)))
                    weight = tally.weight(size, reduction.items, loss.dtype)
                    losses.append(None if weight is None else loss.detach())
                    if weight is not None and self._noise_scale and size < num_samples:
                        norms[len(done)] = self._backward_apart(loss, weight, reduction, size / num_samples)
                    elif weight is not None:
                        self._backward(loss, weight, reduction, size / num_samples)
                    del loss
                else:
                    tally.weight(size, reduction.items)
                    losses.append(None)
                del batch  # its memory is the next one's
                if is_trial:
                    self.gauge.end_trial(size, length, started)
                reductions.append(without_graph(reduction) if reduction.edges else reduction)
                position += size
                done.append(size)
            size = max(done)
            return self._finish(tuple(done), losses, reductions, shown, tally, met, norms)
        except (NothingFitsError, NonFiniteLossError):  # said by numbers: a trial's peak, the loss; nothing has failed
            self.roll_back()
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = _Failure(micro_batch=size, length=length, peak_bytes=self._memory.peak())
        return failure

    def _gradients(self) -> list[tuple[int, int]]:
        """What tells whether they were changed."""
        return [(id(p.grad), p.grad._version) for p in self._parameters if p.grad is not None]

    def _backward(self, loss: torch.Tensor, weight: Count, reduction: Reduction, share: float) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        seed = self._seed(weight, loss)
        if not (reduction.edges and self._is_sum(reduction)):
            torch.autograd.backward(loss, seed)
            return
        with counted_once(reduction, share):
            torch.autograd.backward(loss, seed)

    def _backward_apart(self, loss: torch.Tensor, weight: Count, reduction: Reduction, share: float) -> torch.Tensor:
        """A backward, and the 2-norm of its own gradient."""
        trained = self._trained()
        before = contributions.set_aside(trained)
        self._backward(loss, weight, reduction, share)
        norm = contributions.norm(trained)
        contributions.add_back(before)
        return norm

    def _finish(
        self,
        sizes: tuple[int, ...],
        losses: list[torch.Tensor | None],
        reductions: list[Reduction],
        shown: list[Reduction],
        tally: Tally,
        met: list[tuple[int, set[Crossing]]],
        norms: dict[int, torch.Tensor],
    ) -> Gradient | _Again:
        counts = tally.read()
        is_doubtful = False
        for index, micro_loss in enumerate(losses):
            if micro_loss is not None and reductions[index].terms:
                is_none, may_be_one = stands_for_none(reductions[index], micro_loss, sizes[index])
                is_doubtful = is_doubtful or may_be_one
                if is_none:
                    tally.leave_out(index)
                    losses[index] = None
        if not any(counts):
            return Gradient(sizes=sizes, loss=torch.tensor(float("nan")), grad_norm=None, items=0)
        there = [micro_loss for micro_loss in losses if micro_loss is not None]
        if len(there) > len(counts) - counts.count(0):
            self._deferred = False
            return _Again(sizes=sizes)
        found = conclude(sizes, reductions, is_doubtful) if len(sizes) > 1 else Conclusion(is_sum=False)
        has_constants = len(sizes) > 1 and bool(reductions[0].constants)
        if has_constants and any(self._is_sum(reduction) is not found.is_sum for reduction in reductions):
            self._has_sums = found.is_sum
            return _Again(sizes=sizes)
        correction = tally.correction(found.is_sum)
        parts, noise = self._measured(sizes, counts, found.is_sum, norms, correction) if norms else ((), None)
        if correction != 1:
            scale_gradients(self._trained(), correction)
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)
        grad_norm = None
        if self._clip_norm is not None:
            grad_norm = clip_gradients(self._trained(), self._clip_norm)
        loss = tally.loss(there, found.is_sum)
        if not self._checked:
            if not math.isfinite(value := loss.item()):
                raise NonFiniteLossError(value)
            self._checked = True
        return Gradient(
            sizes=sizes,
            loss=loss,
            grad_norm=grad_norm,
            items=sum(counts),
            parts=parts,
            noise=noise,
            doubts=self._doubts(sizes, reductions, found, shown, met) if len(sizes) > 1 else (),
        )

    def _measured(
        self,
        sizes: Sequence[int],
        counts: Sequence[float],
        is_sum: bool,
        norms: dict[int, torch.Tensor],
        correction: float,
    ) -> tuple[tuple[Part, ...], Noise | None]:
        """What each micro-batch adds to the window's gradient, which is yet to be corrected, and how noisy that is."""
        whole = contributions.norm(self._trained())
        scale = torch.ones_like(whole) if self.scaler is None else self.scaler.scale(torch.ones_like(whole))
        loss_scale, total, *read = torch.stack([scale, whole, *norms.values()]).tolist()  # the one wait for the device
        unit = correction / loss_scale
        squares = {index: (norm * unit) * (norm * unit) for index, norm in zip(norms, read, strict=True)}
        sign = math.copysign(1, sum(counts))  # a loss that is minus a mean has counts below 0
        parts = tuple(
            (size, size if is_sum else sign * count, squares[index] if count else 0.0)
            for index, (size, count) in enumerate(zip(sizes, counts, strict=True))
        )
        return parts, estimate(parts, (total * unit) * (total * unit))

    def _is_sum(self, reduction: Reduction) -> bool:
        """Whether a loss with terms of parameters alone is a sum: by itself, until a window has shown what it is."""
        return reduction.is_sum if self._has_sums is None else self._has_sums

    def _doubts(
        self,
        sizes: Sequence[int],
        reductions: list[Reduction],
        found: Conclusion,
        shown: list[Reduction],
        met: list[tuple[int, set[Crossing]]],
    ) -> tuple[Notice, ...]:
        """Why a window that was cut may not have the gradient of the whole."""
        if couples_samples(met):  # no count makes it exact
            return (coupling_notice(),)
        if self._num_items is not None:
            claimed = [float(reduction.items) for reduction in reductions]
            notice = contradiction(claimed, sizes, shown) if len(shown) == len(sizes) else None
            return (notice,) if notice is not None else ()
        notices = [] if found.doubt is None else [doubt_notice(*found.doubt)]
        if found.is_sum and reductions[0].constants:
            notices.append(penalty_notice())
        return tuple(notices)

    def _say_what_is_not_exact(self, gradient: Gradient) -> None:
        """Each thing once, when a window has been cut."""
        notices = list(gradient.doubts)
        if self._examining:
            self._examining = False
            trained = [p for p in self._parameters if p.requires_grad]
            notices = [*batch_norm_notices(self._modules), *half_precision_notices(trained), *notices]
        for notice in notices:
            if notice.consequence not in self._announced:
                self._announced.add(notice.consequence)
                self._announce(notice)

    def _seed(self, weight: Count, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from: the same as multiplying the loss, without an operation and its backward."""
        if isinstance(weight, torch.Tensor):
            return weight.to(loss.dtype)
        key = (weight, loss.dtype)
        if key not in self._seeds or self._seeds[key]._version:  # a backward of a user's own may have written to it
            if len(self._seeds) > 1000:  # weights of counted items hardly ever recur
                self._seeds.clear()
            self._seeds[key] = torch.full_like(loss, weight, requires_grad=False)
        return self._seeds[key]

    def drop_gradients(self) -> None:
        """Gradients of a window begin at None: a parameter that takes no part must not look like one with zeros."""
        for parameter in self._trained():
            parameter.grad = None

    def _trained(self) -> list[torch.Tensor]:
        """What gets gradients: the modules' parameters, and what the optimizer holds now; some may be added to it."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in (*self._parameters, *held)}.values())

    def roll_back(self) -> None:
        """As if the window had never run: gradients, buffers, random states, scaler."""
        self.drop_gradients()
        self._snapshot.restore()
        if self.scaler is not None:
            # The scale changes only after a step, but "already unscaled" must be forgotten: a scaler of the same
            # state has not heard of it.
            fresh = torch.amp.GradScaler(self._device.type)
            fresh.load_state_dict(self.scaler.state_dict())
            self.scaler = fresh
        gc.collect()  # a failed forward may have left reference cycles that hold tensors
        self.gauge.release()

    def _shrink(self, failure: _Failure, window: Window, step: int) -> tuple[int, ...]:
        failed = failure.micro_batch
        self._emit(OutOfMemory(step=step, phase="training", micro_batch=failed))
        lengths = window.lengths
        old = cut(window.num_samples, failed) if lengths is None else self._tuner.plan(window.num_samples, lengths)
        new = self._tuner.out_of_memory(
            failed,
            window.num_samples,
            lengths,
            length=failure.length,
            peak_bytes=failure.peak_bytes,
            limit_bytes=self._limit_now(),
        )
        self._emit(Replanned(step=step, old=old, new=new, reason="out of memory"))
        return new
