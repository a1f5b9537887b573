"""What the trials of a study are made of: see ``trial_runs`` for one of them run to its end.

A trial is a ``fit`` of the recipe with the same budget in samples as all others. How its windows are cut decides its
speed and nothing else (laws 1 and 2), so trials differ by what was searched over alone.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import optuna
import torch
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import TrialPruned
from optuna.trial import Trial, TrialState

from autoaccum.data import randomness
from autoaccum.data.sources import open_source
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutoaccumWarning,
    ConflictingArgumentsError,
    MemoryLimitError,
    RecipeResultError,
)
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.runs.directory import differing
from autoaccum.sweeps.facts import SETTINGS
from autoaccum.sweeps.options import Arguments
from autoaccum.sweeps.spaces import MINIMISED, Batches, Direction, LearningRates
from autoaccum.training import recipes
from autoaccum.training.options import OF_FIT

DATA = ("data", "validation_data")
"""What is the same whatever is searched for."""
_DRAWS = 20
"""Tried for one that can be looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What the trials of a study are made of."""

    recipe: Callable[..., Arguments]
    lr: LearningRates
    effective_batch: Batches
    search_space: Callable[[Trial], Arguments] | None
    samples: int
    """Budget of a trial; 0 until it is known."""
    metrics: tuple[str, ...]
    directions: tuple[Direction, ...]
    """minimize or maximize, for each metric."""
    fit_arguments: Arguments
    """In place of what the recipe returns."""
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    """What one draw has searched."""
    trained: Arguments = field(default_factory=dict)
    """What that draw would have trained, and on which data; empty where not even its model fits."""
    taken_parameters: list[weakref.ref[torch.nn.Parameter]] = field(default_factory=list)
    """That it would have trained, and that trials have: no other trial may train them."""

    def arguments(self, trial: Trial) -> Arguments:
        """Of ``fit``, the recipe's code being run for it.

        Raises:
            ArgumentError: something that was chosen goes nowhere.
        """
        chosen: Arguments = {}
        for name, among, between in (
            ("lr", self.lr, trial.suggest_float),
            ("effective_batch", self.effective_batch, trial.suggest_int),
        ):
            try:
                if isinstance(among, tuple):
                    chosen[name] = between(name, *among, log=True)
                elif isinstance(among, list):
                    chosen[name] = trial.suggest_categorical(name, among)
                elif among is not None:
                    chosen[name] = among
            except ValueError:
                queued = trial.study.get_trials(deepcopy=False)[trial.number].system_attrs.get("fixed_params", {})
                if name not in queued:
                    raise
                accepted = f"one of {among}; a trial in the study's queue has another"
                raise ArgumentError(name, queued[name], accepted) from None
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
        arguments = {**recipes.checked(returned, recipes.name_of(self.recipe)), **self.fit_arguments}
        if self.samples:
            arguments = {name: value for name, value in arguments.items() if name not in ("epochs", "steps")}
            arguments["samples"] = self.samples
        has_optimizer = arguments.get("optimizer") is not None
        for name, value in chosen.items():
            known = OF_FIT.get(name)
            is_shared = known is not None and known.in_sweeps == "shared"
            if name in taken and (known is None or name in arguments or is_shared or (name == "lr" and has_optimizer)):
                continue
            if is_shared and name not in self.metrics:  # of loss and samples there is a front
                raise ArgumentError(name, value, "the same for all trials", "Leave it out of search_space.")
            if name == "lr" and has_optimizer:
                cure = "Write 'def recipe(lr): ...' and make the optimizer with it."
                raise ArgumentError(name, value, "a recipe that takes it, as it makes its own optimizer", cure)
            if known is None or known.in_sweeps == "own":
                cure = f"Write 'def recipe({name}): ...' and use it there."
                raise ArgumentError(name, value, "an argument of fit, or a parameter of the recipe", cure)
            arguments[name] = value
        return arguments

    def foreseen(self, trained_by: Callable[[Arguments], Arguments]) -> Objective:
        """Return the same with its budget and cadence known, and found to make sense in one draw that is not kept.

        The draw is the same in every process that makes the same call.

        Args:
            trained_by: (arguments of fit) -> what decides the values of a trial that is given them.

        Raises:
            ArgumentError: no trial could be run, or compared with another.
        """
        if (
            not isinstance(self.lr, tuple | list)
            and not isinstance(self.effective_batch, tuple | list)
            and not self.search_space
        ):
            cure = "Pass (low, high), or search_space."
            raise ArgumentError("lr", self.lr, "something to search for, in lr, effective_batch or search_space", cure)
        trial, arguments = self._first_draw()
        if arguments.get("effective_batch") is None:
            raise ArgumentError("effective_batch", None, "samples to choose from", "Pass it, or return it.")
        if arguments.get("validation_data") is None:
            cure = "Return it from the recipe, or pass it."
            raise ArgumentError("validation_data", None, "data by whose loss trials are compared", cure)
        known = (*MINIMISED, *(arguments.get("metrics") or ()))
        for name in self.metrics:
            if name not in known:
                cure = "Others are reported by validations where fit's argument metrics has a function for them."
                raise ArgumentError("metric", name, f"one of {', '.join(known)}", cure)
        trained: Arguments = {}
        try:
            trained = trained_by(arguments)
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
            trained={} if not trained else {"first draw": str(trial.params), **trained},
            taken_parameters=list(map(weakref.ref, _parameters(arguments))),
        )

    def _first_draw(self) -> tuple[Trial, Arguments]:
        """A draw for which the recipe can be called: it may have no memory for one, and search_space may prune one."""
        for seed in range(_DRAWS):
            trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
            set_seed(0)
            try:
                return trial, self.arguments(trial)
            except Exception as error:  # kept by no name: its frames hold what there was no memory for
                if seed == _DRAWS - 1 or not _may_pass(cause_of(error)):
                    raise
        raise AssertionError

    def check_same(self, study: optuna.Study) -> None:
        """Refuse a study whose trials cannot be compared with these.

        Raises:
            ArgumentError: it was begun with other settings.
        """
        settings = {"samples": self.samples, "metric": list(self.metrics), "direction": list(self.directions)}
        known = study.user_attrs.get(SETTINGS)
        if known is None:
            study.set_user_attr(SETTINGS, {**settings, "trained": self.trained})
            return
        for name, value in settings.items():
            if known[name] != value:
                cure = "Trials of one study are compared by it: pass it, or choose another study_name."
                raise ArgumentError(name, value, f"{known[name]!r}, as study {study.study_name!r} has it", cure)
        trials = study.get_trials(deepcopy=False)
        if trials and all(trial.state == TrialState.FAIL for trial in trials):  # nothing to compare with: it was mended
            study.set_user_attr(SETTINGS, {**settings, "trained": self.trained})
        before, now = study.user_attrs[SETTINGS]["trained"], self.trained
        if before and now and before["first draw"] != now["first draw"]:  # another range, which is no other recipe
            before, now = ({name: facts[name] for name in DATA} for facts in (before, now))
        if before and now and (differences := list(differing(before, now))):
            accepted = f"what study {study.study_name!r} was begun with ({'; '.join(differences)})"
            cure = "Trials of one study are compared: choose another study_name and directory."
            raise ArgumentError("recipe", getattr(self.recipe, "__name__", self.recipe), accepted, cure)
        for trial in trials:
            for name in trial.distributions.keys() & self.distributions.keys():
                old, new = trial.distributions[name], self.distributions[name]
                try:
                    check_distribution_compatibility(old, new)
                except ValueError:
                    cure = "Optuna cannot change it within a study: choose another study_name and directory."
                    raise ArgumentError(name, new, f"{old}, as study {study.study_name!r} has it", cure) from None

    def check_new(self, arguments: Arguments) -> None:
        """Refuse a model that another trial has trained.

        Raises:
            RecipeResultError: it is one.
        """
        parameters = _parameters(arguments)
        known = {id(parameter) for reference in self.taken_parameters if (parameter := reference()) is not None}
        if any(id(parameter) in known for parameter in parameters):
            raise RecipeResultError(
                f"{recipes.name_of(self.recipe)} returned a model that it has returned before, in whole or in part: a "
                f"trial would go on with the weights of the last one. Make it inside of the recipe, or return a "
                f"copy.deepcopy of it; what is not to be trained may be shared, with requires_grad_(False)."
            )
        alive = [reference for reference in self.taken_parameters if reference() is not None]
        self.taken_parameters[:] = [*alive, *map(weakref.ref, parameters)]

    def check_data(self, data: Arguments) -> None:
        """Warn where the data of a trial are others than those of the first draw."""
        if self.trained and any(self.trained[name] != facts for name, facts in data.items()):
            warnings.warn(
                "The recipe has made other data for this trial than for another. Trials that are trained or validated "
                "on other data are hardly comparable. Where that is not what is searched for, draw or split the data "
                "with a seed of their own, such as generator=torch.Generator().manual_seed(0), for each trial has its "
                "own seed; or make them once, outside of the recipe.",
                AutoaccumWarning,
                stacklevel=2,
            )


def set_seed(seed: int) -> None:
    """Of all that a recipe may draw from."""
    torch.manual_seed(seed)  # of devices too
    randomness.seed_host(seed)


def cause_of(error: BaseException) -> BaseException:
    """What the recipe has raised, where it was that."""
    return error.__cause__ if isinstance(error, recipes.RecipeRaised) and error.__cause__ else error


def _may_pass(error: BaseException) -> bool:
    """Whether another draw may not raise it."""
    return isinstance(error, TrialPruned) or is_out_of_memory(error)


def _parameters(arguments: Arguments) -> list[torch.nn.Parameter]:
    """What of a trial is trained."""
    modules = [arguments.get(name) for name in ("model", "loss_fn", "training_step")]
    return [p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters() if p.requires_grad]
