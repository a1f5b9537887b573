"""``sweep``: an Optuna study over learning rate, effective batch and what else, in which no trial dies of memory.

What a trial is, see ``objectives``; what is searched, ``spaces``. A trial that is killed is gone on with from its
checkpoint, under its own number: see ``claims``.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import Trial, TrialState
from tqdm.auto import tqdm

from autoaccum._checks import positive_int
from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.runs.records import HISTORY, environment
from autoaccum.sweeps import spaces
from autoaccum.sweeps.claims import FINISHED, Claims, directory_of
from autoaccum.sweeps.objective import Objective
from autoaccum.sweeps.options import Arguments, PassedOn, Recipe, SweepArguments, of_sampler
from autoaccum.sweeps.storages import open_storage
from autoaccum.sweeps.studies import ORIGIN
from autoaccum.sweeps.trial import Interrupted, run_trial
from autoaccum.training import recipes
from autoaccum.training.single_process import refuse_ranks


def sweep(
    recipe: Recipe,
    *,
    recipe_arguments: Mapping[str, Any] | None = None,
    lr: float | tuple[float, float] | list[float] | str | None = None,
    effective_batch: int | tuple[int, int] | list[int] | str | None = None,
    search_space: Callable[[Trial], Arguments] | None = None,
    num_trials: int = 20,
    samples: int | None = None,
    metric: str | Sequence[str] = "validation_loss",
    direction: str | Sequence[str] | None = None,
    sampler: BaseSampler | Callable[[int], BaseSampler] | str = "tpe",
    pruner: BasePruner | str = "median",
    storage: str | BaseStorage | None = None,
    study_name: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = True,
    **fit_arguments: Unpack[PassedOn],
) -> optuna.Study:
    """Search for the learning rate and effective batch with the lowest validation loss after the same samples.

    The same call again, in another process too, goes on with the study until it has ``num_trials`` finished trials. A
    process that is killed leaves its trial to the next, which goes on from its checkpoint. Ctrl-C ends it so, after the
    window.

    Processes that make the same call share the trials: start it once for each GPU. Under torchrun pass
    ``ranks="independent"``.

    What the recipe's function has a parameter for is passed to it, everything else to ``fit``. So a recipe that makes
    its own optimizer is ``def recipe(lr)``, and one with a width to search for ``def recipe(width)``.

    Args:
        recipe: a function that returns the keyword arguments of ``fit``, a new model among them each time; or the text
            by which the command line names it.
        recipe_arguments: what the recipe's function is called with in all trials, by name.
        lr: (low, high), or "low:high": searched for on a logarithmic scale; [1e-4, 1e-3] or "1e-4,1e-3": one of these;
            a number is taken by all trials.
        effective_batch: [32, 64, 128] or "32,64,128": one of these; (low, high) or "low:high": powers of two where both
            are, else any integer on a logarithmic scale; a number is taken by all trials.
        search_space: (trial) -> further arguments of the recipe or of fit, made of what the Optuna trial suggests.
        num_trials: trials that the study is to end with, finished or pruned.
        samples: training samples of each trial; what the recipe says when left out, in samples or epochs.
        metric: validation_loss, or what fit's argument metrics reports: of the trial's last validation (the best of
            several would be better the more there are); seconds (of training) or samples. Of several the study has a
            Pareto front, and prunes nothing.
        direction: minimize or maximize, for each metric; has to be said where it is not one of the three named.
        sampler: tpe, random, grid or nsgaii; a sampler of Optuna; or a function (seed) -> sampler, called for each
            trial with its seed, as one that was made with a seed draws the same again after each start.
        pruner: median, hyperband, halving or none; or one of Optuna. Its steps are samples. The median is that of other
            trials, from a third of the samples on: before that a large effective batch has taken few steps, which says
            little about where it ends.
        storage: any URL of Optuna, journal:PATH for a journal file, or a storage; a SQLite file in the directory when
            left out.
        study_name: named after the recipe when left out.
        directory: for checkpoints and records, a run directory a trial; sweeps/STUDY_NAME when left out.
        seed: a trial's own is its number more, and is among its user attributes.
        progress: show a bar over trials on standard error.
        **fit_arguments: any others of fit, in place of what the recipe returns.

    Returns:
        The study. User attributes of a trial: seed, num_steps, num_samples, seconds (of training), ooms, replays,
        wasted_samples (of windows that were run again, at most), search_trials (micro-batch sizes that were tried),
        peak_bytes, micro_batches (of the last full window), and not_fitting, diverged or stopped (by a callback) where
        that was the end of it.

    Raises:
        ArgumentError: an argument cannot be used, of the sweep or of a trial.
        RecipeError: the recipe cannot be used.
        Exception: what a trial raised, which has failed then. One that does not fit, whose loss is not finite, or that
            a callback stopped before its samples has not: it is pruned.
    """
    return _sweep(SweepArguments(**locals()))


def _sweep(given: SweepArguments) -> optuna.Study:
    """Run trials until the study has as many as were asked for, as one of the processes that do."""
    checked = given.check()
    refuse_ranks(given.fit_arguments.get("ranks", "together"), "A sweep")
    recipe, storage, num_trials = given.recipe, given.storage, given.num_trials
    metrics, directions = checked[spaces.metrics]
    # A sampler, or what makes one of a seed: that is called for each trial, so that every process draws otherwise.
    sampling = checked[of_sampler]
    name = given.study_name or recipes.name_of(recipe)
    # Open until the last trial has ended: what reads its data imports what stands beside the recipe.
    fixed = dict(given.recipe_arguments or {})
    opened = recipes.imported(recipe, fixed) if isinstance(recipe, str) else recipes.binding(recipe, fixed, name)
    with opened as function:
        objective = Objective(
            recipe=function,
            fixed=tuple(fixed),
            lr=spaces.learning_rates(given.lr),
            effective_batch=spaces.batches(given.effective_batch),
            search_space=given.search_space,
            samples=0 if given.samples is None else positive_int("samples", given.samples),
            metrics=metrics,
            directions=directions,
            fit_arguments={**given.fit_arguments},
        )
        # Mistakes in the recipe or in arguments come up here, before there is a study that would be left behind.
        with _quiet():
            objective = objective.foreseen()
        if given.sampler == "grid":
            spaces.check_grid(objective.distributions)
        gc.collect()  # what was made of a first draw refers to itself
        path = directory_of(name) if given.directory is None else Path(given.directory)
        if (path / HISTORY).exists():
            cure = "Pass another one: a report of it would show one of the two."
            raise ArgumentError("directory", str(path), "a directory that is not that of a run of fit", cure)
        claims = Claims(path, num_trials, given.seed)

        def study_of() -> optuna.Study:
            study = optuna.create_study(
                storage=open_storage(storage, path),
                study_name=name,
                directions=directions,
                sampler=sampling if isinstance(sampling, BaseSampler) else None,
                pruner=spaces.pruner_of(given.pruner, objective.samples),
                load_if_exists=True,
            )
            objective.check_same(study)  # trials of another objective cannot be compared with those to come
            study.set_user_attr(ORIGIN, environment())  # each call is true of the trials that come with it
            return study

        with _quiet():
            study = claims.open(study_of)
            with (
                suppress(Interrupted),  # its trial is left as it is, to be gone on with
                tqdm(total=num_trials, unit=" trials", disable=not given.progress) as bar,
            ):
                _show(bar, study)
                # Until no trial is missing. Which one is next is asked each time, for other processes run some too.
                while True:
                    with claims.next(study, None if isinstance(sampling, BaseSampler) else sampling) as trial:
                        if trial is None:  # the study has what it is to end with
                            break
                        run_trial(objective, study, trial, claims.folder(trial))
                    _show(bar, study)
        return study


# What is shown.


def _show(bar: tqdm[Any], study: optuna.Study) -> None:
    """Show how many trials are finished, by any process, and the best so far."""
    # Counted anew, for other processes finish trials too.
    bar.n = len(study.get_trials(deepcopy=False, states=FINISHED))
    if len(study.directions) == 1 and study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        best = study.best_trial
        bar.set_postfix_str(f"best {best.value:.4g} by trial {best.number}", refresh=False)
    bar.refresh()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back Optuna's lines, and the advice for a run that was finished when its process was killed."""
    # Optuna's level is the process's: whoever called may have set it, and has it back afterwards.
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The run in .* is finished", AutoaccumWarning)
            warnings.filterwarnings("ignore", category=ExperimentalWarning)  # of the sampler of a grid
            yield
    finally:
        optuna.logging.set_verbosity(before)
