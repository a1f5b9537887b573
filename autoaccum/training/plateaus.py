"""``EarlyStopping``, ``ReduceOnPlateau`` and ``KeepBest``: callbacks that know which validation was the best.

They count validations since that one, and are saved in the run's checkpoints: a run that was killed and goes on
stops, or slows down, after the same window. Every rank hears the same validations, and so decides the same.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from autoaccum import _checks
from autoaccum.errors import ArgumentError, ConflictingArgumentsError, StopTraining
from autoaccum.events import Record, Started, Validated
from autoaccum.training.hooks import Ready
from autoaccum.training.options import FitArguments
from autoaccum.training.synonyms import answering

State = dict[str, Any]


class Watch(Ready):
    """A callback that counts the validations since the best one."""

    def __init__(self, metric: str, mode: Literal["min", "max"] | None, min_delta: float = 0.0) -> None:
        """Set up; see the classes below for the arguments."""
        self.metric = metric
        if not isinstance(metric, str):
            raise ArgumentError("metric", metric, "'loss', or the name of one of the run's metrics")
        if mode is None:
            # Of a metric whose direction was forgotten the run would end where it is at its best.
            if metric != "loss":
                cure = "Pass 'max' where higher is better, as of an accuracy, and 'min' where lower is."
                raise ArgumentError("mode", mode, f"'min' or 'max' beside metric={metric!r}", cure)
            mode = "min"
        _checks.one_of("mode", mode, ("min", "max"))
        self.mode = mode
        self.min_delta = _checks.number_between("min_delta", min_delta, 0)
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        """The best value so far; None before the first that is a number."""
        self.num_bad = 0
        """Validations since then."""

    def check(self, arguments: FitArguments) -> None:
        """Refuse a run without validations.

        Raises:
            ArgumentError: there is no validation_data.
        """
        if arguments.validation_data is None:
            cure = "It goes by validations: pass what to validate on."
            raise ArgumentError("callbacks", type(self).__name__, "validation_data beside it", cure)

    def __call__(self, record: Record, trainer: Any) -> None:
        """Hear of the run's begin, and of its validations."""
        if isinstance(record, Started):
            if trainer.step == 0:  # the same object may have been in a run before
                self._forget()
            self._begin()
        # Each validation comes by once: one that an earlier process has had is in the state that was put back.
        elif isinstance(record, Validated):
            self._hear(self._value(record))
            self._act(trainer)

    def _begin(self) -> None:
        """Look at where the run goes on."""

    def _act(self, trainer: Any) -> None:
        """Do what is due after a validation."""

    def _value(self, record: Validated) -> float:
        # Not always known before: names may come and go.
        found: dict[str, float] = {**record.metrics, "loss": record.loss}
        if self.metric not in found:
            accepted = f"one of {', '.join(sorted(found))}, which validations report"
            raise ArgumentError("metric", self.metric, accepted, "Pass the function in metrics= too.")
        return found[self.metric]

    def _hear(self, value: float) -> None:
        """Count one more validation."""
        sign = 1 if self.mode == "min" else -1
        # NaN is never better; what comes before any number is beaten by the first.
        is_better = sign * value < sign * self.best - self.min_delta if self.best is not None else value == value
        if is_better:
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> State:
        """Return the best value, and how many validations were since; and of what."""
        return {"best": self.best, "num_bad": self.num_bad, "metric": self.metric, "mode": self.mode}

    def load_state_dict(self, state: State) -> None:
        """Put back what ``state_dict`` returned."""
        # Of another metric, or in the other direction, the best one says nothing of those to come.
        is_same = (state["metric"], state["mode"]) == (self.metric, self.mode)
        self.begins_anew = not is_same  # the same object may have been in a run before
        if self.begins_anew:
            return
        self.best, self.num_bad = state["best"], state["num_bad"]


