"""``sweep``: an Optuna study over learning rate, effective batch and what else, in which no trial dies of memory.

A trial is a ``fit`` of the recipe with the same budget in samples as all others. How its windows are cut decides its
speed and nothing else (laws 1 and 2), so trials differ by what was searched over alone. A trial that is killed is gone
on with from its checkpoint, under its own number: see ``claims``.
"""

from __future__ import annotations

import gc
import inspect
import math
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.pruners import BasePruner, MedianPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import Trial, TrialState
from tqdm import tqdm

from autoaccum import randomness, recipes
from autoaccum.arguments import non_negative_int, one_of, positive_int, positive_number
from autoaccum.claims import FINISHED, SEED, Claims, open_storage
from autoaccum.data import open_source
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutoaccumWarning,
    CheckpointError,
    ConflictingArgumentsError,
    MemoryLimitError,
    NonFiniteLossError,
    StopTraining,
)
from autoaccum.events import Finished, OutOfMemory, Record, Resumed, StepReport, Validated
from autoaccum.oom import is_out_of_memory
from autoaccum.trainer import Trainer

Recipe = str | Callable[..., dict[str, Any]]
Arguments = dict[str, Any]
METRICS = ("validation_loss", "seconds", "samples")
OWN = ("model", "data", "run_dir", "resume")
"""Arguments of fit that no sweep passes on."""
COMMON = ("samples", "epochs", "steps", "validate_every", "seed")
"""Arguments of fit that are for all trials, and not to be searched for."""
SETTINGS = "autoaccum"
"""User attribute of a study: what all of its trials have in common."""
_FIT = inspect.signature(Trainer).parameters


