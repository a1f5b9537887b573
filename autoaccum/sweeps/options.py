"""The arguments of ``sweep``, declared as those of ``fit`` are; and which of those of ``fit`` it passes on.

``python -m tests.write_signatures`` writes the signature of ``sweep`` from them, and ``PassedOn`` below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import Trial

from autoaccum import _checks
from autoaccum.data.splits import SplitLike
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.loss.stated import CountItems, Reducing
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.ladder import SavingMode
from autoaccum.ranks.balance import Balance
from autoaccum.ranks.summing import Compression
from autoaccum.sweeps import spaces, storages
from autoaccum.training.alone import Ranks
from autoaccum.training.declarations import Checked, arguments, arguments_of, check, option, values_of
from autoaccum.training.learning_rate import MakeScheduler, Scaling
from autoaccum.training.metrics import Metric
from autoaccum.training.options import OF_FIT, Callback
from autoaccum.training.synonyms import elsewhere, unknown_argument
from autoaccum.window.optimizers import OptimizerLike
from autoaccum.window.precision import Precision

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


def of_num_trials(num_trials: object) -> None:
    """Check with how many trials a study is to end."""
    _checks.positive_int("num_trials", num_trials)


def of_jobs(jobs: object) -> None:
    """Check how many processes share the trials."""
    _checks.positive_int("jobs", jobs)


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


def of_storage(storage: object) -> None:
    """Check the kind of storage."""
    storages.check_storage(storage)


def of_directory(directory: object) -> None:
    """Check where trials are kept."""
    if directory is not None:
        _checks.path("directory", directory)


def of_fit_arguments(fit_arguments: Arguments) -> None:
    """Refuse names that ``fit`` does not have, and those that no sweep passes on."""
    # What sweep has itself cannot be among them: Python has given it to the parameter of that name.
    for name, value in fit_arguments.items():
        if name not in OF_FIT or OF_FIT[name].in_sweeps == "own":
            # All of them and not the most similar one: what a sweep does not pass on may well be an argument of fit.
            taken = [argument.name for argument in OF_FIT.values() if argument.in_sweeps != "own"]
            cure = elsewhere(name) or f"Besides its own arguments it takes fit's: {', '.join(taken)}."
            raise unknown_argument("sweep", name, value, cure)


def of_sampler(sampler: object) -> BaseSampler | Callable[[int], BaseSampler]:
    """Return the sampler, or what makes one of a seed."""
    return spaces.sampler_of(sampler)


def of_pruner(pruner: object) -> None:
    """Check the pruner, which is made once the budget of a trial is known."""
    spaces.pruner_of(pruner, 1)  # for its errors alone: any budget does


CHECKS: tuple[Callable[..., Any], ...] = (
    of_num_trials,
    of_jobs,
    _checks.of_seed,
    of_recipe,
    of_recipe_arguments,
    of_search_space,
    of_study_name,
    of_directory,
    of_storage,
    _checks.of_progress,
    of_fit_arguments,
    spaces.metrics,
    of_sampler,
    of_pruner,
)
"""The order in which checks are made; lr, effective_batch and samples are read once the recipe was found."""


@arguments
class SweepArguments:
    """The arguments of one call of ``sweep``."""

    # What is trained.
    recipe: Recipe = option(
        "a function that returns the keyword arguments of ``fit``, a new model among them each time; or the text by "
        "which the command line names it.",
        check=of_recipe,
        is_positional=True,
    )
    # By itself, for what is among the arguments of ``fit`` too may mean something else to a recipe.
    recipe_arguments: Mapping[str, Any] | None = option(
        "what the recipe's function is called with in all trials, by name.", default=None, check=of_recipe_arguments
    )
    # What is searched. A tuple is a range and a list a choice; texts are for the command line.
    lr: float | tuple[float, float] | list[float] | str | None = option(
        '(low, high), or "low:high": searched for on a logarithmic scale; [1e-4, 1e-3] or "1e-4,1e-3": one of these; '
        "a number is taken by all trials.",
        default=None,
    )
    effective_batch: int | tuple[int, int] | list[int] | str | None = option(
        '[32, 64, 128] or "32,64,128": one of these; (low, high) or "low:high": powers of two where both are, else '
        "any integer on a logarithmic scale; a number is taken by all trials.",
        default=None,
    )
    search_space: Callable[[Trial], Arguments] | None = option(
        "(trial) -> further arguments of the recipe or of fit, made of what the Optuna trial suggests.",
        default=None,
        check=of_search_space,
    )
    # How long, in all and for each trial.
    # What the study ends with and not what this call runs, so that the same call can be made again after a kill.
    num_trials: int = option(
        "trials that the study is to end with, finished or pruned.", default=20, check=of_num_trials
    )
    samples: int | None = option(
        "training samples of each trial; what the recipe says when left out, in samples or epochs.",
        default=None,
    )
    # What trials are compared by.
    # The last validation and not the best one: the best of many is lower by luck alone.
    metric: str | Sequence[str] = option(
        "validation_loss, or what fit's argument metrics reports: of the trial's last validation (the best of several "
        "would be better the more there are); seconds (of training) or samples. Of several the study has a Pareto "
        "front, and prunes nothing.",
        default="validation_loss",
        check=spaces.metrics,
    )
    direction: str | Sequence[str] | None = option(
        "minimize or maximize, for each metric; has to be said where it is not one of the three named.",
        default=None,
        check=spaces.metrics,
    )
    # How Optuna draws and gives up. Objects of Optuna are taken too, so that nothing of it is out of reach.
    sampler: BaseSampler | Callable[[int], BaseSampler] | str = option(
        "tpe, random, grid, gp, cmaes or nsgaii; a sampler of Optuna; or a function (seed) -> sampler, called for "
        "each trial with its seed, as one that was made with a seed draws the same again after each start.",
        default="tpe",
        check=of_sampler,
    )
    # In samples, for windows of different effective batches come to the same step at different times.
    pruner: BasePruner | str = option(
        "median, hyperband, halving, wilcoxon or none; or one of Optuna. Its steps are samples. The median is that of "
        "other trials, from a third of the samples on: before that a large effective batch has taken few steps, which "
        "says little about where it ends.",
        default="median",
        check=of_pruner,
    )
    # What outlives the processes.
    storage: str | BaseStorage | None = option(
        "any URL of Optuna, journal:PATH or a path that ends in .log for a journal file, or a storage; a SQLite file "
        "in the directory when left out.",
        default=None,
        check=of_storage,
    )
    study_name: str | None = option("named after the recipe when left out.", default=None, check=of_study_name)
    # Not asked for: what a killed process leaves has to lie where the same call looks for it.
    directory: str | os.PathLike[str] | None = option(
        "for checkpoints and records, a run directory a trial; sweeps/STUDY_NAME when left out.",
        default=None,
        check=of_directory,
    )
    # Who runs the trials, and what is seen of it.
    jobs: int = option("processes that share the trials.", default=1, check=of_jobs)
    seed: int = option(
        "a trial's own is its number more, and is among its user attributes.", default=0, check=_checks.of_seed
    )
    progress: bool = option("show a bar over trials on standard error.", default=True, check=_checks.of_progress)
    # The last, for it gathers what is none of the above.
    fit_arguments: PassedOn = option(
        "any others of fit, in place of what the recipe returns.", check=of_fit_arguments, is_rest=True
    )

    def check(self) -> Checked:
        """Make the checks that come before the recipe is looked for.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        """
        return check(OF_SWEEP, CHECKS, **values_of(self))

    def call(self) -> Arguments:
        """Return what ``sweep`` has to be called with to be called so again."""
        values = values_of(self)  # by name; ``sweep`` itself takes the rest apart again
        rest: Arguments = values.pop("fit_arguments")
        return {**values, **rest}


OF_SWEEP = arguments_of(SweepArguments)
# What both have, such as lr, means something else in a sweep, which passes it on trial by trial.
PASSED_ON = {
    name: argument for name, argument in OF_FIT.items() if argument.in_sweeps != "own" and name not in OF_SWEEP
}
