"""One trial of a sweep, run to its end: its value, and what becomes of it otherwise.

A trial that reaches its budget is complete. One that is not worth going on with, does not fit or diverges is pruned,
and counts as finished; a user attribute says why, but where the pruner did it. Any other error fails the trial and ends
the sweep. A trial that a signal or a full disk has ended stays a running one, which a later process goes on with.
"""

from __future__ import annotations

import gc
import math
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, TrialPruned, UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from autoaccum.data.randomness import seed_everywhere
from autoaccum.errors import (
    AutoaccumWarning,
    CheckpointCorruptError,
    CheckpointError,
    MemoryLimitError,
    NonFiniteLossError,
    StopTraining,
)
from autoaccum.events import Finished, OutOfMemory, Record, Resumed, StepReport, Validated
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.reporting.progress import Teller
from autoaccum.sweeps.claims import SEED
from autoaccum.sweeps.draw import cause_of
from autoaccum.sweeps.objective import Objective
from autoaccum.sweeps.options import Arguments
from autoaccum.sweeps.spaces import MINIMISED
from autoaccum.training.trainer import Trainer


def run_trial(objective: Objective, study: optuna.Study, trial: Trial, folder: Path) -> None:
    """Run a trial to its end.

    Raises:
        Interrupted: a signal came first; the trial has its checkpoint and is still a running one.
    """
    # Only the text is kept: the error's frames hold the trial's model, until the except clause is left.
    text = ""
    try:
        _run(objective, study, trial, folder, resume="auto")
    except CheckpointCorruptError as error:
        text = f"Trial {trial.number} cannot be gone on with, and begins anew: {error}"
    gc.collect()  # a run refers to itself, and the next needs its memory
    if text:
        warnings.warn(text, AutoaccumWarning, stacklevel=2)
        _run(objective, study, trial, folder, resume=False)
        gc.collect()


def _run(objective: Objective, study: optuna.Study, trial: Trial, folder: Path, *, resume: Any) -> None:
    # What becomes of it unless it turns out to be complete; an error that is none of the trial's never gets to _tell.
    trainer: Trainer | None = None
    values, state = None, TrialState.PRUNED
    noted: Arguments = {}
    try:
        arguments = _arguments(objective, trial, folder, resume)
        reporter = _Reporter(trial, objective.metrics, arguments["validate_every"], arguments["samples"])
        arguments["callbacks"] = [*arguments.get("callbacks", ()), reporter]
        objective.check_new(arguments)
        trainer = Trainer(**arguments)
        result = trainer.fit()
        last = result.events[-1]
        if isinstance(last, Finished) and last.reason == "interrupted":
            raise Interrupted
        validations = [event for event in result.events if isinstance(event, Validated)]
        if validations and _diverges(validations[-1], objective.metrics):
            noted = {"diverged": True}
        elif isinstance(last, Finished) and last.reason == "stopped" and not reporter.is_pruned:
            noted = {"stopped": True}  # with fewer samples than those it would be compared with
        elif validations and not reporter.is_pruned:
            facts = _facts(trainer)
            found = {"seconds": facts["seconds"], "samples": facts["num_samples"]}
            found |= {name: _reported(validations[-1], name) for name in objective.metrics if name not in found}
            state, values = TrialState.COMPLETE, [found[name] for name in objective.metrics]
    except NonFiniteLossError:
        noted = {"diverged": True}
    except UpdateFinishedTrialError:  # somebody else has told how it ended
        pass
    except (CheckpointError, StorageInternalError, Interrupted):  # once there is room on the disk, say, it goes on
        raise
    except Exception as error:
        if (end := _end_of(cause_of(error))) is None:
            _tell(study, trial, None, TrialState.FAIL)
            raise
        noted = end
    if trainer is not None:  # else it did not come so far as to take anything
        noted |= _facts(trainer)
    # Told before the state: once a trial is finished, Optuna refuses attributes.
    with suppress(UpdateFinishedTrialError):
        for name, value in noted.items():
            trial.set_user_attr(name, value)
    _tell(study, trial, values, state)
    if state == TrialState.PRUNED:  # nobody goes on with it; its history stays for the report
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _arguments(objective: Objective, trial: Trial, folder: Path, resume: Any) -> Arguments:
    """Return the arguments of ``fit`` for a trial."""
    seed = trial.user_attrs[SEED]
    seed_everywhere(seed)  # for the recipe: fit does it again, once the model is there
    # One checkpoint is enough to go on from, and a sweep has many trials; a recipe may say otherwise.
    arguments = {"keep_checkpoints": 1, **objective.arguments(trial)}
    return arguments | {"seed": seed, "run_dir": folder, "resume": resume, "progress": False}


