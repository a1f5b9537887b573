"""The objective of a sweep: what the trials of a study are made of. One of them is run to its end in ``trial``.

A trial is a ``fit`` of the recipe with the same budget in samples as all others. How its windows are cut decides its
speed and nothing else (laws 1 and 2), so trials differ by what was searched over alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.trial import Trial

from autoaccum import _checks
from autoaccum.data.sources import open_source
from autoaccum.data.splits import split_of
from autoaccum.errors import (
    ArgumentError,
    ConflictingArgumentsError,
    RecipeResultError,
)
from autoaccum.sweeps import draw
from autoaccum.sweeps.options import Arguments
from autoaccum.sweeps.spaces import MINIMISED, Batches, Direction, LearningRates
from autoaccum.sweeps.studies import SETTINGS
from autoaccum.training import recipes
from autoaccum.training.options import NOT_IN_SWEEPS, OF_FIT, SHARED_IN_SWEEPS, FitArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """All that the trials of a study have in common."""

    recipe: Callable[..., Arguments]
    fixed: tuple[str, ...]
    """Names of the recipe's parameters that have a value already, the same for all trials."""
    lr: LearningRates
    effective_batch: Batches
    search_space: Callable[[Trial], Arguments] | None
    samples: int
    """Budget of a trial, in samples; 0 until it is known."""
    metrics: tuple[str, ...]
    directions: tuple[Direction, ...]
    """``minimize`` or ``maximize``, for each metric."""
    fit_arguments: Arguments
    """Arguments of ``fit`` that take the place of what the recipe returns."""
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    """What the first draw has searched, by name."""
    taken: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    """Modules that the first draw would have trained, and those that trials have: no other trial may train them."""

    def arguments(self, trial: Trial) -> Arguments:
        """Return the arguments of ``fit`` for a trial; the recipe is called for them.

        Raises:
            ArgumentError: something that was chosen goes nowhere.
        """
        chosen = draw.chosen_by(trial, self.lr, self.effective_batch, self.search_space)
        for name in self.fixed:
            if name in chosen:
                cure = "Search for it, or pass it to all trials alike."
                raise ConflictingArgumentsError(name, chosen[name], "recipe_arguments", cure)
        taken = draw.taken_by(self.recipe, chosen)
        returned = self.recipe(**{name: chosen[name] for name in taken})
        arguments = {**recipes.checked(returned, recipes.name_of(self.recipe)), **self.fit_arguments}
        if self.samples:  # the budget of all trials, in place of whatever the recipe has for one
            arguments = {name: value for name, value in arguments.items() if name not in ("epochs", "steps")}
            arguments["samples"] = self.samples
        has_optimizer = arguments.get("optimizer") is not None
        for name, value in chosen.items():
            # What the recipe took it may have used up, as an lr in an optimizer that it made. Else it goes to fit as
            # well, so that a recipe may take lr only to look at it.
            is_used_up = name in taken and (
                name not in OF_FIT or name in arguments or name in SHARED_IN_SWEEPS or (name == "lr" and has_optimizer)
            )
            if not is_used_up:
                self._check_goes_to_fit(name, value, has_optimizer=has_optimizer)
                arguments[name] = value
        sizes = [size for name in ("micro_batch", "effective_batch") if isinstance(size := arguments.get(name), int)]
        if len(sizes) == 2:  # a trial's window may be smaller than the micro-batch that all of them are given
            arguments["micro_batch"] = min(sizes)
        return arguments

    def _check_goes_to_fit(self, name: str, value: Any, *, has_optimizer: bool) -> None:
        """Refuse what was chosen if ``fit`` would not heed it, or would make trials incomparable by it."""
        if name in SHARED_IN_SWEEPS and name not in self.metrics:
            # Of loss and samples there is a front.
            raise ArgumentError(name, value, "the same for all trials", "Leave it out of search_space.")
        if name == "lr" and has_optimizer:
            cure = "Write 'def recipe(lr): ...' and make the optimizer with it."
            raise ArgumentError(name, value, "a recipe that takes it, as it makes its own optimizer", cure)
        if name not in OF_FIT or name in NOT_IN_SWEEPS:
            cure = f"Write 'def recipe({name}): ...' and use it there."
            raise ArgumentError(name, value, "an argument of fit, or a parameter of the recipe", cure)

    def foreseen(self) -> Objective:
        """Return the same with its budget and cadence known, and found to make sense in one draw that is not kept.

        The draw is the same in every process that makes the same call.

        Raises:
            ArgumentError: no trial could be run, or compared with another.
        """
        if (
            not isinstance(self.lr, tuple | list)
            and not isinstance(self.effective_batch, tuple | list)
            and not self.search_space
        ):
            cure = "Pass lr=(1e-4, 1e-1) or effective_batch=[32, 64, 128]; in Python search_space does, too."
            raise ArgumentError("lr", self.lr, "something to search for", cure)
        trial, arguments = draw.first_draw(self.arguments)
        self._check_comparable(arguments)
        # Before there is a study that would be left behind; a trial's own directory is yet to come.
        FitArguments(**{**arguments, "run_dir": "."}).check()
        samples = self._budget(arguments)
        every = arguments.get("validate_every")
        if every is None:  # ten validations a trial, by which it may be pruned
            every = max(1, samples // 10)
        return replace(
            self,
            samples=samples,
            fit_arguments={**self.fit_arguments, "validate_every": every},
            distributions=trial.distributions,
            taken=weakref.WeakSet(_trained(arguments)),
        )

    def _check_comparable(self, arguments: Arguments) -> None:
        """Refuse arguments without what trials are compared by."""
        if arguments.get("effective_batch") is None:
            cure = "Pass effective_batch=64, or several, or return it from the recipe."
            raise ArgumentError("effective_batch", None, "samples to choose from", cure)
        if arguments.get("validation_data") is None:
            cure = "Return it from the recipe, or pass it."
            raise ArgumentError("validation_data", None, "data by whose loss trials are compared", cure)
        # Metrics of fit are a dict of functions by name.
        _checks.of_validation(arguments["validation_data"], None, arguments.get("metrics"))
        known = (*MINIMISED, *(arguments.get("metrics") or ()))
        for name in self.metrics:
            if name not in known:
                cure = "Others are reported by validations where fit's argument metrics has a function for them."
                raise ArgumentError("metric", name, f"one of {', '.join(known)}", cure)

    def _budget(self, arguments: Arguments) -> int:
        """Return the samples of a trial: those that were passed, else those of the recipe's samples or epochs."""
        samples: int | None = self.samples or arguments.get("samples")
        if samples is not None:
            return samples
        if arguments.get("steps") is not None:
            cure = "Pass samples: a step is more samples where the effective batch is larger."
            raise ConflictingArgumentsError("steps", arguments["steps"], "a sweep", cure)
        # Opened only to be counted, as the data of a fit would be.
        source = open_source(
            arguments["data"],
            seed=0,
            shuffle=False,
            device=torch.device("cpu"),
            collate_fn=arguments.get("collate_fn"),
            split=split_of(*map(arguments.get, ("split", "batch_dim", "loss_fn", "training_step"))),
        )
        if source.num_samples is None:
            raise ArgumentError("samples", None, "a budget, as the data has no length", "Pass samples.")
        return source.num_samples * (arguments.get("epochs") or 1)

    def check_same(self, study: optuna.Study) -> None:
        """Refuse a study whose trials cannot be compared with these.

        Raises:
            ArgumentError: it was begun with other settings.
        """
        # What trials are compared by: after how many samples, by which metric, and which way.
        settings = {"samples": self.samples, "metric": list(self.metrics), "direction": list(self.directions)}
        known = study.user_attrs.get(SETTINGS)
        if known is None:  # a new study
            study.set_user_attr(SETTINGS, settings)
            return
        for name, value in settings.items():
            if known[name] != value:
                cure = "Trials of one study are compared by it: pass it, or choose another study_name."
                raise ArgumentError(name, value, f"{known[name]!r}, as study {study.study_name!r} has it", cure)

    def check_new(self, arguments: Arguments) -> None:
        """Refuse a model that another trial has trained.

        Raises:
            RecipeResultError: it is one.
        """
        trained = _trained(arguments)
        if not self.taken.isdisjoint(trained):
            raise RecipeResultError(
                f"{recipes.name_of(self.recipe)} returned a model that it has returned before, in whole or in part: a "
                f"trial would go on with the weights of the last one. Make it inside of the recipe, or return a "
                f"copy.deepcopy of it; what is not to be trained may be shared, with requires_grad_(False)."
            )
        self.taken.update(trained)


def _trained(arguments: Arguments) -> list[torch.nn.Module]:
    """Return the modules with parameters of their own that a trial trains."""
    # A loss, or a training step, may be a module with parameters of its own.
    modules = [arguments.get(name) for name in ("model", "loss_fn", "training_step")]
    parts = [part for module in modules if isinstance(module, torch.nn.Module) for part in module.modules()]
    return [part for part in parts if any(p.requires_grad for p in part.parameters(recurse=False))]
