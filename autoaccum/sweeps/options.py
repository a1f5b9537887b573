"""The arguments of ``sweep`` and their checks, and which of those of ``fit`` it passes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import Trial

from autoaccum import _checks
from autoaccum.data.splits import SplitLike
from autoaccum.distributed.balance import Balance
from autoaccum.distributed.gradients import Compression
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.limits import SavingMode
from autoaccum.step.job import Precision
from autoaccum.step.optimizers import OptimizerLike
from autoaccum.step.terms import CountItems, Reducing
from autoaccum.sweeps import spaces, storages
from autoaccum.training.declarations import Checked, check, values_of
from autoaccum.training.learning_rate import MakeScheduler, Scaling
from autoaccum.training.metrics import Metric
from autoaccum.training.options import NOT_IN_SWEEPS, OF_FIT, Callback
from autoaccum.training.single_process import Ranks
from autoaccum.training.synonyms import elsewhere, unknown_argument

Arguments = dict[str, Any]
"""Of a recipe, or of ``fit``, by their names."""
Recipe = str | Callable[..., Arguments]
"""A function that returns arguments of ``fit``, or the text by which the command line names it."""


class PassedOn(TypedDict, total=False):
    """Arguments that ``sweep`` passes on to ``fit``, in place of what the recipe returns."""

    loss_fn: Callable[[Any, Any], Any] | None
    training_step: Callable[[Any, Any], Any] | None
    num_items: CountItems | None
    reduction: Reducing
    optimizer: OptimizerLike | None
    lr_scheduler: MakeScheduler | None
    lr_scaling: Scaling
    base_batch: int | None
    epochs: int | None
    steps: int | None
    micro_batch: int | Literal["auto"] | Sequence[Sequence[int]]
    max_micro_batch: int | None
    min_micro_batch: int | None
    memory_limit: MemoryLimit
    headroom: float
    memory_saving: SavingMode
    patience: float
    precision: Precision
    clip_norm: float | None
    accumulate: Literal["auto", "weighted", "joined"]
    verify: bool
    strict: bool
    compile: bool
    device: str | torch.device | None
    ranks: Ranks
    balance: Balance
    compression: Compression
    shuffle: bool
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any] | None
    split: SplitLike | None
    batch_dim: int | Mapping[str, Any] | Sequence[Any]
    num_workers: int
    validation_data: Any
    validate_every: int | None
    metrics: Mapping[str, Metric] | None
    checkpoint_every: int | str | None
    keep_checkpoints: int
    noise_scale: bool
    cache: bool
    callbacks: Iterable[Callback]


def of_recipe_arguments(recipe_arguments: object) -> None:
    """Check that they are named; whether the recipe takes them is seen when it is imported."""
    if recipe_arguments is not None and not isinstance(recipe_arguments, Mapping):
        raise ArgumentTypeError("recipe_arguments", recipe_arguments, "a mapping of names to values")


def of_recipe(recipe: object) -> None:
    """Check the kind of recipe; whether there is one of that name is seen when it is imported."""
    # Whatever can be called will do: a class, a partial.
    if isinstance(recipe, str) and "\0" in recipe:
        raise ArgumentError("recipe", recipe, "a text without NUL")
    if isinstance(recipe, torch.nn.Module) or (not isinstance(recipe, str) and not callable(recipe)):
        accepted = "a function that returns the arguments of fit, or the text that names it"
        raise ArgumentTypeError("recipe", recipe, accepted)


def of_search_space(search_space: object) -> None:
    """Check the function that says what else is searched."""
    if search_space is not None:
        _checks.no_class("search_space", search_space, "a function of the trial")
        _checks.function("search_space", search_space, ("trial",), "further arguments")


def of_study_name(study_name: object) -> None:
    """Check the name of the study."""
    if study_name is not None and not isinstance(study_name, str):
        raise ArgumentTypeError("study_name", study_name, "a text")
    # Its directory is named after it.
    if study_name is not None and ("\0" in study_name or len(study_name) > 200):
        raise ArgumentError("study_name", study_name, "a text of at most 200 characters, without NUL")


def of_fit_arguments(fit_arguments: Arguments) -> None:
    """Refuse names that ``fit`` does not have, and those that no sweep passes on."""
    # What sweep has itself cannot be among them: Python has given it to the parameter of that name.
    for name, value in fit_arguments.items():
        if name not in OF_FIT or name in NOT_IN_SWEEPS:
            # All of them and not the most similar one: what a sweep does not pass on may well be an argument of fit.
            taken = [name for name in OF_FIT if name not in NOT_IN_SWEEPS]
            cure = elsewhere(name) or f"Besides its own arguments it takes fit's: {', '.join(taken)}."
            raise unknown_argument("sweep", name, value, cure)


def of_sampler(sampler: object) -> BaseSampler | Callable[[int], BaseSampler]:
    """Return the sampler, or what makes one of a seed."""
    return spaces.sampler_of(sampler)


def of_pruner(pruner: object) -> None:
    """Check the pruner, which is made once the budget of a trial is known."""
    spaces.pruner_of(pruner, 1)  # for its errors alone: any budget does


EACH: dict[str, Callable[[str, Any], Any]] = {
    "num_trials": _checks.positive_int,
    "seed": _checks.non_negative_int,
    "directory": _checks.if_given(_checks.path),
    "storage": lambda name, value: storages.check_storage(value),
    "progress": _checks.flag,
}
"""Checks of arguments that are looked at alone."""
CHECKS: tuple[Callable[..., Any], ...] = (
    of_recipe,
    of_recipe_arguments,
    of_search_space,
    of_study_name,
    of_fit_arguments,
    spaces.metrics,
    of_sampler,
    of_pruner,
)
"""Other checks, in their order; lr, effective_batch and samples are read once the recipe was found."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class SweepArguments:
    """The arguments of one call of ``sweep``."""

    # What is trained.
    recipe: Recipe
    # By itself, for what is among the arguments of ``fit`` too may mean something else to a recipe.
    recipe_arguments: Mapping[str, Any] | None = None
    # What is searched. A tuple is a range and a list a choice; texts are for the command line.
    lr: float | tuple[float, float] | list[float] | str | None = None
    effective_batch: int | tuple[int, int] | list[int] | str | None = None
    search_space: Callable[[Trial], Arguments] | None = None
    # How long, in all and for each trial.
    # What the study ends with and not what this call runs, so that the same call can be made again after a kill.
    num_trials: int = 20
    samples: int | None = None
    # What trials are compared by.
    # The last validation and not the best one: the best of many is lower by luck alone.
    metric: str | Sequence[str] = "validation_loss"
    direction: str | Sequence[str] | None = None
    # How Optuna draws and gives up. Objects of Optuna are taken too, so that nothing of it is out of reach.
    sampler: BaseSampler | Callable[[int], BaseSampler] | str = "tpe"
    # In samples, for windows of different effective batches come to the same step at different times.
    pruner: BasePruner | str = "median"
    # What outlives the processes.
    storage: str | BaseStorage | None = None
    study_name: str | None = None
    # Not asked for: what a killed process leaves has to lie where the same call looks for it.
    directory: str | os.PathLike[str] | None = None
    seed: int = 0
    progress: bool = True
    # The last, for it gathers what is none of the above.
    fit_arguments: PassedOn

    def check(self) -> Checked:
        """Make the checks that come before the recipe is looked for.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        """
        return check(values_of(self), EACH, CHECKS)