def _end_of(error: BaseException) -> Arguments | None:
    """Return what is noted of a trial that such an error ends and does not fail; None if it fails."""
    if isinstance(error, MemoryLimitError) or is_out_of_memory(error):
        numbers = ("micro_batch", "peak_bytes", "limit_bytes")
        return {"not_fitting": {name: getattr(error, name, None) for name in numbers}}
    return {} if isinstance(error, TrialPruned) else None


class Interrupted(Exception):
    """A signal has ended a trial after a window."""


class _Reporter(Teller):
    """Callback of ``fit`` that tells the study how a trial goes, by the samples it has seen.

    It ends the run when it is not worth going on, and tells at once that a signal has come.
    """

    def __init__(self, trial: Trial, metrics: tuple[str, ...], every: int, samples: int) -> None:
        self._trial, self._metrics, self._every, self._samples = trial, metrics, every, samples
        # Optuna prunes by one objective only, and by what a trial has cost so far it should not.
        self._reports = len(metrics) == 1 and metrics[0] not in ("seconds", "samples")
        # Steps that a process before this one has reported: Optuna warns of a second report.
        self._known = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        self._seen = 0  # samples so far
        self.is_pruned = False  # by the pruner, or for a loss that is not finite

    def __call__(self, record: Record) -> None:
        if isinstance(record, StepReport | Resumed):
            self._seen = record.num_samples
        elif isinstance(record, Validated):
            is_last = self._seen >= self._samples
            # Windows of different sizes end at different samples, and pruners compare what has the same step.
            step = self._samples if is_last else self._seen // self._every * self._every
            if self._reports and step not in self._known:
                self._known.add(step)
                self._trial.report(_reported(record, self._metrics[0]), step)
            diverges = _diverges(record, self._metrics)
            if not is_last and (diverges or (self._reports and self._trial.should_prune())):
                self.is_pruned = True
                raise StopTraining


def _reported(validated: Validated, metric: str) -> float:
    """Return what a validation says of a metric, the loss among them."""
    return validated.loss if metric == "validation_loss" else validated.metrics[metric]


def _diverges(validated: Validated, metrics: tuple[str, ...]) -> bool:
    """Return whether training or a metric has come to something that cannot be compared."""
    # Of those that every sweep has the loss is looked at anyway, and seconds and samples are always finite.
    own = [validated.metrics[name] for name in metrics if name not in MINIMISED]
    return not all(map(math.isfinite, [validated.loss, *own]))


def _tell(study: optuna.Study, trial: Trial, values: list[float] | None, state: TrialState) -> None:
    """Tell the study how a trial has ended, unless somebody else has."""
    try:
        study.tell(trial.number, values, state=state, skip_if_finished=True)
    except RuntimeError:  # of samplers that stop the study when nothing is left, which only Optuna's own loop can
        if study.get_trials(deepcopy=False)[trial.number].state != state:
            raise


def _facts(trainer: Trainer) -> Arguments:
    """Return what a trial has taken, as user attributes of it."""
    history, tuner = trainer.history, trainer._tuner
    replays = [report for report in history if report.replays]
    ooms = [event for event in trainer.events if isinstance(event, OutOfMemory) and event.phase == "training"]
    return {
        "num_steps": trainer.step,
        "num_samples": trainer.samples_seen,
        "seconds": sum(report.seconds for report in history),
        "ooms": len(ooms),
        "replays": sum(report.replays for report in replays),
        "wasted_samples": sum(report.replays * report.effective_batch for report in replays),
        # ``told`` is a failure of an earlier trial, which this one has heard of and not had itself.
        "search_trials": sum(tried is not tuner.told for tried in tuner.history),
        "peak_bytes": max((report.peak_bytes for report in history), default=0),
        "micro_batches": tuner.plan(*tuner.full_window),
    }