def sweep(
    recipe: Recipe,
    *,
    lr: float | tuple[float, float] | str | None = None,
    effective_batch: int | tuple[int, int] | list[int] | str | None = None,
    search_space: Callable[[Trial], Arguments] | None = None,
    num_trials: int = 20,
    samples: int | None = None,
    metric: str | Sequence[str] = "validation_loss",
    sampler: BaseSampler | Callable[[int], BaseSampler] | None = None,
    pruner: BasePruner | None = None,
    storage: str | BaseStorage | None = None,
    study_name: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    seed: int = 0,
    progress: bool = True,
    **fit_arguments: Any,
) -> optuna.Study:
    """Search for the learning rate and effective batch with the lowest validation loss after the same samples.

    The same call again, in another process too, goes on with the study until it has ``num_trials`` finished trials. A
    process that is killed leaves its trial to the next, which goes on from its checkpoint. Ctrl-C ends it so, after the
    window.

    What the recipe's function has a parameter for is passed to it, everything else to ``fit``. So a recipe that makes
    its own optimizer is ``def recipe(lr)``, and one with a width to search for ``def recipe(width)``.

    Args:
        recipe: a function that returns the keyword arguments of ``fit``, a new model among them each time; or the text
            by which the command line names it.
        lr: (low, high), or "low:high": searched for on a logarithmic scale; a number is taken by all trials.
        effective_batch: [32, 64, 128] or "32,64,128": one of these; (low, high) or "low:high": powers of two where both
            are, else any integer on a logarithmic scale; a number is taken by all trials.
        search_space: (trial) -> further arguments of the recipe or of fit, made of what the Optuna trial suggests.
        num_trials: trials that the study is to end with, finished or pruned.
        samples: training samples of each trial; what the recipe says when left out, in samples or epochs.
        metric: validation_loss, the last one of the trial (the best of several would be lower the more there are); or
            several of validation_loss, seconds and samples: the study has a Pareto front then, and prunes nothing.
        sampler: of Optuna, or a function (seed) -> sampler, called for each trial with its seed; TPE when left out. A
            sampler that was made with a seed draws the same again after each start.
        pruner: of Optuna; its steps are samples. The median of other trials when left out, from a third of the samples
            on: before that a large effective batch has taken few steps, which says little about where it ends.
        storage: any URL of Optuna, journal:PATH or a path that ends in .log for a journal file, or a storage; a SQLite
            file in the directory when left out.
        study_name: named after the recipe when left out.
        directory: for checkpoints and records, a run directory a trial; sweeps/STUDY_NAME when left out.
        jobs: processes that share the trials.
        seed: a trial's own is its number more, and is among its user attributes.
        progress: show a bar over trials on standard error.
        **fit_arguments: any others of fit, in place of what the recipe returns.

    Returns:
        The study. User attributes of a trial: seed, num_steps, num_samples, seconds (of training), ooms, replays,
        wasted_samples (of windows that were run again, at most), search_trials (micro-batch sizes that were tried),
        peak_bytes, micro_batches (of the last full window), and not_fitting or diverged where that was the end of it.

    Raises:
        ArgumentError: an argument cannot be used, of the sweep or of a trial.
        RecipeError: the recipe cannot be used.
        Exception: what a trial raised, which has failed then. One that does not fit or whose loss is not finite has
            not: it is pruned.
    """
    settings = {**locals(), "jobs": 1, "progress": False}
    settings |= settings.pop("fit_arguments")
    positive_int("num_trials", num_trials)
    positive_int("jobs", jobs)
    non_negative_int("seed", seed)
    kinds: Any
    for argument, value, kinds, accepted in (
        ("recipe", recipe, str | Callable, "a function that returns the arguments of fit, or the text that names it"),
        ("search_space", search_space, Callable | None, "a function of the trial"),
        ("sampler", sampler, BaseSampler | Callable | None, "a sampler of Optuna, or a function (seed) -> sampler"),
        ("pruner", pruner, BasePruner | None, "a pruner of Optuna, such as optuna.pruners.NopPruner()"),
        ("study_name", study_name, str | None, "a text"),
    ):
        if not isinstance(value, kinds) or (argument == "sampler" and isinstance(value, type)):
            raise ArgumentTypeError(argument, value, accepted)
    for name in fit_arguments:
        if name in OWN or name not in _FIT:
            taken = [other for other in _FIT if other not in OWN]
            raise ArgumentError(name, fit_arguments[name], f"arguments of sweep, or of fit: {', '.join(taken)}")
    name = study_name or _name_of(recipe)
    with recipes.imported(recipe) if isinstance(recipe, str) else nullcontext(recipe) as function:
        plan = Sweep(
            recipe=function,
            lr=_range("lr", lr),
            effective_batch=_batches(effective_batch),
            search_space=search_space,
            samples=0 if samples is None else positive_int("samples", samples),
            metrics=_metrics(metric),
            fit_arguments=fit_arguments,
        )
        with _quiet():
            plan = plan.foreseen()
        gc.collect()  # what was made of a first draw refers to itself
        path = Path(directory) if directory is not None else Path("sweeps") / name
        claims = Claims(path, num_trials, seed)

        def study_of() -> optuna.Study:
            study = optuna.create_study(
                storage=open_storage(storage, path),
                study_name=name,
                directions=["minimize"] * len(plan.metrics),
                sampler=sampler if isinstance(sampler, BaseSampler) else None,
                pruner=pruner or MedianPruner(n_warmup_steps=plan.samples // 3),
                load_if_exists=True,
            )
            plan.check_same(study)
            return study

        with _quiet():
            study = claims.open(study_of)
            with (
                suppress(Interrupted),
                _joined_by(settings, jobs),
                tqdm(total=num_trials, unit=" trials", disable=not progress) as bar,
            ):
                _show(bar, study)
                while _is_wanted():
                    with claims.next(study, None if isinstance(sampler, BaseSampler) else sampler or _tpe) as trial:
                        if trial is None:
                            break
                        plan.run(study, trial, claims.folder(trial))
                    _show(bar, study)
        if others := claims.elsewhere(study):
            numbers = ", ".join(str(trial.number) for trial in others)
            warnings.warn(
                f"Trials {numbers} are run in other directories, or were left there. This study has fewer finished "
                f"trials until they end. Run the same command there, or give up one by study.tell({others[0].number}, "
                f"state=optuna.trial.TrialState.FAIL) and run it here.",
                AutoaccumWarning,
                stacklevel=2,
            )
        return study


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What the trials of a study are made of."""

    recipe: Callable[..., Arguments]
    lr: float | tuple[float, float] | None
    effective_batch: int | tuple[int, int] | list[int] | None
    search_space: Callable[[Trial], Arguments] | None
    samples: int
    """Budget of a trial; 0 until it is known."""
    metrics: tuple[str, ...]
    """What is minimised."""
    fit_arguments: Arguments
    """In place of what the recipe returns."""
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    """What one draw has searched."""

    def arguments(self, trial: Trial) -> Arguments:
        """Of ``fit``, the recipe's code being run for it.

        Raises:
            ArgumentError: something that was chosen goes nowhere.
        """
        chosen: Arguments = {}
        if self.lr is not None:
            chosen["lr"] = trial.suggest_float("lr", *self.lr, log=True) if isinstance(self.lr, tuple) else self.lr
        batch = self.effective_batch
        if isinstance(batch, tuple):
            chosen["effective_batch"] = trial.suggest_int("effective_batch", *batch, log=True)
        elif isinstance(batch, list):
            chosen["effective_batch"] = trial.suggest_categorical("effective_batch", batch)
        elif batch is not None:
            chosen["effective_batch"] = batch
        if self.search_space is not None:
            found = self.search_space(trial)
            if not isinstance(found, dict):
                raise ArgumentTypeError("search_space", found, "a function that returns a dict of arguments")
            for name in found.keys() & chosen.keys():
                raise ConflictingArgumentsError(name, found[name], "search_space", f"Leave {name} out of one of them.")
            chosen |= found
        parameters = inspect.signature(self.recipe).parameters
        for name, parameter in parameters.items():
            by_name = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if by_name and parameter.default is parameter.empty and name not in chosen:
                cure = "Pass it, return it from search_space, or give it a default."
                raise ArgumentError(name, None, "a value, as the recipe takes it", cure)
        taken = [name for name in parameters if name in chosen]
        returned = self.recipe(**{name: chosen[name] for name in taken})
        arguments = {**recipes.checked(returned, _name_of(self.recipe)), **self.fit_arguments}
        if self.samples:
            arguments = {name: value for name, value in arguments.items() if name not in ("epochs", "steps")}
            arguments["samples"] = self.samples
        has_optimizer = arguments.get("optimizer") is not None
        for name, value in chosen.items():
            if name in taken and (
                name not in _FIT or name in arguments or name in COMMON or (name == "lr" and has_optimizer)
            ):
                continue
            if name in COMMON and name not in self.metrics:  # of loss and samples there is a front
                raise ArgumentError(name, value, "the same for all trials", "Leave it out of search_space.")
            if name == "lr" and has_optimizer:
                cure = "Write 'def recipe(lr): ...' and make the optimizer with it."
                raise ArgumentError(name, value, "a recipe that takes it, as it makes its own optimizer", cure)
            if name not in _FIT or name in OWN:
                cure = f"Write 'def recipe({name}): ...' and use it there."
                raise ArgumentError(name, value, "an argument of fit, or a parameter of the recipe", cure)
            arguments[name] = value
        return arguments

    def foreseen(self) -> Sweep:
        """The same with its budget and cadence known, and found to make sense in one draw that is not kept.

        Raises:
            ArgumentError: no trial could be run, or compared with another.
        """
        if (
            not isinstance(self.lr, tuple)
            and not isinstance(self.effective_batch, tuple | list)
            and not self.search_space
        ):
            cure = "Pass (low, high), or search_space."
            raise ArgumentError("lr", self.lr, "something to search for, in lr, effective_batch or search_space", cure)
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
        arguments = self.arguments(trial)
        if arguments.get("effective_batch") is None:
            raise ArgumentError("effective_batch", None, "samples to choose from", "Pass it, or return it.")
        if arguments.get("validation_data") is None:
            cure = "Return it from the recipe, or pass it."
            raise ArgumentError("validation_data", None, "data by whose loss trials are compared", cure)
        try:
            Trainer(**{**arguments, "run_dir": os.curdir, "progress": False})  # for what it says about them
        except Exception as error:  # one of another effective batch may fit
            if not (isinstance(error, MemoryLimitError) or is_out_of_memory(error)):
                raise
        samples = self.samples or arguments.get("samples")
        if samples is None:
            if arguments.get("steps") is not None:
                cure = "Pass samples: a step is more samples where the effective batch is larger."
                raise ConflictingArgumentsError("steps", arguments["steps"], "a sweep", cure)
            source = open_source(
                arguments["data"],
                seed=0,
                shuffle=False,
                device=torch.device("cpu"),
                collate_fn=arguments.get("collate_fn"),
            )
            if source.num_samples is None:
                raise ArgumentError("samples", None, "a budget, as the data has no length", "Pass samples.")
            samples = source.num_samples * (arguments.get("epochs") or 1)
        every = max(1, samples // 10) if (given := arguments.get("validate_every")) is None else given
        return replace(
            self,
            samples=samples,
            fit_arguments={**self.fit_arguments, "validate_every": every},
            distributions=trial.distributions,
        )

    def check_same(self, study: optuna.Study) -> None:
        """Refuse a study whose trials cannot be compared with these.

        Raises:
            ArgumentError: it was begun with other settings.
        """
        settings = {"samples": self.samples, "metric": list(self.metrics)}
        known = study.user_attrs.get(SETTINGS)
        if known is None:
            study.set_user_attr(SETTINGS, settings)
            return
        for name, value in settings.items():
            if known[name] != value:
                cure = "Trials of one study are compared by it: pass it, or choose another study_name."
                raise ArgumentError(name, value, f"{known[name]!r}, as study {study.study_name!r} has it", cure)
        for trial in study.get_trials(deepcopy=False):
            for name in trial.distributions.keys() & self.distributions.keys():
                old, new = trial.distributions[name], self.distributions[name]
                try:
                    check_distribution_compatibility(old, new)
                except ValueError:
                    cure = "Optuna cannot change it within a study: choose another study_name and directory."
                    raise ArgumentError(name, new, f"{old}, as study {study.study_name!r} has it", cure) from None

    def run(self, study: optuna.Study, trial: Trial, folder: Path) -> None:
        """A trial, to its end.

        Raises:
            Interrupted: a signal came first; the trial has its checkpoint and is still a running one.
        """
        seed = trial.user_attrs[SEED]
        torch.manual_seed(seed)  # of devices too, for the recipe: fit does it again, once the model is there
        randomness.seed_host(seed)
        trainer, state, values = None, TrialState.PRUNED, None
        try:
            arguments = {"keep_checkpoints": 1, **self.arguments(trial)}
            arguments |= {"seed": seed, "run_dir": folder, "progress": False}
            reporter = _Reporter(trial, every=arguments["validate_every"], samples=arguments["samples"])
            arguments["callbacks"] = [*arguments.get("callbacks", ()), reporter]
            trainer = Trainer(**arguments)
            result = trainer.fit()
            last = result.events[-1]
            if reporter.is_orphan or (isinstance(last, Finished) and last.reason == "interrupted"):
                raise Interrupted
            losses = [event.loss for event in result.events if isinstance(event, Validated)]
            if losses and not math.isfinite(losses[-1]):
                trial.set_user_attr("diverged", True)
            elif losses and not reporter.is_pruned:
                facts = _facts(trainer)
                found = {"validation_loss": losses[-1], "seconds": facts["seconds"], "samples": facts["num_samples"]}
                state, values = TrialState.COMPLETE, [found[name] for name in self.metrics]
        except MemoryLimitError as error:
            numbers = ("micro_batch", "peak_bytes", "limit_bytes")
            trial.set_user_attr("not_fitting", {name: getattr(error, name) for name in numbers})
        except NonFiniteLossError:
            trial.set_user_attr("diverged", True)
        except (CheckpointError, Interrupted):  # a full disk, say: once there is room the trial goes on
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                study.tell(trial.number, state=TrialState.FAIL)
                raise
            trial.set_user_attr("not_fitting", {"micro_batch": None, "peak_bytes": None, "limit_bytes": None})
        if trainer is not None:
            for name, value in _facts(trainer).items():
                trial.set_user_attr(name, value)
        try:
            study.tell(trial.number, values, state=state)
        except RuntimeError:  # of samplers that stop the study when nothing is left, which only Optuna's own loop can
            if study.get_trials(deepcopy=False)[trial.number].state != state:
                raise
        if state == TrialState.PRUNED:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        del trainer
        gc.collect()  # a run refers to itself, and the next needs its memory


class Interrupted(Exception):
    """A signal has ended a trial after a window."""


class _Reporter:
    """Tells the study how a trial goes, by the samples it has seen, and ends it when it is not worth going on."""

    def __init__(self, trial: Trial, *, every: int, samples: int) -> None:
        self._trial, self._every, self._samples = trial, every, samples
        self._is_single = len(trial.study.directions) == 1  # Optuna prunes by one objective only
        self._known = set(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        self._seen = 0
        self.is_pruned = self.is_orphan = False

    def __call__(self, record: Record) -> None:
        if isinstance(record, StepReport | Resumed):
            self._seen = record.num_samples
            if not _is_wanted():
                self.is_orphan = True
                raise StopTraining
        elif isinstance(record, Validated):
            is_last = self._seen >= self._samples
            # Windows of different sizes end at different samples, and pruners compare what has the same step.
            step = self._samples if is_last else self._seen // self._every * self._every
            if self._is_single and step not in self._known:
                self._known.add(step)
                self._trial.report(record.loss, step)
            diverged = not math.isfinite(record.loss)
            if not is_last and (diverged or (self._is_single and self._trial.should_prune())):
                self.is_pruned = True
                raise StopTraining


def _facts(trainer: Trainer) -> Arguments:
    """User attributes of a trial: what it has taken."""
    history = trainer.history
    replays = [report for report in history if report.replays]
    ooms = [event for event in trainer.events if isinstance(event, OutOfMemory) and event.phase == "training"]
    return {
        "num_steps": trainer.step,
        "num_samples": trainer.samples_seen,
        "seconds": sum(report.seconds for report in history),
        "ooms": len(ooms),
        "replays": sum(report.replays for report in replays),
        "wasted_samples": sum(report.replays * report.effective_batch for report in replays),
        "search_trials": len(trainer._tuner.history),
        "peak_bytes": max((report.peak_bytes for report in history), default=0),
        "micro_batches": trainer._tuner.plan(*trainer._tuner.window),
    }


# Processes.


_parent: Any = None
"""Of a process that ``jobs`` started: the one that did."""


def _is_wanted() -> bool:
    """Not once the process that started this one is gone."""
    return _parent is None or bool(_parent.is_alive())


def _work(settings: Arguments) -> None:
    global _parent
    _parent = multiprocessing.parent_process()
    # Standard output is the first process's: it may be a document.
    with suppress(KeyboardInterrupt), redirect_stdout(sys.stderr):
        sweep(**settings)


@contextmanager
def _joined_by(settings: Arguments, jobs: int) -> Iterator[None]:
    """Within it, so many processes in all make the same call; when it ends in an error, they end after their windows.

    Raises:
        ArgumentError: other processes cannot.
    """
    if jobs > 1:
        accepted = "1 for what other processes cannot have"
        try:
            pickle.dumps(settings)
        except Exception as error:
            cure = "Define the recipe and other functions at the top of a module."
            raise ArgumentError("jobs", jobs, accepted, f"{error}. {cure}") from None
        if isinstance(settings["storage"], InMemoryStorage):
            raise ArgumentError("jobs", jobs, accepted, "Leave storage out, or pass one that is not in memory.")
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads, or a device, may hang
    workers = [context.Process(target=_work, args=(settings,)) for _ in range(jobs - 1)]
    for worker in workers:
        worker.start()
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.join()


# What is written down.


def _range(argument: str, value: Any) -> float | tuple[float, float] | None:
    accepted = "(low, high) or 'low:high' with 0 < low < high, or a number above 0"
    if isinstance(value, str):
        try:
            numbers = [float(part) for part in value.split(":")]
        except ValueError:
            raise ArgumentError(argument, value, accepted) from None
        value = numbers[0] if len(numbers) == 1 else tuple(numbers)
    if value is None:
        return None
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ArgumentError(argument, value, accepted)
        low, high = (positive_number(argument, number) for number in value)
        if low >= high:
            raise ArgumentError(argument, value, accepted)
        return low, high
    return positive_number(argument, value)


def _batches(value: Any) -> int | tuple[int, int] | list[int] | None:
    """Powers of two are a list of them.

    >>> _batches("32:256"), _batches((30, 100)), _batches("64,96")
    ([32, 64, 128, 256], (30, 100), [64, 96])
    """
    accepted = "[32, 64] or '32,64' to choose from, (low, high) or 'low:high' with 1 <= low < high, or a number"
    given = value
    if isinstance(value, str):
        try:
            numbers = [int(part) for part in re.split("[:,]", value)]
        except ValueError:
            raise ArgumentError("effective_batch", given, accepted) from None
        value = numbers[0] if len(numbers) == 1 else numbers if "," in value else tuple(numbers)
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        return positive_int("effective_batch", value)
    for number in value:
        positive_int("effective_batch", number)
    if isinstance(value, list):
        if not value or len(set(value)) < len(value):
            raise ArgumentError("effective_batch", given, accepted)
        return value
    if len(value) != 2 or value[0] >= value[1]:
        raise ArgumentError("effective_batch", given, accepted)
    low, high = value
    if low & (low - 1) or high & (high - 1):
        return low, high
    return [2**power for power in range(low.bit_length() - 1, high.bit_length())]


def _metrics(metric: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(metric, str | Sequence):
        raise ArgumentTypeError("metric", metric, f"one or more of {', '.join(METRICS)}")
    names = [name.strip() for name in metric.split(",")] if isinstance(metric, str) else list(metric)
    if not names or len({*names}) < len(names):
        raise ArgumentError("metric", metric, f"one or more of {', '.join(METRICS)}, each once")
    return tuple(one_of("metric", name, METRICS) for name in names)


def _name_of(recipe: Recipe) -> str:
    """What a study is called.

    >>> _name_of("recipes/digits.py"), _name_of("digits.py:small"), _name_of("package.digits")
    ('digits', 'digits-small', 'digits')
    """
    if not isinstance(recipe, str):
        name = getattr(recipe, "__name__", type(recipe).__name__)
    else:
        target, _, function = recipe.partition(":")
        stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
        name = f"{stem}-{function}" if function not in ("", "recipe") else stem
    return re.sub(r"\W+", "-", name).strip("-")


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)


def _show(bar: tqdm[Any], study: optuna.Study) -> None:
    bar.n = len(study.get_trials(deepcopy=False, states=FINISHED))
    if len(study.directions) == 1 and study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        best = study.best_trial
        bar.set_postfix_str(f"best {best.value:.4g} by trial {best.number}", refresh=False)
    bar.refresh()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's lines, and without the advice for a run that was finished when its process was killed."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The run in .* is finished", AutoaccumWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
