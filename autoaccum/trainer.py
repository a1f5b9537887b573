"""``fit``: trains at an exact effective batch, in whatever memory there is. The loop is ``Trainer.fit``."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from autoaccum import arguments, randomness
from autoaccum.budget import Budget
from autoaccum.data import Window, open_source
from autoaccum.devices import find_device
from autoaccum.engine import Engine
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    EmptyDatasetError,
    StopTraining,
)
from autoaccum.events import (
    Event,
    Finished,
    Notice,
    Record,
    Started,
    StepReport,
)
from autoaccum.interrupts import interrupt_calls
from autoaccum.lazy import build_lazy_layers
from autoaccum.losses import loss_function
from autoaccum.memory import memory_of
from autoaccum.oom import is_out_of_memory, room_for_model
from autoaccum.optimizers import OptimizerLike, allocate_state, make_optimizer, trainable_parameters
from autoaccum.past import Past
from autoaccum.planner import Plan
from autoaccum.precision import Precision, autocast
from autoaccum.reporting import ProgressBar
from autoaccum.signature import describe, key
from autoaccum.validation import Validator
from autoaccum.weighting import CountItems
from autoaccum.window import Gradient

Callback = Callable[[Record], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """What a run leaves."""

    history: tuple[StepReport, ...]
    """One report per window."""
    events: tuple[Event, ...]
    """Everything else that happened, in order."""
    plan: Plan
    """How the last full window was cut."""
    num_steps: int
    """Optimizer steps taken."""
    num_samples: int
    """Samples trained on."""
    model: nn.Module
    """The model that was passed in, trained in place."""
    optimizer: torch.optim.Optimizer
    """With its state."""


class Trainer:
    """One training run. ``autoaccum.fit(...)`` is ``Trainer(...).fit()``; keep the object to look at the state.

    Everything that can be checked before training is checked when it is made.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        effective_batch: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        training_step: Callable[[Any, Any], torch.Tensor] | None = None,
        num_items: CountItems | None = None,
        optimizer: OptimizerLike | None = None,
        lr: float | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        samples: int | None = None,
        micro_batch: int | Literal["auto"] | Sequence[Sequence[int]] = "auto",
        max_micro_batch: int | None = None,
        memory_limit: arguments.MemoryLimit = None,
        headroom: float = 0.05,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        compile: bool = False,
        device: str | torch.device | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        validation_data: Any = None,
        cache: bool = True,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
    ) -> None:
        """See ``fit``, which takes the same arguments."""
        arguments.positive_int("effective_batch", effective_batch, "Pass the samples you want per optimizer step.")
        arguments.of_windows(num_items, max_micro_batch, headroom, clip_norm)
        arguments.non_negative_int("num_workers", num_workers)
        arguments.non_negative_int("seed", seed)
        if lr is not None:
            arguments.number_between("lr", lr, 0)
        loss_of = loss_function(loss_fn, training_step)
        self._budget = Budget(epochs=epochs, steps=steps, samples=samples)
        self.effective_batch = effective_batch
        self._drop_last = drop_last
        self._plans = arguments.recorded_plans(micro_batch)
        callbacks = arguments.functions("callbacks", callbacks)
        modules = [m for m in (model, loss_fn, training_step) if isinstance(m, nn.Module)]
        parameters = trainable_parameters(model, modules)

        self.device = find_device(device)
        self.memory = memory_of(self.device)
        total_bytes = self.memory.limit()
        limit_now = arguments.moving_limit(memory_limit, self.memory.limit)
        self.limit_bytes = limit_now()
        host = memory_of(torch.device("cpu"))
        host_bytes = min(host.limit(), self.limit_bytes) if self.device.type == "cpu" else host.limit()
        # Kept for replays before samples are read again; on a CPU it is taken from what micro-batches have.
        budget_bytes = max(0, host_bytes - host.used()) // (64 if self.device.type == "cpu" else 8)
        self._source = open_source(
            data,
            seed=seed,
            shuffle=shuffle,
            device=self.device,
            collate_fn=collate_fn,
            num_workers=num_workers,
            budget_bytes=budget_bytes,
        )
        self._full_window = min(effective_batch, self._source.num_samples or effective_batch)
        if hasattr(data, "__next__") and (epochs or 1) > 1:
            raise ArgumentError("epochs", epochs, "1 for an iterator, which can be read only once", "Pass a Dataset.")
        if drop_last and self._full_window < effective_batch:
            raise ArgumentError(
                "drop_last",
                True,
                f"data of at least effective_batch={effective_batch} samples",
                f"It has {self._full_window}, so its only window would be left out.",
            )
        self.num_steps, self.num_samples = self._budget.totals(self._source.num_samples, effective_batch, drop_last)

        torch.manual_seed(seed)
        randomness.seed_host(seed)
        self.model = model
        if not model.training:  # a model in training mode may hold layers that were frozen in eval mode on purpose
            model.train()
        with room_for_model(self.memory, self.limit_bytes, parameters):
            for module in modules:
                module.to(self.device)
            build_lazy_layers(model, modules, self._source, loss_of, autocast(precision, self.device), self.device)
            self.optimizer = make_optimizer(optimizer, lr, parameters)
            self._scheduler = self._make_scheduler(lr_scheduler)
            allocate_state(self.optimizer, modules)

        fixed = micro_batch if isinstance(micro_batch, int) else max((max(plan) for plan in self._plans), default=None)
        step_model: Any = torch.compile(model) if compile else model
        self._engine = Engine(
            step_model,
            modules,
            self.optimizer,
            loss_of=loss_of,
            num_items=num_items,
            micro_batch=fixed,
            max_micro_batch=max_micro_batch,
            full_window=self._full_window,
            memory=self.memory,
            total_bytes=total_bytes,
            limit_now=limit_now,
            limit_bytes=self.limit_bytes,
            headroom=headroom,
            precision=precision,
            clip_norm=clip_norm,
            device=self.device,
            emit=self._emit,
        )
        self._tuner = self._engine.tuner
        self._past = Past() if cache and self._tuner.searching else None
        self._past_key: str | None = None
        self._key_of = partial(
            key,
            modules,
            self.optimizer,
            precision=precision,
            device=self.device,
            compiled=compile,
            functions=(loss_fn, training_step),
        )
        self._validator = None
        if hasattr(validation_data, "__next__"):
            cure = "It is read after each epoch, and an iterator yields its items only once: pass a Dataset or a list."
            raise ArgumentTypeError("validation_data", validation_data, "data that can be read again", cure)
        if validation_data is not None:
            source = open_source(
                validation_data,
                seed=seed,
                shuffle=False,
                device=self.device,
                collate_fn=None if isinstance(validation_data, DataLoader) else collate_fn,
                num_workers=0 if isinstance(validation_data, DataLoader) else num_workers,
                argument="validation_data",
            )
            self._validator = Validator(
                step_model,
                modules,
                source,
                loss_of=loss_of,
                of_outputs=loss_fn is not None,
                num_items=num_items,
                autocast=self._engine.autocast,
                device=self.device,
                memory=self.memory,
                limit_bytes=self.limit_bytes,
                target_bytes=self._tuner.target_bytes,
                watch=self._engine.watch,
                emit=self._emit,
            )

        self.history: list[StepReport] = []
        self.events: list[Event] = []
        self.samples_seen = 0
        self._bar = ProgressBar() if progress else None
        self._callbacks: list[Callback] = [*([self._bar] if self._bar else []), *callbacks]
        self._stop_reason: str | None = None
        self._mark = 0.0

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._engine.step

    @torch.enable_grad()
    def fit(self) -> FitResult:
        """Train to the end of the budget, or until a callback or Ctrl-C ends the run after a window."""
        try:
            return self._fit()
        finally:
            self._keep()
            if self._bar is not None:
                self._bar.close()

    def _fit(self) -> FitResult:
        self._start()
        with interrupt_calls(lambda: self._end("interrupted")):
            epoch = 0
            while self._stop_reason is None:
                reader = self._source.read(epoch, self._sizes_at)
                before = self.step
                while self._stop_reason is None and (window := reader.window(self._next_window(), self._drop_last)):
                    self._train(window, epoch)
                if self.step == before and self._stop_reason is None:
                    raise EmptyDatasetError(
                        "data", f"epoch {epoch} has no window (an iterator yields its items only once)."
                    )
                if self._validator is not None and self._stop_reason in (None, "budget"):
                    self._validator.heed(self._engine.limit_bytes, self._tuner.target_bytes)
                    self._validator.run(self.step, epoch, self._tuner.micro_batch)
                    self._mark = time.perf_counter()
                if self._source.num_samples is None:  # a stream may turn out to have less than one window
                    largest = max(report.effective_batch for report in self.history[before:])
                    self._full_window = min(self._full_window, largest)
                epoch += 1
                if epoch == self._budget.max_epochs:
                    self._end("budget")
        self._emit(Finished(step=self.step, reason=self._stop_reason))
        return FitResult(
            history=tuple(self.history),
            events=tuple(self.events),
            plan=Plan(ranks=(self._tuner.plan(*self._tuner.window),)),
            num_steps=self.step,
            num_samples=self.samples_seen,
            model=self.model,
            optimizer=self.optimizer,
        )

    def _start(self) -> None:
        self._mark = time.perf_counter()
        self._emit(
            Started(
                num_steps=self.num_steps,
                num_samples=self.num_samples,
                device=str(self.device),
                limit_bytes=self.limit_bytes,
                used_bytes=self.memory.used(),
            )
        )
        if self._full_window < self.effective_batch:
            self._engine.announce(
                Notice(
                    cause=f"effective_batch={self.effective_batch} is more than the data's {self._full_window} samples",
                    consequence=f"Every epoch is one window of {self._full_window} samples",
                    cure=f"Pass effective_batch={self._full_window} to say so, or more data",
                )
            )
        if not self._tuner.searching:
            self._engine.announce_plan(self._full_window)

    def _train(self, window: Window, epoch: int) -> None:
        """One window: its gradient, the optimizer's step, the report."""
        if self.step == 0:
            self._recall(window)
        plan = self._recorded_plan()
        if plan is not None and sum(plan) != window.num_samples:
            raise ArgumentError(
                "micro_batch", plan, f"sizes that sum to {window.num_samples} in window {self.step + 1}"
            )
        gradient, peak_bytes, replays = self._engine.run(window, plan)
        self.samples_seen += sum(gradient.sizes)
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        stepped = self._step(gradient)
        if window.lengths is None or window.num_samples == self._full_window:
            self._engine.settle(self._full_window, window.lengths)
        now = time.perf_counter()
        report = StepReport(
            step=self.step,
            epoch=epoch,
            num_samples=self.samples_seen,
            effective_batch=sum(gradient.sizes),
            micro_batches=gradient.sizes,
            loss=gradient.loss.item(),
            lr=lr,
            grad_norm=None if gradient.grad_norm is None else gradient.grad_norm.item(),
            seconds=now - self._mark,
            peak_bytes=peak_bytes,
            limit_bytes=self._engine.limit_bytes,
            replays=replays,
        )
        self._mark = now
        if stepped:
            self._engine.announce_if_not_finite(report.loss)
        self._emit(report)
        if self._budget.spent(self.step, self.samples_seen):
            self._end("budget")

    def _recall(self, window: Window) -> None:
        """Begin from what earlier runs found.

        The shapes are those of the first window, for data need not bear to be read beside the pass that trains.
        """
        if self._past is None:
            return
        try:
            example = window.micro_batch(0, min(self._tuner.smallest, window.num_samples))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        try:
            self._past_key = self._key_of(batch=example, ragged=window.lengths is not None)
        except Exception:  # code of others is asked what it is, and no answer of it may end the run
            return
        del example
        gradient_bytes = sum(p.nbytes for group in self.optimizer.param_groups for p in group["params"])
        self._tuner.recall(self._past.load(self._past_key), self.memory.used() + gradient_bytes)

    def _keep(self) -> None:
        """For later runs, what was measured: that a size failed says something about this run's limit alone."""
        measured = [trial for trial in self._tuner.learnt() if trial.peak_bytes is not None]
        if self._past is not None and self._past_key is not None and measured:
            self._past.save(
                self._past_key,
                [*self._tuner.past, *measured],
                model=type(self.model).__name__,
                device=describe(self.device),
            )

    def _step(self, gradient: Gradient) -> bool:
        """The optimizer's and the scheduler's; the optimizer's is left out where there is nothing to step on."""
        stepped = self._engine.apply(gradient)
        if self._scheduler is not None:
            with warnings.catch_warnings():
                if not stepped:  # the schedule counts windows; PyTorch would take it for a mistake
                    warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()
        return stepped

    def _next_window(self) -> int:
        """Samples that the next window may have."""
        if (plan := self._recorded_plan()) is not None:
            return sum(plan)
        if self._budget.samples is not None:
            return min(self.effective_batch, self._budget.samples - self.samples_seen)
        return self.effective_batch

    def _recorded_plan(self) -> tuple[int, ...] | None:
        return self._plans[self.step] if self.step < len(self._plans) else None

    def _sizes_at(self, position: int) -> tuple[int, ...]:
        """How a window that begins there would be cut as things stand: what workers collate ahead of time."""
        left = self.effective_batch if self._source.num_samples is None else self._source.num_samples - position
        return self._tuner.plan(min(self.effective_batch, left))

    def _emit(self, record: Record) -> None:
        if isinstance(record, StepReport):
            self.history.append(record)
        else:
            self.events.append(record)
        for callback in self._callbacks:
            try:
                callback(record)
            except StopTraining:
                self._end("stopped")

    def _end(self, reason: str) -> None:
        """End the run after the window; the first reason stands."""
        self._stop_reason = self._stop_reason or reason

    def _make_scheduler(self, make: Callable[[torch.optim.Optimizer, int], LRScheduler] | None) -> LRScheduler | None:
        if make is None:
            return None
        if self.num_steps is None:
            raise ArgumentError(
                "lr_scheduler",
                make,
                "a budget in steps when the data's length is unknown",
                "Pass steps=, so that the scheduler can be told how many there are.",
            )
        if not callable(make):
            raise ArgumentTypeError(
                "lr_scheduler",
                make,
                "a function (optimizer, num_steps) -> LRScheduler",
                "For example lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps).",
            )
        made = make(self.optimizer, self.num_steps)
        if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
            raise ArgumentTypeError(
                "lr_scheduler",
                made,
                "a function that returns an LRScheduler whose step needs no metric",
                "For example lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps).",
            )
        return made


