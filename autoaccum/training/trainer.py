"""``Trainer``: trains at an exact effective batch, in whatever memory there is. The loop is ``Trainer.fit``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.base import Window
from autoaccum.data.sources import open_source
from autoaccum.errors import ArgumentError, ArgumentTypeError, CheckpointCorruptError, StopTraining
from autoaccum.events import (
    Event,
    Finished,
    Notice,
    Record,
    Resumed,
    Saved,
    Started,
    StepReport,
)
from autoaccum.loss.functions import loss_function
from autoaccum.loss.weighting import CountItems
from autoaccum.memory import clock
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.limit import Limit, MemoryLimit
from autoaccum.memory.oom import room_for_model
from autoaccum.planning.budget import Budget
from autoaccum.planning.cuts import Plan
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.schedules import SMOOTHING, NoiseScale, Progress, Schedule, schedule_of
from autoaccum.reporting import ProgressBar
from autoaccum.runs import configuration
from autoaccum.runs.cost_key import describe
from autoaccum.runs.directory import RunDirectory
from autoaccum.runs.past_of_run import PastOfRun
from autoaccum.training.interrupts import interrupt_calls
from autoaccum.training.lazy import build_lazy_layers
from autoaccum.training.learning_rate import LearningRate, MakeScheduler, Scaling
from autoaccum.training.metrics import Metric, Metrics
from autoaccum.training.pace import Pace
from autoaccum.training.steps import make_step
from autoaccum.training.validation import Validator
from autoaccum.window.job import Job
from autoaccum.window.modules import State, left_out, load_modules, load_optimizer, state_of_modules
from autoaccum.window.optimizers import OptimizerLike, allocate_state, make_optimizer, trainable_parameters
from autoaccum.window.precision import Precision, autocast

Callback = Callable[[Record], None]

DECIDE = ("lr_scaling", "base_batch", "precision", "clip_norm", "seed", "shuffle", "drop_last")
"""Arguments that decide what is trained, besides model, data, optimizer and schedules; others only decide how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """What a run leaves."""

    history: Sequence[StepReport]
    """One report per window; with a ``run_dir`` read from there when it is looked at."""
    events: Sequence[Event]
    """Everything else that happened, in order; likewise."""
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
        memory_limit: MemoryLimit = None,
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
        metrics: Mapping[str, Metric] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | str | None = None,
        keep_checkpoints: int = 2,
        resume: Literal["auto"] | bool = "auto",
        noise_scale: bool = False,
        cache: bool = True,
        callbacks: Iterable[Callback] = (),
        progress: bool = True,
    ) -> None:
        """See ``fit``, which takes the same arguments."""
        given = {name: value for name, value in locals().items() if name not in ("self", "model", "data")}
        self.schedule = schedule_of(effective_batch)
        _checks.of_windows(num_items, max_micro_batch, headroom, clip_norm)
        _checks.non_negative_int("num_workers", num_workers)
        _checks.non_negative_int("seed", seed)
        if lr is not None:
            _checks.number_between("lr", lr, 0)
        loss_of = loss_function(loss_fn, training_step)
        _checks.of_validation(validation_data, validate_every, metrics)
        self._validate_every = validate_every
        _checks.of_run_directory(run_dir, checkpoint_every, keep_checkpoints, resume)
        self._run_dir = None if run_dir is None else Path(run_dir).absolute()  # callbacks may change directory
        self._resume, self._keep_checkpoints = resume, keep_checkpoints
        self._cadence = _checks.cadence("checkpoint_every", "10m" if checkpoint_every is None else checkpoint_every)
        self._directory: RunDirectory | None = None
        self._resumed: Resumed | None = None
        budget = Budget(epochs=epochs, steps=steps, samples=samples)
        plans = _checks.recorded_plans(micro_batch)
        callbacks = _checks.functions("callbacks", callbacks)
        modules = [m for m in (model, loss_fn, training_step) if isinstance(m, nn.Module)]
        of_metrics = [m for m in (metrics or {}).values() if isinstance(m, nn.Module)]
        parameters = trainable_parameters(model, modules)

        self.device = find_device(device)
        self.memory = memory_of(self.device)
        limit = Limit(self.memory, memory_limit)
        self.limit_bytes = limit.bytes
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
        epoch_samples = self._source.num_samples
        if hasattr(data, "__next__") and (epochs or 1) > 1:
            raise ArgumentError("epochs", epochs, "1 for an iterator, which can be read only once", "Pass a Dataset.")
        self.num_steps, self.num_samples = budget.totals(epoch_samples, self.schedule, drop_last)

        torch.manual_seed(seed)
        randomness.seed_host(seed)
        self.model = model
        if not model.training:  # a model in training mode may hold layers that were frozen in eval mode on purpose
            model.train()
        with room_for_model(self.memory, self.limit_bytes, parameters):
            for module in (*modules, *of_metrics):
                module.to(self.device)
            build_lazy_layers(model, modules, self._source, loss_of, autocast(precision, self.device), self.device)
            self.optimizer = make_optimizer(optimizer, lr, parameters)
            self._learning_rate = LearningRate(
                self.optimizer,
                lr_scheduler,
                num_steps=self.num_steps,
                most_samples=budget.most_samples(epoch_samples),
                lr_scaling=lr_scaling,
                base_batch=base_batch,
                first_batch=self.schedule.at(Progress()),
            )
            allocate_state(self.optimizer, modules)

        self._noise = None
        if noise_scale or isinstance(self.schedule, NoiseScale):
            self._noise = Smoothed(smoothing=getattr(self.schedule, "smoothing", SMOOTHING))
        fixed = micro_batch if isinstance(micro_batch, int) else max((max(plan) for plan in plans), default=None)
        step_model: Any = torch.compile(model) if compile else model
        self._modules = modules
        job = Job(
            model=step_model,
            modules=tuple(modules),
            optimizer=self.optimizer,
            loss_of=loss_of,
            num_items=num_items,
            device=self.device,
            precision=precision,
        )
        self._engine = make_step(
            job,
            micro_batch=fixed,
            max_micro_batch=max_micro_batch,
            full_window=min((n for n in (self.schedule.largest, epoch_samples) if n is not None), default=None),
            memory=self.memory,
            limit=limit,
            headroom=headroom,
            clip_norm=clip_norm,
            noise_scale=self._noise is not None,
            emit=self._emit,
        )
        self._tuner = self._engine.tuner
        if isinstance(self.schedule, NoiseScale) and self.schedule.min < 2 * self._tuner.smallest:
            cure = "A noise scale is estimated from two micro-batches, and BatchNorm has no statistics of one sample."
            raise ArgumentError("effective_batch", str(self.schedule), "a min of at least 4", cure)
        self._cache = None
        if cache and self._tuner.searching:
            self._cache = PastOfRun(
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
            of: Any = "loss_fn" if loss_fn is not None else "training_step" if training_step is not None else "model"
            self._validator = Validator(
                step_model,
                [*modules, *of_metrics],
                source,
                loss_of=loss_of,
                of_outputs=loss_fn is not None,
                num_items=num_items,
                autocast=job.autocast,
                device=self.device,
                memory=self.memory,
                limits=self._tuner.limits,
                is_enforced=limit.is_enforced,
                emit=self._emit,
                metrics=Metrics(metrics, step_model, of=of, autocast=job.autocast) if metrics else None,
            )
            if metrics:
                self._validator.try_metrics(Metrics(metrics, model, of=of, autocast=job.autocast))

        self._given = given | {"metrics": ", ".join(metrics or ()) or None}
        self._history: list[Any] = []  # empty where there is a run_dir
        self._events: list[Any] = []
        self._pace = Pace(
            self.schedule,
            budget,
            num_samples=epoch_samples,
            drop_last=drop_last,
            plans=plans,
            step=self._engine,
        )
        self._best_loss, self._is_best = math.inf, False
        self._validation_loss: float | None = None
        self._bar = ProgressBar() if progress else None
        self._callbacks: list[Callback] = [*([self._bar] if self._bar else []), *callbacks]
        self._stop_reason: str | None = None
        self._validated = 0  # the step after which it was done last
        self._mark = 0.0

    @property
    def history(self) -> Sequence[StepReport]:
        """One report per window so far."""
        return tuple(self._history) if self._directory is None else self._directory.history

    @property
    def events(self) -> Sequence[Event]:
        """Everything else that happened so far."""
        return tuple(self._events) if self._directory is None else self._directory.events

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._engine.number

    @property
    def samples_seen(self) -> int:
        """Samples trained on."""
        return self._pace.samples_seen

    @torch.enable_grad()
    def fit(self) -> FitResult:
        """Train to the end of the budget, or until a callback or a signal ends the run after a window."""
        try:
            if self._run_dir is not None:
                self._directory = self._open(self._run_dir)
            return self._fit()
        except BaseException as error:
            if self._directory is not None:  # else nothing on the disk would tell it from a run that goes on
                self._directory.record(Finished(step=self.step, reason=type(error).__name__))
            raise
        finally:
            if self._cache is not None:
                self._cache.keep(self._tuner)
            if self._bar is not None:
                self._bar.close()
            if self._directory is not None:
                self._directory.close()

    def _fit(self) -> FitResult:
        if self._start():
            self._run()
        self._emit(Finished(step=self.step, reason=self._stop_reason or ""))
        return FitResult(
            history=self.history,
            events=self.events,
            plan=Plan(ranks=(self._tuner.plan(*self._tuner.full_window),)),
            num_steps=self.step,
            num_samples=self.samples_seen,
            model=self.model,
            optimizer=self.optimizer,
        )

    def _run(self) -> None:
        with interrupt_calls(lambda: self._end("interrupted"), clusters=self._directory is not None):
            self._validate_if_due()  # which the end of an earlier process may have kept it from
            while self._stop_reason is None:
                reader = self._source.read(self._pace.epoch, self._pace.sizes_ahead(), self._pace.windows)
                while self._stop_reason is None:
                    if (found := self._pace.next_window(reader)) is None:
                        self._end_epoch()
                        break
                    self._train(*found)
            self._validate(self._pace.epoch)  # unless that was done at the epoch's end
            self._save(is_last=True)
        if self._stop_reason == "budget" and self.num_steps not in (None, self.step):
            self._engine.announcer.say(
                Notice(
                    cause=f"The run took {self.step} steps instead of the {self.num_steps} that were foreseen",
                    consequence="A learning rate scheduler was told of too many or too few",
                    cure="Let the function passed as effective_batch depend on nothing but its Progress",
                )
            )

    def _start(self) -> bool:
        """Say so; whether there is anything to do."""
        self._mark = clock.now()
        is_spent = self._resumed is not None and self._pace.is_spent
        is_finished = is_spent and (self._validator is None or self._validated == self.step)
        if self._directory is not None and not (is_finished and self._directory.is_finished()):
            self._directory.begin()
        self._emit(
            Started(
                num_steps=self.num_steps,
                num_samples=self.num_samples,
                device=str(self.device),
                limit_bytes=self.limit_bytes,
                used_bytes=self.memory.used(),
            )
        )
        if self._resumed is not None:
            self._emit(self._resumed)
        if self._directory is not None and self._directory.passed_over is not None:
            self._engine.announcer.say(self._directory.passed_over)
        if is_spent:
            self._end("budget")
        if is_finished:
            self._engine.announcer.say(
                Notice(
                    cause=f"The run in {self._run_dir} is finished: it has taken its {self.step} steps",
                    consequence="Nothing is trained",
                    cure="Allow a larger budget to go on, or choose another run_dir to begin anew",
                )
            )
            return False
        if self._directory is not None and (died := self._directory.window_mark.died_of_memory) is not None:
            self._engine.killed(*died, self._pace.asked())
        if not self._tuner.searching:
            self._engine.announce_plan(self._pace.asked())
        return True

    def _end_epoch(self) -> None:
        self._pace.end_epoch()
        if self._pace.is_spent:
            self._end("budget")
        if self._validate_every is None or self._stop_reason is not None:
            self._validate(self._pace.epoch - 1)
        self._save(epoch_ended=True)

    def _train(self, window: Window, asked: int) -> None:
        """One window: its gradient, the optimizer's step, the report."""
        if self.step == 0 and self._cache is not None:
            self._cache.recall(window, self._tuner, self.memory.used())
        plan = self._pace.recorded_plan()
        if plan is not None and sum(plan) != window.num_samples:
            raise ArgumentError(
                "micro_batch", plan, f"sizes that sum to {window.num_samples} in window {self.step + 1}"
            )
        is_full = window.lengths is None or window.num_samples == asked  # samples that are alike need not be there
        if is_full and asked != self._tuner.full_window[0]:
            self._engine.resize(asked, window.lengths)
        if self._directory is not None:
            largest = max(plan) if plan else self._tuner.plan(window.num_samples, window.lengths)[0]
            self._directory.window_mark.enter(largest, window.lengths[0] if window.lengths else 1)
        gradient, replays = self._engine.run(window, plan)
        num_samples = sum(gradient.sizes)
        self._pace.passed(num_samples)
        lr = self._learning_rate.now(asked)
        with self._learning_rate.scaled(asked):
            stepped = self._engine.apply(gradient)
        self._learning_rate.advance(self.samples_seen, stepped)
        if is_full:
            self._engine.settle(asked, window.lengths)
        noise = gradient.noise
        if noise is not None and self._noise is not None:
            self._noise.observe(noise)
        now = clock.now()
        report = StepReport(
            step=self.step,
            epoch=self._pace.epoch,
            num_samples=self.samples_seen,
            effective_batch=num_samples,
            micro_batches=gradient.sizes,
            loss=gradient.loss.item(),
            lr=lr,
            grad_norm=None if gradient.grad_norm is None else gradient.grad_norm.item(),
            seconds=now - self._mark,
            peak_bytes=self._engine.meter.peak_bytes,
            limit_bytes=self._engine.limit.bytes,
            replays=replays,
            noise_scale=None if noise is None or self._noise is None else self._noise.scale,
            gradient_squared=None if noise is None else noise.gradient_squared,
            gradient_variance=None if noise is None else noise.gradient_variance,
        )
        self._mark = now
        self._pace.reports.append(report)
        if self._directory is not None:
            self._directory.window_mark.leave()
        if stepped:
            self._engine.announce_if_not_finite(report.loss)
        if self._noise is not None and window.num_samples == asked and len(gradient.sizes) == 1:
            self._announce_no_noise()
        lengths = window.lengths
        if noise is not None and lengths is not None and lengths[0] != lengths[-1]:
            self._announce_sorted()
        self._emit(report)
        if self._pace.is_spent:
            self._end("budget")
        self._validate_if_due()
        self._save()

    def _validate_if_due(self) -> None:
        """After a window that passed another ``validate_every`` samples."""
        every, seen, windows = self._validate_every, self.samples_seen, self._pace.windows
        if every is not None and windows and seen // every > (seen - windows[-1]) // every:
            self._validate(self._pace.epoch)

    def _validate(self, epoch: int) -> None:
        """After an epoch, so many samples, or the run; not after one that was broken off."""
        if self._validator is not None and self._stop_reason in (None, "budget") and self._validated != self.step:
            self._validated = self.step
            self._validation_loss = self._validator.run(self.step, epoch, self._tuner.micro_batch)
            if self._validation_loss < self._best_loss:
                self._best_loss, self._is_best = self._validation_loss, True
            self._mark = clock.now()

    # What outlives the process.

    def _configuration(self) -> dict[str, Any]:
        """What was asked for; under "trained" what a run that goes on has to have in common with this one."""
        trained = {
            "model": configuration.describe_model(self.model),
            "loss": configuration.describe_model(self._modules[-1]) if self._modules[-1] is not self.model else None,
            "data": self._source.description(),
            "effective_batch": str(self.schedule),
            "optimizer": configuration.describe_optimizer(self.optimizer),
            "steps of the lr_scheduler": self._learning_rate.num_steps,
            **{name: self._given[name] for name in DECIDE},
        }
        return {"model": type(self.model).__name__, **configuration.plain(self._given), "trained": trained}

    def _open(self, path: Path) -> RunDirectory:
        """The run's directory; what an earlier process left there of this run is taken up."""
        keep, anew = self._keep_checkpoints, self._resume is False
        directory = RunDirectory(
            path,
            keep=keep,
            cadence=self._cadence,
            config=self._configuration(),
            anew=anew,
            background=self.device.type != "cpu",  # there the copy is in the memory that windows are planned for
        )
        self._engine.meter.before_trial = directory.window_mark.enter
        try:
            found = directory.resume()
            if found is not None:
                checkpoint, weights, state = found
                try:
                    self.load_state_dict(weights, state)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    problem = f"is of another version, or was made by hand ({error!r})"
                    raise CheckpointCorruptError(checkpoint.path, problem) from error
                self._resumed = Resumed(step=self.step, num_samples=self.samples_seen, checkpoint=checkpoint.path.name)
            elif self._resume is True:
                cure = "Pass resume='auto' to begin where there is nothing to go on from."
                raise ArgumentError("resume", True, f"a checkpoint in {path}", cure)
        except BaseException:
            directory.close()
            raise
        return directory

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else) after a window: all that a checkpoint holds of the run.

        What follows from the arguments is not in it, for a run is resumed by the same call; nor is what only makes it
        fast: a comparison of plans that goes on begins anew, and so does the calm that growth waits for.
        """
        others = [module for module in self._modules if module is not self.model]
        return self.model.state_dict(), {
            "buffers": left_out(self.model),
            "modules": state_of_modules(others),
            "optimizer": self.optimizer.state_dict(),
            "learning_rate": self._learning_rate.state_dict(),
            "engine": self._engine.state_dict(),
            "validator": None if self._validator is None else self._validator.state_dict(),
            "noise": None if self._noise is None else self._noise.state_dict(),
            **self._pace.state_dict(),
            "_validated": self._validated,
            "_validation_loss": self._validation_loss,
            "_best_loss": self._best_loss,
            "device": describe(self.device),
            "randomness": randomness.state_dict(self.device),
        }

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned, into a trainer that was made with the same arguments."""
        others = [module for module in self._modules if module is not self.model]
        of_all = [{"state": weights, "buffers": state["buffers"]}, *state["modules"]]
        load_modules([self.model, *others], of_all, self.device)
        load_optimizer(self.optimizer, state["optimizer"])
        self._learning_rate.load_state_dict(state["learning_rate"])
        is_same_device = state["device"] == describe(self.device)
        self._engine.load_state_dict(state["engine"], is_same_device=is_same_device)
        if self._validator is not None and state["validator"] is not None and is_same_device:
            self._validator.load_state_dict(state["validator"])
        if self._noise is not None and state["noise"] is not None:
            self._noise.load_state_dict(state["noise"])
        self._pace.load_state_dict(state)
        self._validated, self._best_loss = state["_validated"], state["_best_loss"]
        self._validation_loss = state["_validation_loss"]
        randomness.load_state_dict(state["randomness"], self.device)

    def _save(self, *, epoch_ended: bool = False, is_last: bool = False) -> None:
        """A checkpoint, where one is due; the last one waits until it is on the disk."""
        directory = self._directory
        if directory is None:
            return
        if is_last or directory.is_due(self.step, epoch_ended=epoch_ended) or self._is_best:
            started = clock.now()
            loss = self._pace.reports[-1].loss if self._pace.reports else None
            facts = {"num_samples": self.samples_seen, "loss": loss, "validation_loss": self._validation_loss}
            # Of the step's own validation, for one that is replaced at the same step is still the best.
            is_best = self._validated == self.step and self._validation_loss == self._best_loss
            path = directory.save(self.step, *self.state_dict(), facts, is_best=is_best)
            self._is_best = False
            if is_last:
                directory.wait()
            seconds = clock.now() - started
            self._emit(Saved(step=self.step, path=str(path), seconds=seconds))
            self._mark += seconds

    def _announce_no_noise(self) -> None:
        self._engine.announcer.say_once(
            Notice(
                cause=f"Window {self.step} was one micro-batch, and it takes two to estimate the noise scale",
                consequence="Until windows are cut, noise_scale is None, and an effective batch that follows it stays "
                "as it is",
                cure=f"Leave micro_batch out, or pass at most half of an effective batch of {2 * self._tuner.smallest} "
                "samples or more",
            )
        )

    def _announce_sorted(self) -> None:
        self._engine.announcer.say_once(
            Notice(
                cause="Windows are sorted by length, so their micro-batches are no random parts of them",
                consequence="What long and short samples differ in counts as noise, and the noise scale may come out "
                "several times too large",
                cure="Pad all samples to one length where the noise scale matters",
            )
        )

    def _emit(self, record: Record) -> None:
        if self._directory is not None:
            self._directory.record(record)
        else:
            (self._history if isinstance(record, StepReport) else self._events).append(record)
        for callback in self._callbacks:
            try:
                callback(record)
            except StopTraining:
                self._end("stopped")

    def _end(self, reason: str) -> None:
        """End the run after the window; the first reason stands."""
        self._stop_reason = self._stop_reason or reason