class KeepBest(Watch):
    """What the best checkpoint of a run goes by, which ``autoaccum.load_best`` reads: a callback.

    Without it that is the checkpoint of the lowest validation loss. Of several that are as good the first is kept.

    >>> KeepBest("accuracy", "max").metric
    'accuracy'
    """

    has_to_be_everywhere = True
    judges = True

    @answering("KeepBest")
    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        """Set up.

        Args:
            metric: what to go by: ``"loss"``, or a name in what validations report.
            mode: ``"min"`` where lower is better, ``"max"`` where higher is.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        # Neither has a default: by a metric whose direction was forgotten the worst checkpoint would be kept.
        super().__init__(metric, mode)

    def check(self, arguments: FitArguments) -> None:
        """Refuse a run without validations, or without checkpoints.

        Raises:
            ArgumentError: there is no validation_data, no such name, or no run_dir.
        """
        super().check(arguments)
        if arguments.run_dir is None:
            cure = "Checkpoints are kept there: pass where they go."
            raise ArgumentError("callbacks", type(self).__name__, "run_dir beside it", cure)

    @property
    def is_best(self) -> bool:
        """Return whether the last validation is better than all before it."""
        return self.best is not None and not self.num_bad


class EarlyStopping(Watch):
    """An end of the run once validations have not got better for some time: a callback.

    The run ends after that validation, with its last checkpoint; ``autoaccum.load_best`` has the weights of the lowest
    loss, or those of the best metric where there is a ``KeepBest`` beside it. The same call made again stops at once;
    with more patience it goes on.

    >>> EarlyStopping(patience=3, metric="accuracy", mode="max").patience
    3
    """

    @answering("EarlyStopping")
    def __init__(
        self,
        patience: int = 3,
        *,
        metric: str = "loss",
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Set up.

        Args:
            patience: validations in a row without an improvement, after which the run ends.
            metric: what to go by: ``"loss"``, or a name in what validations report.
            mode: ``"min"`` where lower is better, ``"max"`` where higher is; of the loss it may be left out.
            min_delta: what a value has to be better by.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        self.patience = _checks.positive_int("patience", patience, "It is in validations; metric= names what to go by.")
        super().__init__(metric, mode, min_delta)

    def _begin(self) -> None:
        # Of a run that has ended so, and is called again: without this it would train on to the next validation.
        self._act(None)

    def _act(self, trainer: Any) -> None:
        if self.num_bad >= self.patience:
            raise StopTraining


class ReduceOnPlateau(Watch):
    """A learning rate that falls once validations have not got better for some time: a callback.

    It multiplies the rate of each parameter group, which the optimizer's state keeps; reports show the rate of each
    step. It is no ``lr_scheduler``, which is stepped by windows, and does not go together with one.

    >>> ReduceOnPlateau(factor=0.5, patience=2).factor
    0.5
    """

    has_to_be_everywhere = True

    @answering("ReduceOnPlateau")
    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        *,
        metric: str = "loss",
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        """Set up.

        Args:
            factor: what rates are multiplied by, above 0 and below 1.
            patience: validations in a row without an improvement that are borne: with the next one rates fall, as by
                PyTorch's ``ReduceLROnPlateau``.
            metric: what to go by: ``"loss"``, or a name in what validations report.
            mode: ``"min"`` where lower is better, ``"max"`` where higher is; of the loss it may be left out.
            min_delta: what a value has to be better by.
            cooldown: validations after that which do not count as bad.
            min_lr: the lowest rate.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        self.patience = _checks.non_negative_int("patience", patience)
        super().__init__(metric, mode, min_delta)
        self.factor = _checks.number_between("factor", factor, 0, 1)
        self.cooldown = _checks.non_negative_int("cooldown", cooldown)
        self.min_lr = _checks.number_between("min_lr", min_lr, 0)

    def _forget(self) -> None:
        super()._forget()
        self._resting = 0  # validations of a cooldown that are left

    def check(self, arguments: FitArguments) -> None:
        """Refuse a run without validations, or with another schedule.

        Raises:
            ArgumentError: there is no validation_data.
            ConflictingArgumentsError: there is an lr_scheduler.
        """
        super().check(arguments)
        if arguments.lr_scheduler is not None:
            cure = "Both set the learning rate, and most schedules would undo what the other does."
            raise ConflictingArgumentsError("lr_scheduler", arguments.lr_scheduler, "callbacks=[ReduceOnPlateau]", cure)

    def _act(self, trainer: Any) -> None:
        # After a fall the loss may well rise for a while, which says nothing of the next one.
        if self._resting:
            self._resting, self.num_bad = self._resting - 1, 0
        # As PyTorch's counts, whose numbers people bring along.
        if self.num_bad <= self.patience:
            return
        # The best stays what it is: what comes after a fall is to be better than all before it.
        self.num_bad, self._resting = 0, self.cooldown
        for group in trainer.optimizer.param_groups:
            rate = group["lr"]
            # Never up, where a rate began below the lowest one.
            lower = max(float(rate) * self.factor, self.min_lr)
            if lower >= float(rate):
                continue
            if isinstance(rate, torch.Tensor):  # as of optimizers that are captured or compiled, which hold it
                rate.fill_(lower)
            else:
                group["lr"] = lower

    def state_dict(self) -> State:
        """Return the best value, how many validations were since, and what is left of a cooldown."""
        return super().state_dict() | {"resting": self._resting}

    def load_state_dict(self, state: State) -> None:
        """Put back what ``state_dict`` returned; the rates themselves are the optimizer's."""
        super().load_state_dict(state)
        self._resting = state["resting"]
