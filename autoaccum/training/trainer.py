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

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, CheckpointCorruptError, StopTraining
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
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.budget import Budget
from autoaccum.planning.plans import Plan
from autoaccum.planning.schedules import Progress, Schedule, schedule_of
from autoaccum.reporting import ProgressBar
from autoaccum.runs import configuration
from autoaccum.runs.cost_key import describe
from autoaccum.runs.directory import RunDirectory
from autoaccum.training import setup
from autoaccum.training.declarations import values_of
from autoaccum.training.interrupts import interrupt_calls
from autoaccum.training.learning_rate import MakeScheduler, Scaling
from autoaccum.training.metrics import Metric
from autoaccum.training.options import OF_FIT, Callback, FitArguments
from autoaccum.training.pace import Pace
from autoaccum.window.modules import State, left_out, load_modules, load_optimizer, state_of_modules
from autoaccum.window.optimizers import OptimizerLike, trainable_parameters
from autoaccum.window.precision import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """All that a run leaves to whoever called it."""

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

    # Its parameters, and those passed on, are written by tests/write_signatures.py.
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
        """Set up a run, up to its first window; ``fit`` says what the arguments are."""
        given = FitArguments(
            model=model, data=data, effective_batch=effective_batch, loss_fn=loss_fn, training_step=training_step,
            num_items=num_items, optimizer=optimizer, lr=lr, lr_scheduler=lr_scheduler, lr_scaling=lr_scaling,
            base_batch=base_batch, epochs=epochs, steps=steps, samples=samples, micro_batch=micro_batch,
            max_micro_batch=max_micro_batch, memory_limit=memory_limit, headroom=headroom, precision=precision,
            clip_norm=clip_norm, compile=compile, device=device, seed=seed, shuffle=shuffle, drop_last=drop_last,
            collate_fn=collate_fn, num_workers=num_workers, validation_data=validation_data,
            validate_every=validate_every, metrics=metrics, run_dir=run_dir, checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints, resume=resume, noise_scale=noise_scale, cache=cache, callbacks=callbacks,
            progress=progress,
        )  # fmt: skip
        self._set_up(given)

    def _set_up(self, arguments: FitArguments) -> None:
        """Check the arguments and make the parts of the run, in the order that the parts need.

        What a user can have got wrong is said before the first side effect, as far as the arguments alone show it.
        """
        checked = arguments.check()
        self._arguments = arguments
        self.schedule = checked[schedule_of]
        # Looked up now, for callbacks may change directory.
        self._run_dir = None if arguments.run_dir is None else Path(arguments.run_dir).absolute()
        self._cadence = checked[_checks.of_checkpoint_every]
        self._directory: RunDirectory | None = None
        self._resumed: Resumed | None = None
        budget, loss_of = checked[Budget], checked[loss_function]
        self.model = arguments.model
        self._modules = arguments.modules()
        parameters = trainable_parameters(self.model, self._modules)

        place = setup.place_of(arguments.device, arguments.memory_limit)
        self.device, self.memory, self.limit_bytes = place.device, place.memory, place.limit.bytes
        self._source = setup.open_data(arguments, place)
        epoch_samples = self._source.num_samples
        self.num_steps, self.num_samples = budget.totals(epoch_samples, self.schedule, arguments.drop_last)

        setup.seed_all(arguments)
        self.optimizer, self._learning_rate = setup.build(
            arguments, checked, place, self._source, parameters, self.num_steps
        )
        self._noise = setup.noise_of(arguments, self.schedule)
        step_model: Any = torch.compile(self.model) if arguments.compile else self.model
        self._step = setup.step_of(
            arguments,
            checked,
            place,
            step_model,
            self.optimizer,
            epoch_samples,
            self._emit,
            noise_scale=self._noise is not None,
        )
        self._tuner = self._step.tuner
        self._cache = setup.cache_of(arguments, place, self.optimizer, self._tuner)
        self._validator = setup.validator_of(arguments, loss_of, place, step_model, self._step, self._emit)

        # What changes in the course of the run.
        self._history: list[Any] = []  # empty where there is a run_dir
        self._events: list[Any] = []
        self._pace = Pace(
            self.schedule,
            budget,
            num_samples=epoch_samples,
            drop_last=arguments.drop_last,
            plans=checked[_checks.recorded_plans],
            step=self._step,
        )
        self._best_loss, self._is_best = math.inf, False  # of validations; is the newest the best, and not yet saved?
        self._validation_loss: float | None = None
        self._bar = ProgressBar() if arguments.progress else None
        self._callbacks: list[Callback] = [*([self._bar] if self._bar else []), *checked[_checks.of_callbacks]]
        self._stop_reason: str | None = None  # set once the run is to end after its window
        self._validated = 0  # the step after which it was done last
        self._mark = 0.0  # when the window began, so that reports leave out validations and checkpoints

    @property
    def history(self) -> Sequence[StepReport]:
        """Return one report per window so far."""
        return tuple(self._history) if self._directory is None else self._directory.history

    @property
    def events(self) -> Sequence[Event]:
        """Return everything else that happened so far."""
        return tuple(self._events) if self._directory is None else self._directory.events

    @property
    def step(self) -> int:
        """Return the optimizer steps taken."""
        return self._step.number

    @property
    def samples_seen(self) -> int:
        """Return the samples trained on."""
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
            # What was measured is true of a run that failed too, and spares the next one the same search.
            if self._cache is not None:
                self._cache.keep(self._tuner)
            if self._bar is not None:
                self._bar.close()
            if self._directory is not None:
                self._directory.close()

    def _fit(self) -> FitResult:
        """Train, unless there is nothing left to do, and return what the run leaves."""
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
        """Run one epoch's windows after the other, until the budget, a callback or a signal ends the run."""
        # What clusters send before they kill ends a run only where it can go on from a checkpoint.
        with interrupt_calls(lambda: self._end("interrupted"), clusters=self._directory is not None):
            self._validate_if_due()  # which the end of an earlier process may have kept it from
            while self._stop_reason is None:
                # After a resume the epoch begins behind the windows that an earlier process has had of it.
                reader = self._source.read(self._pace.epoch, self._pace.sizes_ahead(), self._pace.windows)
                while self._stop_reason is None:
                    if (found := self._pace.next_window(reader)) is None:
                        self._end_epoch()
                        break
                    self._train(*found)
            self._validate(self._pace.epoch)  # unless that was done at the epoch's end
            self._save(is_last=True)
        if self._stop_reason == "budget" and self.num_steps not in (None, self.step):
            self._step.announcer.say(
                Notice(
                    cause=f"The run took {self.step} steps instead of the {self.num_steps} that were foreseen",
                    consequence="A learning rate scheduler was told of too many or too few",
                    cure="Let the function passed as effective_batch depend on nothing but its Progress",
                )
            )

    def _start(self) -> bool:
        """Announce the start; return False if the run is already finished."""
        self._mark = clock.now()
        # A resumed run may have had its budget but not its last validation, which is then made up for.
        is_spent = self._resumed is not None and self._pace.is_spent
        is_finished = is_spent and (self._validator is None or self._validated == self.step)
        # A finished run's records stay as they are, so that the same call may be made any number of times.
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
            self._step.announcer.say(self._directory.passed_over)
        if is_spent:
            self._end("budget")
        if is_finished:
            self._step.announcer.say(
                Notice(
                    cause=f"The run in {self._run_dir} is finished: it has taken its {self.step} steps",
                    consequence="Nothing is trained",
                    cure="Allow a larger budget to go on, or choose another run_dir to begin anew",
                )
            )
            return False
        # The kernel left no error to learn from: the mark of the window is all there is of it.
        if self._directory is not None and (died := self._directory.window_mark.died_of_memory) is not None:
            self._step.killed(*died, self._pace.asked())
        # A search ends with a plan that is announced then.
        if not self._tuner.searching:
            self._step.announce_plan(self._pace.asked())
        return True

    def _end_epoch(self) -> None:
        """Go on to the next pass over the data, after a validation and a checkpoint where these are due."""
        self._pace.end_epoch()
        if self._pace.is_spent:
            self._end("budget")
        # With validate_every an epoch's end is no occasion, but the run's end always is one.
        if self._arguments.validate_every is None or self._stop_reason is not None:
            self._validate(self._pace.epoch - 1)
        self._save(epoch_ended=True)

    def _train(self, window: Window, asked: int) -> None:
        """Run one window: its gradient, the optimizer's step, the report."""
        # Not sooner, for past runs are known by the shapes of their data, and these by the first window.
        if self.step == 0 and self._cache is not None:
            self._cache.recall(window, self._tuner, self.memory.used())
        plan = self._pace.recorded_plan()
        if plan is not None and sum(plan) != window.num_samples:
            raise ArgumentError(
                "micro_batch", plan, f"sizes that sum to {window.num_samples} in window {self.step + 1}"
            )
        is_full = window.lengths is None or window.num_samples == asked  # samples that are alike need not be there
        if is_full and asked != self._tuner.full_window[0]:
            self._step.resize(asked, window.lengths)
        # Written where it outlives a process that the kernel kills: what was tried, and that it was not survived.
        if self._directory is not None:
            largest = max(plan) if plan else self._tuner.plan(window.num_samples, window.lengths)[0]
            self._directory.window_mark.enter(largest, window.lengths[0] if window.lengths else 1)
        gradient, replays = self._step.run(window, plan)
        num_samples = sum(gradient.sizes)
        self._pace.passed(num_samples)
        lr = self._learning_rate.now(asked)  # that of this step, before the scheduler goes on
        with self._learning_rate.scaled(asked):
            stepped = self._step.apply(gradient)
        self._learning_rate.advance(self.samples_seen, stepped)
        if is_full:
            self._step.settle(asked, window.lengths)
        noise = gradient.noise
        if noise is not None and self._noise is not None:
            self._noise.observe(noise)
        now = clock.now()
        # Reading the loss waits for the device, which the optimizer's step has been given to by now.
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
            peak_bytes=self._step.meter.peak_bytes,
            limit_bytes=self._step.limit.bytes,
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
            self._step.announce_if_not_finite(report.loss)
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
        """Validate after a window that passed another ``validate_every`` samples."""
        every, seen, windows = self._arguments.validate_every, self.samples_seen, self._pace.windows
        if every is not None and windows and seen // every > (seen - windows[-1]) // every:
            self._validate(self._pace.epoch)

    def _validate(self, epoch: int) -> None:
        """Validate, unless it was done after this step, or the run was broken off."""
        if self._validator is not None and self._stop_reason in (None, "budget") and self._validated != self.step:
            self._validated = self.step
            self._validation_loss = self._validator.run(self.step, epoch, self._tuner.micro_batch)
            if self._validation_loss < self._best_loss:
                self._best_loss, self._is_best = self._validation_loss, True
            self._mark = clock.now()  # its seconds are reported by the validation itself

    # What outlives the process.

    def _configuration(self) -> dict[str, Any]:
        """Return what was asked for; under "trained" what a run that goes on has to have in common with this one."""
        given = {name: value for name, value in values_of(self._arguments).items() if name not in ("model", "data")}
        given["metrics"] = ", ".join(self._arguments.metrics or ()) or None
        trained = {
            "model": configuration.describe_model(self.model),
            "loss": configuration.describe_model(self._modules[-1]) if self._modules[-1] is not self.model else None,
            "data": self._source.description(),
            "effective_batch": str(self.schedule),
            "optimizer": configuration.describe_optimizer(self.optimizer),
            "steps of the lr_scheduler": self._learning_rate.num_steps,
            **{name: given[name] for name, argument in OF_FIT.items() if argument.decides == "training"},
        }
        return {"model": type(self.model).__name__, **configuration.plain(given), "trained": trained}

    def _open(self, path: Path) -> RunDirectory:
        """Return the run's directory, having taken up what an earlier process left there of this run."""
        keep, anew = self._arguments.keep_checkpoints, self._arguments.resume is False
        directory = RunDirectory(
            path,
            keep=keep,
            cadence=self._cadence,
            config=self._configuration(),
            anew=anew,
            background=self.device.type != "cpu",  # there the copy is in the memory that windows are planned for
        )
        # The mark says which size was being tried, for larger ones are tried within a window.
        self._step.meter.before_trial = directory.window_mark.enter
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
            elif self._arguments.resume is True:
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
            "engine": self._step.state_dict(),
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
        self._step.load_state_dict(state["engine"], is_same_device=is_same_device)
        if self._validator is not None and state["validator"] is not None and is_same_device:
            self._validator.load_state_dict(state["validator"])
        if self._noise is not None and state["noise"] is not None:
            self._noise.load_state_dict(state["noise"])
        self._pace.load_state_dict(state)
        self._validated, self._best_loss = state["_validated"], state["_best_loss"]
        self._validation_loss = state["_validation_loss"]
        randomness.load_state_dict(state["randomness"], self.device)

    def _save(self, *, epoch_ended: bool = False, is_last: bool = False) -> None:
        """Write a checkpoint, where one is due; the last one waits until it is on the disk."""
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
            self._mark += seconds  # the next report leaves it out

    def _announce_no_noise(self) -> None:
        """Announce, once, that windows are not cut and so show no noise."""
        self._step.announcer.say_once(
            Notice(
                cause=f"Window {self.step} was one micro-batch, and it takes two to estimate the noise scale",
                consequence="Until windows are cut, noise_scale is None, and an effective batch that follows it stays "
                "as it is",
                cure=f"Leave micro_batch out, or pass at most half of an effective batch of {2 * self._tuner.smallest} "
                "samples or more",
            )
        )

    def _announce_sorted(self) -> None:
        """Announce, once, that the noise scale is off where micro-batches differ in length."""
        self._step.announcer.say_once(
            Notice(
                cause="Windows are sorted by length, so their micro-batches are no random parts of them",
                consequence="What long and short samples differ in counts as noise, and the noise scale may come out "
                "several times too large",
                cure="Pad all samples to one length where the noise scale matters",
            )
        )

    def _emit(self, record: Record) -> None:
        """Keep a record, then tell every callback of it, those after one that ends the run too."""
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
