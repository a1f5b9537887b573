"""``Trainer``: trains at an exact effective batch, in whatever memory there is. The loop is ``Trainer.fit``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
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
from autoaccum.learning_rate import LearningRate, MakeScheduler, Scaling
from autoaccum.losses import loss_function
from autoaccum.memory import memory_of
from autoaccum.noise import Smoothed
from autoaccum.oom import is_out_of_memory, room_for_model
from autoaccum.optimizers import OptimizerLike, allocate_state, make_optimizer, trainable_parameters
from autoaccum.past import Past
from autoaccum.planner import Plan
from autoaccum.precision import Precision, autocast
from autoaccum.reporting import ProgressBar
from autoaccum.schedules import REPORTS, SMOOTHING, NoiseScale, Progress, Schedule, schedule_of
from autoaccum.signature import describe, key
from autoaccum.validation import Validator
from autoaccum.weighting import CountItems

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
        effective_batch: int | str | Schedule | Callable[[Progress], int],
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        training_step: Callable[[Any, Any], torch.Tensor] | None = None,
        num_items: CountItems | None = None,
        optimizer: OptimizerLike | None = None,
        lr: float | None = None,
        lr_scheduler: MakeScheduler | None = None,
        lr_scaling: Scaling = "none",
        base_batch: int | None = None,
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
        validate_every: int | None = None,
        noise_scale: bool = False,
        cache: bool = True,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
    ) -> None:
        """See ``fit``, which takes the same arguments."""
        self.schedule = schedule_of(effective_batch)
        arguments.of_windows(num_items, max_micro_batch, headroom, clip_norm)
        arguments.non_negative_int("num_workers", num_workers)
        arguments.non_negative_int("seed", seed)
        if lr is not None:
            arguments.number_between("lr", lr, 0)
        loss_of = loss_function(loss_fn, training_step)
        if validate_every is not None:
            arguments.positive_int("validate_every", validate_every, "It is in samples.")
            if validation_data is None:
                cure = "Pass what to validate on, or leave validate_every out."
                raise ArgumentError("validate_every", validate_every, "validation_data beside it", cure)
        self._validate_every = validate_every
        self._budget = Budget(epochs=epochs, steps=steps, samples=samples)
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
        self._epoch_samples = self._source.num_samples
        if hasattr(data, "__next__") and (epochs or 1) > 1:
            raise ArgumentError("epochs", epochs, "1 for an iterator, which can be read only once", "Pass a Dataset.")
        self.num_steps, self.num_samples = self._budget.totals(self._epoch_samples, self.schedule, drop_last)

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
            self._learning_rate = LearningRate(
                self.optimizer,
                lr_scheduler,
                num_steps=self.num_steps,
                most_samples=self._budget.most_samples(self._epoch_samples),
                lr_scaling=lr_scaling,
                base_batch=base_batch,
                first_batch=self.schedule.at(Progress()),
            )
            allocate_state(self.optimizer, modules)

        self._noise = None
        if noise_scale or isinstance(self.schedule, NoiseScale):
            self._noise = Smoothed(smoothing=getattr(self.schedule, "smoothing", SMOOTHING))
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
            full_window=min((n for n in (self.schedule.largest, self._epoch_samples) if n is not None), default=None),
            memory=self.memory,
            total_bytes=total_bytes,
            limit_now=limit_now,
            limit_bytes=self.limit_bytes,
            headroom=headroom,
            precision=precision,
            clip_norm=clip_norm,
            noise_scale=self._noise is not None,
            device=self.device,
            emit=self._emit,
        )
        self._tuner = self._engine.tuner
        if isinstance(self.schedule, NoiseScale) and self.schedule.min < 2 * self._tuner.smallest:
            cure = "A noise scale is estimated from two micro-batches, and BatchNorm has no statistics of one sample."
            raise ArgumentError("effective_batch", str(self.schedule), "a min of at least 4", cure)
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
        self.effective_batch = 0
        """Samples that were asked for in the last window."""
        self._bar = ProgressBar() if progress else None
        self._callbacks: list[Callback] = [*([self._bar] if self._bar else []), *callbacks]
        self._stop_reason: str | None = None
        self._validated = 0  # the step after which it was done last
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
                reader = self._source.read(epoch, self._sizes_ahead(epoch))
                before = self.step, self.samples_seen
                # At the end of data of known length nothing is asked: a function may have no answer there.
                while self._stop_reason is None and self.samples_seen - before[1] != self._source.num_samples:
                    asked = self._asked(self._progress(epoch))
                    window = reader.window(self._allowed(asked), self._drop_last)
                    if window is None:
                        break
                    if self._source.num_samples is None:
                        asked = self._asked_of_stream(asked, window.num_samples)
                    self._train(window, epoch, asked)
                if self.step == before[0] and self._stop_reason is None:
                    raise EmptyDatasetError(
                        "data", f"epoch {epoch} has no window (an iterator yields its items only once)."
                    )
                if self._source.num_samples is None and not self._drop_last:  # which leaves no window short
                    self._epoch_samples = max(self._epoch_samples or 0, self.samples_seen - before[1])
                epoch += 1
                if epoch == self._budget.max_epochs:
                    self._end("budget")
                if self._validate_every is None or self._stop_reason is not None:
                    self._validate(epoch - 1)
        if self._stop_reason == "budget" and self.num_steps not in (None, self.step):
            self._engine.announce(
                Notice(
                    cause=f"The run took {self.step} steps instead of the {self.num_steps} that were foreseen",
                    consequence="A learning rate scheduler was told of too many or too few",
                    cure="Let the function passed as effective_batch depend on nothing but its Progress",
                )
            )
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
        if not self._tuner.searching:
            self._engine.announce_plan(self._asked(Progress()))

    def _train(self, window: Window, epoch: int, asked: int) -> None:
        """One window: its gradient, the optimizer's step, the report."""
        if self.step == 0:
            self._recall(window)
        plan = self._recorded_plan()
        if plan is not None and sum(plan) != window.num_samples:
            raise ArgumentError(
                "micro_batch", plan, f"sizes that sum to {window.num_samples} in window {self.step + 1}"
            )
        self.effective_batch, before = asked, self.samples_seen
        is_full = window.lengths is None or window.num_samples == asked  # samples that are alike need not be there
        if is_full and asked != self._tuner.window[0]:
            self._engine.resize(asked, window.lengths)
        gradient, peak_bytes, replays = self._engine.run(window, plan)
        self.samples_seen += sum(gradient.sizes)
        lr = self._learning_rate.now(asked)
        with self._learning_rate.scaled(asked):
            stepped = self._engine.apply(gradient)
        self._learning_rate.advance(self.samples_seen, stepped)
        if is_full:
            self._engine.settle(asked, window.lengths)
        noise = gradient.noise
        if noise is not None and self._noise is not None:
            self._noise.observe(noise)
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
            noise_scale=None if noise is None or self._noise is None else self._noise.scale,
            gradient_squared=None if noise is None else noise.gradient_squared,
            gradient_variance=None if noise is None else noise.gradient_variance,
        )
        self._mark = now
        if stepped:
            self._engine.announce_if_not_finite(report.loss)
        if self._noise is not None and window.num_samples == asked and len(gradient.sizes) == 1:
            self._announce_no_noise()
        lengths = window.lengths
        if noise is not None and lengths is not None and lengths[0] != lengths[-1]:
            self._announce_sorted()
        self._emit(report)
        if self._budget.spent(self.step, self.samples_seen):
            self._end("budget")
        every = self._validate_every
        if every is not None and self._stop_reason is None and self.samples_seen // every > before // every:
            self._validate(epoch)

    def _validate(self, epoch: int) -> None:
        """After an epoch, so many samples, or the run; not after one that was broken off."""
        if self._validator is not None and self._stop_reason in (None, "budget") and self._validated != self.step:
            self._validated = self.step
            self._validator.heed(self._engine.limit_bytes, self._tuner.target_bytes)
            self._validator.run(self.step, epoch, self._tuner.micro_batch)
            self._mark = time.perf_counter()

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

    def _allowed(self, asked: int) -> int:
        """Samples that the next window may have."""
        if (plan := self._recorded_plan()) is not None:
            return sum(plan)
        return asked if self._budget.samples is None else min(asked, self._budget.samples - self.samples_seen)

    def _progress(self, epoch: int) -> Progress:
        return Progress(
            step=self.step,
            epoch=epoch,
            samples=self.samples_seen,
            effective_batch=self.effective_batch or None,
            reports=self.history[-REPORTS:],
        )

    def _asked(self, progress: Progress) -> int:
        """What the schedule asks for, and the data can give."""
        asked, there = self.schedule.at(progress), self._source.num_samples
        return asked if there is None or asked <= there else self._all(asked, there)

    def _asked_of_stream(self, asked: int, num_samples: int) -> int:
        """The same for a window that came of a stream, which may have more in one epoch than in another."""
        if self._epoch_samples is None:
            return asked
        self._epoch_samples = max(self._epoch_samples, num_samples)
        return asked if asked <= self._epoch_samples else self._all(asked, self._epoch_samples)

    def _all(self, asked: int, there: int) -> int:
        self._engine.announce_once(
            Notice(
                cause=f"effective_batch={asked} is more than the data's {there} samples",
                consequence=f"Every epoch is one window of {there} samples",
                cure=f"Pass effective_batch={there} to say so, or more data",
            )
        )
        return there

    def _recorded_plan(self) -> tuple[int, ...] | None:
        return self._plans[self.step] if self.step < len(self._plans) else None

    def _sizes_ahead(self, epoch: int) -> Callable[[int], tuple[int, ...]]:
        """(position) -> how the window that begins there will be cut, as things stand: for what workers collate.

        They ask for one window of the epoch after the other, ahead of training.
        """
        step, before = self.step, self.samples_seen

        def sizes_at(position: int) -> tuple[int, ...]:
            nonlocal step
            if position == self._epoch_samples or self._budget.spent(step, before + position):
                return (1,)  # there will be no window
            asked = self.schedule.at(replace(self._progress(epoch), step=step, samples=before + position))
            step += 1
            left = asked if self._epoch_samples is None else self._epoch_samples - position
            return self._tuner.plan(max(1, min(asked, left)))

        return sizes_at

    def _announce_no_noise(self) -> None:
        self._engine.announce_once(
            Notice(
                cause=f"Window {self.step} was one micro-batch, and it takes two to estimate the noise scale",
                consequence="Until windows are cut, noise_scale is None, and an effective batch that follows it stays "
                "as it is",
                cure=f"Leave micro_batch out, or pass at most half of an effective batch of {2 * self._tuner.smallest} "
                "samples or more",
            )
        )

    def _announce_sorted(self) -> None:
        self._engine.announce_once(
            Notice(
                cause="Windows are sorted by length, so their micro-batches are no random parts of them",
                consequence="What long and short samples differ in counts as noise, and the noise scale may come out "
                "several times too large",
                cure="Pad all samples to one length where the noise scale matters",
            )
        )

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