P = ParamSpec("P")


def _as_function(trainer: Callable[P, Trainer]) -> Callable[P, FitResult]:
    """``fit`` with the signature of ``Trainer``, so that the two cannot differ."""

    def fit(*args: P.args, **kwargs: P.kwargs) -> FitResult:
        """Train ``model`` with exactly ``effective_batch`` samples per optimizer step, in whatever memory there is.

        ::

            for epoch in epochs:
                for window in windows of effective_batch samples:       # the last one of an epoch may be short
                    remember buffers and random states
                    for micro_batch in plan:                            # found while training; sums to the window
                        loss = loss_fn(model(inputs), targets)          # a mean over the micro-batch's items
                        (loss * items / items of the window).backward()
                    out of memory anywhere above: put everything back, plan smaller, run the window again
                    clip; optimizer.step(); lr_scheduler.step(); report
                validate

        Args:
            model: the module to train, in place.
            data: a Dataset, a DataLoader (its dataset, collate_fn, workers and sampler are used, its batch size is
                not), a tuple or dict of tensors with one row per sample, or any iterable of batches. A batch is any
                pytree whose tensors have one row per sample.
            effective_batch: samples per optimizer step.
            loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets).
            training_step: (model, batch) -> loss, for any batch. With neither, the model returns its loss, as
                ``.loss`` or ``["loss"]``.
            num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss.
            optimizer: an Optimizer or a function (parameters) -> Optimizer; AdamW when left out.
            lr: learning rate of the AdamW that is made when optimizer is left out; 1e-3 when left out too.
            lr_scheduler: function (optimizer, num_steps) -> LRScheduler; stepped once per window.
            epochs: passes over the data; one when no budget is given.
            steps: optimizer steps, over as many epochs as that takes.
            samples: samples to train on; the last window is cut to it.
            micro_batch: "auto", the samples of one forward and backward, or the plans of a recorded run
                ([report.micro_batches for report in history]) to repeat it bit for bit.
            max_micro_batch: the most samples to try at once.
            memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function
                () -> one of these, asked again as training goes on.
            headroom: fraction of the limit that plans leave free.
            precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
            clip_norm: clip each window's gradient to this 2-norm.
            compile: run the model through torch.compile.
            device: where to train, such as cpu or cuda:1; an accelerator where there is one.
            seed: of the order of samples, of what datasets draw, and of dropout.
            shuffle: read the data in a new order each epoch; a DataLoader says so itself.
            drop_last: leave out the short window at the end of an epoch.
            collate_fn: makes a batch of a list of samples.
            num_workers: processes that read the data ahead of time.
            validation_data: like data; its loss is reported at the end of each epoch.
            cache: begin from what earlier runs of the same model, data shapes and device found, and keep what this one
                finds.
            callbacks: functions (record) -> None, called with every StepReport and event; StopTraining ends the run.
            progress: show a progress bar and a summary on standard error.

        Returns:
            FitResult: history, events, plan, num_steps, num_samples, model, optimizer.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
            DataError: the data cannot be cut into windows.
            LossError: the loss cannot be trained on; no step was taken.
            MemoryLimitError: not even one sample fits, or not even the model.

        >>> import torch
        >>> inputs, targets = torch.randn(10, 3), torch.randn(10, 1)
        >>> result = fit(
        ...     torch.nn.Linear(3, 1), (inputs, targets), effective_batch=4, micro_batch=3,
        ...     loss_fn=torch.nn.functional.mse_loss, device="cpu", progress=False,
        ... )
        >>> [report.micro_batches for report in result.history]
        [(2, 2), (2, 2), (2,)]
        """
        signature.bind(*args, **kwargs)  # so that a TypeError speaks of fit
        return trainer(*args, **kwargs).fit()

    signature = inspect.signature(trainer).replace(return_annotation="FitResult")
    fit.__signature__ = signature  # type: ignore[attr-defined]
    fit.__qualname__ = "fit"
    return fit


fit = _as_function(Trainer)
