"""The parameters that a trial draws, and which of them the recipe takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import TrialPruned
from optuna.trial import Trial

from autoaccum.data.randomness import seed_everywhere
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.sweeps.spaces import Batches, LearningRates
from autoaccum.training import recipes

_DRAWS = 20
"""Try so many draws for a first one that can be looked at."""


def chosen_by(
    trial: Trial,
    lr: LearningRates,
    effective_batch: Batches,
    search_space: Callable[[Trial], dict[str, Any]] | None,
) -> dict[str, Any]:
    """Return what a trial chooses: lr and effective batch where these are given, and what ``search_space`` returns.

    Raises:
        ArgumentError: Optuna cannot draw it, because the study has other choices.
        ArgumentTypeError: ``search_space`` returned no dict.
        ConflictingArgumentsError: it returned lr or effective batch although these are given.
    """
    chosen: dict[str, Any] = {}
    for name, among, between in (
        ("lr", lr, trial.suggest_float),
        ("effective_batch", effective_batch, trial.suggest_int),
    ):
        # On a logarithmic scale, for both act by their ratio: from 16 to 32 is as far as from 512 to 1024.
        try:
            if isinstance(among, tuple):
                chosen[name] = between(name, *among, log=True)
            elif isinstance(among, list):
                chosen[name] = trial.suggest_categorical(name, among)
            elif among is not None:
                chosen[name] = among
        except ValueError as error:
            # A trial in the study's queue has another value; or the study was begun with another list.
            accepted = f"what study {trial.study.study_name!r} can draw: {error}"
            cure = "Choose another study_name and another directory for other values."
            raise ArgumentError(name, str(among), accepted, cure) from None
    if search_space is not None:
        found = search_space(trial)
        if not isinstance(found, dict):
            raise ArgumentTypeError("search_space", found, "a function that returns a dict of arguments")
        for name in found.keys() & chosen.keys():
            raise ConflictingArgumentsError(name, found[name], "search_space", f"Leave {name} out of one of them.")
        chosen |= found
    return chosen


def taken_by(recipe: Callable[..., Any], chosen: dict[str, Any]) -> list[str]:
    """Return the names of what was chosen that the recipe has a parameter for.

    Raises:
        ArgumentError: it has a parameter without a default, for which nothing was chosen.
    """
    # *args and **kwargs take nothing of it: what a recipe does not name, it does not know how to use.
    parameters = inspect.signature(recipe).parameters
    for name, parameter in parameters.items():
        by_name = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if by_name and parameter.default is parameter.empty and name not in chosen:
            cure = "Pass it, return it from search_space, or give it a default."
            raise ArgumentError(name, None, "a value, as the recipe takes it", cure)
    return [name for name in parameters if name in chosen]


def first_draw(arguments_of: Callable[[Trial], dict[str, Any]]) -> tuple[Trial, dict[str, Any]]:
    """Return a draw for which the recipe can be called, and what ``arguments_of`` made of it.

    The recipe may have no memory for the first one, and ``search_space`` may prune it. The draws are the same in every
    process, and no study keeps them.
    """
    for seed in range(_DRAWS):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
        # search_space and the recipe may draw from any of the generators: each process draws the same.
        seed_everywhere(0)
        try:
            return trial, arguments_of(trial)
        except Exception as error:  # kept by no name: its frames hold what there was no memory for
            if seed == _DRAWS - 1 or not _may_pass(cause_of(error)):
                raise
    raise AssertionError


def cause_of(error: BaseException) -> BaseException:
    """Return what the recipe has raised, where the error stands for that; else the error."""
    return error.__cause__ if isinstance(error, recipes.RecipeRaised) and error.__cause__ else error


def _may_pass(error: BaseException) -> bool:
    """Return whether another draw may not raise it."""
    return isinstance(error, TrialPruned) or is_out_of_memory(error)
