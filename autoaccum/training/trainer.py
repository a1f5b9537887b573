"""``Trainer``: trains at an exact effective batch, in whatever memory there is. The loop is ``Trainer.fit``."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoaccum import _checks
from autoaccum.data.base import Window
from autoaccum.data.splits import split_of
from autoaccum.distributed.fsdp import units_of
from autoaccum.distributed.group import Group, join
from autoaccum.distributed.launcher import is_launched, own_device
from autoaccum.distributed.shards import Share
from autoaccum.errors import ArgumentError, StopTraining
from autoaccum.events import Event, Finished, Record, Resumed, Saved, Started, StepReport
from autoaccum.memory import clock
from autoaccum.memory.devices import being_current, current_device_kept
from autoaccum.memory.oom import named
from autoaccum.planning.budget import Budget
from autoaccum.planning.noise import Smoothed, is_due, worth
from autoaccum.planning.plans import Plan
from autoaccum.planning.schedules import schedule_of
from autoaccum.reporting.following import heard, tell_failure
from autoaccum.reporting.progress import ProgressBar, Teller, teller_of
from autoaccum.runs.checkpoint import Checkpoint
from autoaccum.runs.directory import RunDirectory
from autoaccum.runs.writers import Writers
from autoaccum.step.across_ranks import SharedTransaction
from autoaccum.step.gradient import Gradient, read_end
from autoaccum.step.module_state import State, smallest_micro_batch
from autoaccum.step.optimizers import give_types_back, trainable_parameters
from autoaccum.step.step import Step
from autoaccum.training import best_validation, notices, optimizer_attributes, rank_sync, saving, setup
from autoaccum.training.declarations import Checked, taking_method
from autoaccum.training.hooks import Hooks
from autoaccum.training.optimizer_attributes import OptimizerAttributes
from autoaccum.training.options import Callback, FitArguments
from autoaccum.training.rank_sync import Followed, Sharing
from autoaccum.training.result import FitResult as FitResult
from autoaccum.training.result import cut_last
from autoaccum.training.run_position import Pace
from autoaccum.training.saving import RunState, problem_of
from autoaccum.training.single_process import holding
from autoaccum.training.synonyms import answering, refuse_ended_worker
from autoaccum.training.validation import Validator, ValidatorOfAll, of_validation_data

CLUSTERS = [number for name in ("SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None]
"""What schedulers of clusters send some time before they kill."""


@contextmanager
def interrupt_calls(
    function: Callable[[], None], teller: Teller | None = None, *, clusters: bool = False
) -> Iterator[None]:
    """Call ``function``, within it, at the first Ctrl-C; a second one does what it did before: it stops at once.

    Where there is a ``teller``, it says at once that the signal was heard: a window may take minutes.

    With ``clusters`` the signals that clusters send call it too, however often they come.

    Outside of the main thread, which alone receives signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Looked up, for whoever calls may have handlers of its own: they are put back, and a second Ctrl-C goes to them.
    caught = [signal.SIGINT, *(CLUSTERS if clusters else [])]
    before = {number: signal.getsignal(number) for number in caught}

    def interrupt(number: int, frame: Any) -> None:
        # A person who presses twice does not want to wait. What clusters send may come several times, and they give
        # time before they kill.
        if number == signal.SIGINT:
            # A shell has what it starts in the background ignore Ctrl-C. Who sends it all the same means it.
            is_deaf = before[number] in (None, signal.SIG_IGN)
            signal.signal(number, signal.default_int_handler if is_deaf else before[number])
        function()
        if teller is not None:
            teller.ending(may_repeat=number == signal.SIGINT)

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        # A handler that was not installed from Python reads as None, and cannot be put back.
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class MeasuredNoise:
    """Has windows of a run measured, and tells what they come to."""

    def __init__(self, smoothed: Smoothed, step: Step, *, is_shared: bool) -> None:
        """Set up.

        Args:
            smoothed: the averages, which are the run's state.
            step: what runs the windows.
            is_shared: whether several ranks run a share of each, so that none is one micro-batch.
        """
        self.smoothed = smoothed
        """Moving averages of the estimates."""
        self._step, self._is_shared = step, is_shared
        self._number = 0  # windows before the one that runs
        self._is_wanted = False  # whether that one is to be measured, and its plan nobody else's to choose

    def begin(self, window: Window, plan: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Say whether the next window is to be measured; return its plan, which is to cut it for that.

        All of this follows from its number and its plan. So a run that repeats the plans of another one measures the
        same windows, whatever has been searched or timed there.
        """
        self._number, tuner = self._step.number, self._step.tuner
        self._step.transaction.measures_parts = measured = is_due(self._number, self.smoothed.most_apart)
        # A recorded plan is left as it is, and so is a size that is tried or timed: soon there is one that is settled.
        self._is_wanted = measured and plan is None and not (tuner.searching or tuner.is_timing)
        if not self._is_wanted or self._is_shared:
            return plan
        return tuner.in_two(window.num_samples, window.lengths)

    def report(self, gradient: Gradient) -> dict[str, Any]:
        """Take what a window tells; return the fields of its report."""
        noise = gradient.noise
        if noise is None:  # it was not measured, or in one piece: the averages stand as they are
            return {"noise_scale": self.smoothed.scale}
        self.smoothed.observe(noise, worth(self._number, self.smoothed.most_apart))
        return {
            "noise_scale": self.smoothed.scale,
            "gradient_squared": noise.gradient_squared,
            "gradient_variance": noise.gradient_variance,
        }

    def announce(self, window: Window, gradient: Gradient, *, is_full: bool) -> None:
        """Say what a window shows of how good the estimates are."""
        say_once = self._step.announcer.say_once
        if self._is_wanted and is_full and len(gradient.sizes) == 1:
            say_once(notices.no_noise(self._step.number, self._step.tuner.smallest))
        lengths = window.lengths
        if gradient.noise is not None and lengths is not None and lengths[0] != lengths[-1]:
            say_once(notices.NOISE_OF_SORTED)


class Trainer:
    """One training run. ``autoaccum.fit(...)`` is ``Trainer(...).fit()``; keep the object to look at the state.

    Everything that can be checked before training is checked when it is made.
    """

    @answering("Trainer")
    @taking_method(FitArguments)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Set up a run, up to its first window; ``fit`` says what the arguments are."""
        given = FitArguments(*args, **kwargs)
        with current_device_kept(), named("the run was set up"):
            self._set_up(given)

    def _set_up(self, arguments: FitArguments) -> None:
        """Check the arguments and make the parts of the run, in the order that the parts need."""
        # What a user can have got wrong is said before the first side effect, as far as the arguments alone show it.
        checked = arguments.check()
        arguments = self._arguments = notices.heeding(arguments)
        # Looked up now, for callbacks may change directory.
        self._run_dir = None if arguments.run_dir is None else Path(arguments.run_dir).absolute()
        self.schedule = checked[schedule_of]
        self._hooks = Hooks(checked[_checks.of_callbacks], arguments)
        self._validations = best_validation.Validations(judge=self._hooks.judge())
        setup.refuse_sizes(arguments, self.schedule)
        budget = checked[Budget]
        self.model = arguments.model
        trainable_parameters(self.model, arguments.modules(), arguments.optimizer)  # raises where there are none

        is_shared = arguments.ranks == "together" and is_launched()
        own = own_device() if is_shared and arguments.device is None else None
        place = setup.place_of(own or arguments.device, arguments.memory_limit)
        self.device, self.memory, self.limit_bytes = place.device, place.memory, place.limit.bytes
        self._group = join(place.device) if is_shared else None
        self._is_first = self._group is None or self._group.is_first  # who writes and shows for all ranks
        # From here on others wait for this rank: what ends it is told to them.
        try:
            if self._group is not None:
                rank_sync.refuse(arguments)
            with place.limit.kept():
                self._make(arguments, checked, place, budget)
        except BaseException as error:
            if self._group is not None:
                self._group.fail(error)
            raise
        others = [module for module in arguments.modules() if module is not self.model]
        self._state = RunState(
            model=self.model,
            others=others,
            optimizer=self.optimizer,
            optimizer_attributes=OptimizerAttributes(self.optimizer, [self.model, *others]),
            learning_rate=self._learning_rate,
            step=self._step,
            validator=self._validator,
            validations=self._validations,
            noise=None if self._noise is None else self._noise.smoothed,
            pace=self._pace,
            source=self._source,
            device=self.device,
            callbacks=self._hooks,
        )

        # Of this process alone; what a later one goes on from is in the state above.
        self._directory: RunDirectory | None = None  # open while the run trains
        self._writers: Writers | None = None  # who write checkpoints together, where each rank has parts of the model
        self._resumed: Resumed | None = None
        self._is_tried = False  # whether a checkpoint was loaded into copies, or gone on from
        self._goes_on = False  # whether it has: on all ranks, of which the first alone has read it
        self._history: list[Any] = []  # these two are empty where there is a run_dir, which has them in a file
        self._events: list[Any] = []
        self._bar = ProgressBar() if arguments.progress and self._is_first else None
        self._step.within = None if self._bar is None else self._bar.within
        ours = [] if self._bar is None else [self._bar]
        self._callbacks: list[Callback] = [*ours, *heard(checked[_checks.of_callbacks], is_first=self._is_first)]
        self._teller = teller_of(self._callbacks)  # the bar, where there is one
        self._stop_reason: str | None = None  # set once the run is to end after its window
        self._stopped_by = ""
        self._followed = Followed(arguments.modules())
        self._wish: str | None = None  # what it will be once all ranks have heard of it
        # By which it hears of wishes; None where callbacks may have some after a window.
        self._heard_by: SharedTransaction | None = None
        self._told: list[Record] | None = None  # what is to be told on other ranks too, while there is anything
        self._ran: dict[bool, tuple[int, ...]] = {}  # how the last full window was cut, and the last short one
        self._mark = 0.0  # when the window began, so that reports leave out validations and checkpoints

    def _make(self, arguments: FitArguments, checked: Checked, place: setup.Place, budget: Budget) -> None:
        """Make the parts that take memory of the device, or look at the data."""
        self._source = setup.open_data(arguments, place, checked[split_of])
        epoch_samples = self._source.num_samples
        self.num_steps, self.num_samples = budget.totals(epoch_samples, self.schedule, arguments.drop_last)
        plans, drop_last = checked[_checks.recorded_plans], arguments.drop_last
        budget.check_plans(plans, epoch_samples, self.schedule, drop_last)

        setup.seed_all(arguments)
        self.optimizer, self._learning_rate = setup.build(arguments, place, self.num_steps)
        optimizer_attributes.refuse_sharded(self.model, self.optimizer)
        # Windows and validations call this; what is saved and described is the model itself.
        called: Any = torch.compile(self.model) if arguments.compile else self.model
        noise = setup.noise_of(arguments, self.schedule)
        self._step = step = setup.step_of(
            arguments, checked, place, called, self.optimizer, epoch_samples, self._emit,
            noise_scale=noise is not None, group=self._group,
        )  # fmt: skip
        self._tuner = step.tuner
        self._noise = None if noise is None else MeasuredNoise(noise, step, is_shared=self._group is not None)
        # Of fewer samples a rank can compute no loss.
        fewest = max(arguments.min_micro_batch or 1, smallest_micro_batch(arguments.modules()))
        self._sharing = None if self._group is None else Sharing(self._group, arguments.balance, fewest)
        self._cache = setup.cache_of(arguments, place, self.optimizer, self._tuner) if self._is_first else None
        self._validator = setup.validator_of(arguments, checked, place, called, step, self._emit)
        self._pace = Pace(self.schedule, budget, num_samples=epoch_samples, drop_last=drop_last, plans=plans, step=step)

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

    def fit(self) -> FitResult:
        """Train to the end of the budget, or until a callback or a signal ends the run after a window."""
        with torch.enable_grad(), holding("fit"), being_current(self.device):
            try:
                with named("no window was being run"):
                    optimizer_attributes.into_training(self.optimizer)
                    self._open_directory()
                    with self._step.limit.kept():
                        if self._group is not None:
                            begun = self._state, self._arguments, self._source, self.num_steps
                            rank_sync.begin(self._group, *begun)
                            self._goes_on = self._group.from_first(lambda: self._goes_on)
                            self._hear_with_windows(self._group)
                        return self._fit()
            except BaseException as error:
                if self._group is not None:
                    self._group.fail(error)
                if self._directory is not None:  # else nothing on the disk would tell it from a run that goes on
                    self._directory.failed(self.step, error)
                tell_failure(self._callbacks, error)
                refuse_ended_worker(error)
                raise
            finally:
                give_types_back(self.optimizer)  # another may step on what it leaves
                # What was measured is true of a run that failed too, and spares the next one the same search.
                if self._cache is not None:
                    self._cache.keep(self._tuner)
                for one in (self._bar, self._directory):
                    if one is not None:
                        one.close()

    def _open_directory(self) -> None:
        """Open the run's directory, where there is one and this rank writes it, and go on from what is there."""
        has_one = self._run_dir is not None
        # Of a sharded model no rank can write, or put back, what lies on the others.
        if self._group is not None and units_of(self.model):
            self._writers = Writers(self._group) if self._group.exchange(has_one)[0] else None
        if self._run_dir is not None and self._is_first:
            opened = saving.open_directory(self, self._run_dir, self._arguments, self._writers)
            self._directory, self._resumed = opened
            self._goes_on = self._is_tried = self._resumed is not None
            # The mark says which size was being tried, for larger ones are tried within a window.
            self._step.meter.before_trial = self._directory.window_mark.enter
        elif self._writers is not None:
            saving.follow(self, self._writers)

    def _fit(self) -> FitResult:
        """Train, unless there is nothing left to do, and return what the run leaves."""
        if self._start():
            self._run()
        optimizer_attributes.into_evaluation(self.optimizer)
        self._emit(Finished(step=self.step, reason=self._stop_reason or "", stopped_by=self._stopped_by))
        plan = self._last_plan()
        return FitResult(
            history=self.history,
            events=self.events,
            plan=Plan(ranks=(plan,) if self._group is None else tuple(self._group.exchange(plan))),
            num_steps=self.step,
            num_samples=self.samples_seen,
            model=self.model,
            optimizer=self.optimizer,
        )

    def _last_plan(self) -> tuple[int, ...]:
        """Return how this rank ran the last full window; where there was none, how it would."""
        # Of several ranks reports do not tell which sizes were whose.
        reports = self._pace.reports if self._group is None else ()
        ran = cut_last(self._ran, reports, self._pace.effective_batch)
        return self._tuner.plan(*self._tuner.full_window) if ran is None else ran

    def _own_samples(self, num_samples: int) -> int:
        """Return how many samples of a window this rank computes."""
        return num_samples if self._sharing is None else self._sharing.own_samples(num_samples)

    def _run(self) -> None:
        """Run one epoch's windows after the other, until the budget, a callback or a signal ends the run."""
        # What clusters send before they kill ends a run only where it can go on from a checkpoint.
        with interrupt_calls(lambda: self._end("interrupted"), self._teller, clusters=self._directory is not None):
            self._validate_if_due()  # which the end of an earlier process may have kept it from
            if self._goes_on and self._pace.epoch and not self._pace.windows and not self._arguments.validate_every:
                self._validate(self._pace.epoch - 1)
            while self._stop_reason is None:
                # After a resume the epoch begins behind the windows that an earlier process has had of it.
                reader = self._source.read(self._pace.epoch, self._pace.sizes_ahead(), self._pace.windows)
                while self._stop_reason is None:
                    found = self._pace.next_window(reader)
                    if self._group is not None and self._source.num_samples is None:
                        rank_sync.same_window(self._group, None if found is None else found[0])
                    if found is None:
                        self._end_epoch()
                        break
                    self._train(*found)
            self._emit_shares()
            self._validate(self._pace.epoch)  # unless that was done at the epoch's end
            self._save(is_last=True)
        if self._stop_reason == "budget" and self.num_steps not in (None, self.step):
            self._step.announcer.say(notices.other_steps(self.step, self.num_steps))

    def _start(self) -> bool:
        """Announce the start; return False if the run is already finished."""
        self._mark = clock.now()
        # A resumed run may have had its budget but not its last validation, which is then made up for.
        is_spent = self._goes_on and self._pace.is_spent
        is_finished = is_spent and (self._validator is None or self._validations.step == self.step)
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
        for notice in self._hooks.notices if self._resumed is not None else []:
            self._step.announcer.say(notice)
        for notice in notices.of_data(self._arguments):
            self._step.announcer.say_once(notice)
        if is_spent:
            self._end("budget")
        self._agree()  # on that, or on what a callback wished when it heard of the start
        if is_finished or (self._goes_on and self._stop_reason == "stopped"):
            self._step.announcer.say(notices.already_finished(self._run_dir, self.step, self._arguments, is_finished))
            return not is_finished
        # The kernel left no error to learn from: the mark of the window is all there is of it.
        if self._directory is not None and (died := self._directory.window_mark.died_of_memory) is not None:
            self._step.plans.killed(*died, self._pace.asked())
        # A search ends with a plan that is announced then.
        if not self._tuner.searching:
            self._step.plans.announce(max(1, self._own_samples(self._pace.asked())))
        return True

    def _end_epoch(self) -> None:
        """Go on to the next pass over the data, after a validation and a checkpoint where these are due."""
        self._pace.end_epoch()
        self._emit_shares()
        if self._pace.is_spent:
            self._end("budget")
            self._agree()
        # With validate_every an epoch's end is no occasion, but the run's end always is one.
        if self._arguments.validate_every is None or self._stop_reason is not None:
            self._validate(self._pace.epoch - 1)
        self._save(epoch_ended=True)

    def _train(self, window: Window, asked: int) -> None:
        """Run one window: its gradient, the optimizer's step, the report."""
        num_there = window.num_samples
        num_asked, why = asked if self._sharing is None else self._own_samples(asked), ""
        if self._group is not None and self._sharing is not None:
            # A window's random numbers are those of its rank, however many were drawn in windows before.
            rank_sync.seed(self._group, self.device, self._arguments.seed, self.step)
            window = self._sharing.share(window)
            if self._sharing.have_changed(asked):
                why = f"of {asked} samples this rank computes {num_asked} now"
                self._emit_shares()
        # Not sooner, for past runs are known by the shapes of their data, and these by the first window.
        is_first = self._step.number == 0
        if is_first and self._cache is not None:
            self._cache.recall(window, self._tuner, self.memory.used())
        # They are read when an epoch has ended: what a loss_fn cannot be called with is told now.
        if is_first and self._validator is not None:
            self._validator.check_form(window)
        plan = self._pace.recorded_plan() if self._pace.has_plans else None
        if plan is not None and sum(plan) != num_there:
            raise ArgumentError("micro_batch", plan, f"sizes that sum to {num_there} in window {self.step + 1}")
        if plan is not None and isinstance(window, Share):
            plan = window.own_part(plan) or None
        is_full = window.lengths is None or num_there == asked  # samples that are alike need not be there
        if is_full and num_asked and num_asked != self._tuner.full_window[0]:
            self._step.plans.resize(num_asked, window.lengths, reason=why)
        # After that, for it may begin to try sizes again, which are then left as they are.
        if self._noise is not None:
            plan = self._noise.begin(window, plan)
        # Written where it outlives a process that the kernel kills: what was tried, and that it was not survived.
        if self._directory is not None:
            largest = max(plan) if plan else self._tuner.plan(window.num_samples, window.lengths)[0]
            self._directory.window_mark.enter(largest, window.lengths[0] if window.lengths else 1)
        gradient, replays = self._step.run(window, plan)
        if self._sharing is not None:
            self._sharing.saw(self._step.stints)
        self._mark += self._step.examining_seconds  # which are no part of the window
        self._pace.passed(num_samples := sum(gradient.sizes))
        self._ran[num_samples == asked] = gradient.own
        lr = self._learning_rate.now(asked)  # that of this step, before the scheduler goes on
        with self._learning_rate.scaled(asked):
            stepped = self._step.apply(gradient)
        if self._learning_rate.scheduler is not None:
            self._learning_rate.advance(stepped)
        if is_full and num_asked:
            self._step.settle(num_asked, window.lengths)
        noise = {} if self._noise is None else self._noise.report(gradient)
        now = clock.now()
        # Reading the loss waits for the device, which the optimizer's step has been given to by now.
        loss, grad_norm, outputs = read_end(gradient)
        report = StepReport(
            step=self._step.number,
            epoch=self._pace.epoch,
            num_samples=self._pace.samples_seen,
            effective_batch=num_samples,
            micro_batches=gradient.sizes,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            seconds=now - self._mark,
            peak_bytes=self._step.meter.peak_bytes,
            limit_bytes=self._step.limit.bytes,
            replays=replays,
            memory_saving=self._step.saving.name,
            outputs=outputs,
            **noise,
        )
        self._mark = now
        self._pace.reported(report)
        if self._directory is not None:
            self._directory.window_mark.leave()
        if stepped and not math.isfinite(loss):
            self._step.announce_not_finite(loss)
        if self._noise is not None:
            self._noise.announce(window, gradient, is_full=num_there == asked)
        self._emit(report)
        if self._pace.is_spent:
            self._end("budget")
        if self._group is not None:
            self._agree(after_window=True)
        if self._validator is not None:
            self._validate_if_due()
        if self._directory is not None or self._writers is not None:
            self._save()

    def _validate_if_due(self) -> None:
        """Validate after a window that passed another ``validate_every`` samples."""
        if self._pace.has_passed(self._arguments.validate_every):
            self._validate(self._pace.epoch)

    def _validate(self, epoch: int) -> None:
        """Validate, unless it was done after this step, or the run was broken off."""
        was_broken_off = self._stop_reason not in (None, "budget")  # by a signal, say: the process is to end soon
        if self._validator is None or was_broken_off or self._validations.step == self.step:
            return
        save = partial(self._save, is_last=True) if self._group is None else None
        # The optimizer's mode first: a callback may put other weights in place of those that it evaluates.
        with (
            self._validations.at(self.step, save),
            optimizer_attributes.evaluating(self.optimizer),
            self._hooks.validating(self._teller),
        ):
            loss = self._validated(self._validator, epoch)
        self._validations.add(loss)
        self._agree()
        self._mark = clock.now()  # its seconds are reported by the validation itself

    @of_validation_data()
    def _validated(self, validator: Validator, epoch: int) -> float:
        """Return the loss on held-out data, which the first rank alone computes while others wait, if it can."""
        if self._group is None or isinstance(validator, ValidatorOfAll):
            return validator.run(self.step, epoch, self._tuner.micro_batch)
        told: list[Record] = []

        def validate() -> tuple[float, list[Record]]:
            self._told = told
            try:
                return validator.run(self.step, epoch, self._tuner.micro_batch), told
            finally:
                self._told = None

        # The loss is one of the run's, and decides on checkpoints; and its events are told by every rank.
        loss, events = self._group.from_first(validate)
        for event in () if self._group.is_first else events:
            self._emit(event)
        return loss

    # What outlives the process.

    def configuration(self) -> dict[str, Any]:
        """Return what was asked for, as plain values."""
        parts = self.schedule, self._source, self.optimizer, self._learning_rate, self._hooks.judge()
        return saving.configuration_of(self._arguments, *parts)

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else) after a window: all that a checkpoint holds of the run."""
        return self._state.state_dict()

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned, into a trainer that was made with the same arguments."""
        self._state.load_state_dict(weights, state)

    def _save(self, *, epoch_ended: bool = False, is_last: bool = False) -> None:
        """Write a checkpoint, where one is due."""
        directory, validations, is_due = self._directory, self._validations, False
        if directory is not None:
            # What validated best is saved at once: when the cadence comes round, it has been trained on.
            is_due = is_last or directory.is_due(self.step, epoch_ended=epoch_ended) or validations.is_unsaved_best
        # By the first rank's clock, for that of another may say otherwise; and it alone knows what is saved.
        if self._writers is not None:
            is_due = self._writers.hear(is_due)
        if is_due and directory is None and self._writers is not None:
            started = clock.now()
            saving.save_own(self, self._writers)
            self._mark += clock.now() - started
        elif is_due and directory is not None:
            loss = self._pace.reports[-1].loss if self._pace.reports else None  # none before the first window
            saved = saving.save(self, directory, validations, loss)
            self._emit(saved)
            self._mark += saved.seconds  # the next report leaves it out
            self._tell_what_is_lost(directory, saved)

    def _tell_what_is_lost(self, directory: RunDirectory, saved: Saved) -> None:
        """Say what a later process would not find in a checkpoint; of the first one, whether it can be gone on from."""
        if lost := self._state.optimizer_attributes.lost():
            self._step.announcer.say_once(notices.lost_attributes(type(self.optimizer).__name__, lost))
        if self._is_tried or directory.writers is not None:
            return
        started, self._is_tried = clock.now(), True
        with self._step.meter.aside():
            problem = problem_of(self._state, Checkpoint.at(Path(saved.path)))
        if problem:
            self._step.announcer.say_once(notices.cannot_resume(problem))
        self._mark += clock.now() - started

    def _emit(self, record: Record) -> None:
        """Keep a record, then tell every callback of it, those after one that ends the run too."""
        if self._told is not None:
            self._told.append(record)
        if self._directory is not None:
            self._directory.record(record)
        else:
            (self._history if isinstance(record, StepReport) else self._events).append(record)
        for callback in self._callbacks:
            try:
                told = (record, self) if id(callback) in self._hooks.takes_trainer else (record,)
                callback(*told)
            except StopTraining:
                self._stopped_by = self._stopped_by or getattr(callback, "__name__", type(callback).__name__)
                self._end("stopped")

    def _emit_shares(self) -> None:
        """Tell what each rank has done, where there are several and it was not told before."""
        if self._sharing is not None and (told := self._sharing.told(self.step)) is not None:
            self._emit(told)

    def _end(self, reason: str) -> None:
        """End the run after the window; the first reason stands."""
        self._wish = self._wish or reason
        if self._group is None:
            self._stop_reason = self._wish

    def _wishes(self) -> rank_sync.Wish:
        return self._wish, self._followed.marks()

    def _hear_with_windows(self, group: Group) -> None:
        """Tell wishes with what comes of a window, one exchange less, where no callback of any rank has any."""
        transaction = self._step.transaction
        if not any(group.exchange(bool(self._arguments.callbacks))) and isinstance(transaction, SharedTransaction):
            transaction.tells, self._heard_by = self._wishes, transaction

    def _agree(self, *, after_window: bool = False) -> None:
        """Hear what other ranks wish, so that all of them end after the same window."""
        if self._group is None or self._stop_reason is not None:
            return
        if after_window and self._heard_by is not None:
            # A signal that has come since is heard with the next window; that the budget is spent, all ranks know.
            found = rank_sync.agreed(self._group, self._heard_by.heard, self._followed)
            self._stop_reason = found or ("budget" if self._pace.is_spent else None)
        else:
            self._stop_reason = rank_sync.agreed(self._group, self._group.exchange(self._wishes()), self._followed)
