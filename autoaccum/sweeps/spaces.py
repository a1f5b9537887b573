"""What a sweep is asked to search, and for what: learning rates, effective batches, metrics, samplers and pruners."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args

from optuna import pruners, samplers
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from autoaccum._checks import one_of, positive_int, positive_number
from autoaccum.errors import ArgumentError, ArgumentTypeError

N = TypeVar("N", int, float)
Direction = Literal["minimize", "maximize"]
LearningRates = float | tuple[float, float] | list[float] | None
"""A range, some to choose from, or one for all trials."""
Batches = int | tuple[int, int] | list[int] | None
"""Likewise."""
MINIMISED = ("validation_loss", "seconds", "samples")
"""Metrics of every sweep."""
SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: samplers.TPESampler(seed=seed),
    "random": lambda seed: samplers.RandomSampler(seed=seed),
    "grid": lambda seed: samplers.BruteForceSampler(seed=seed),
    "gp": lambda seed: samplers.GPSampler(seed=seed),
    "cmaes": lambda seed: samplers.CmaEsSampler(seed=seed),
    "nsgaii": lambda seed: samplers.NSGAIISampler(seed=seed),
}
PRUNERS: Mapping[str, Callable[[], BasePruner]] = {
    "none": pruners.NopPruner,
    "hyperband": pruners.HyperbandPruner,
    "halving": pruners.SuccessiveHalvingPruner,
    "wilcoxon": pruners.WilcoxonPruner,
}
"""Besides the median, which is told how much of a trial is too early to judge by."""
_PACKAGES = {"cmaes": "cmaes", "gp": "scipy", "wilcoxon": "scipy"}
"""Of those that need one which Optuna does not bring."""


def learning_rates(value: Any) -> LearningRates:
    """A number, a tuple (low, high), or a list to choose from.

    >>> learning_rates("1e-4:1e-2"), learning_rates("1e-4,1e-3"), learning_rates(0.01)
    ((0.0001, 0.01), [0.0001, 0.001], 0.01)
    """
    accepted = "(low, high) or 'low:high', [low, high] or 'low,high' to choose from, or a number above 0"
    return _values("lr", value, float, positive_number, accepted)


def batches(value: Any) -> Batches:
    """Powers of two between two of them are a list.

    >>> batches("32:256"), batches((30, 100)), batches("64,96")
    ([32, 64, 128, 256], (30, 100), [64, 96])
    """
    accepted = "(low, high) or 'low:high', [32, 64] or '32,64' to choose from, or a number"
    found = _values("effective_batch", value, int, positive_int, accepted)
    if not isinstance(found, tuple):
        return found
    low, high = found
    if low & (low - 1) or high & (high - 1):
        return low, high
    return [2**power for power in range(low.bit_length() - 1, high.bit_length())]


def _values(
    argument: str, given: Any, kind: Callable[[str], N], checked: Callable[[str, Any], N], accepted: str
) -> N | tuple[N, N] | list[N] | None:
    value = given
    if isinstance(value, str):
        if "," in value and ":" in value:
            cure = "For schedules to choose from pass search_space." if argument == "effective_batch" else ""
            raise ArgumentError(argument, given, accepted, cure)
        try:
            numbers = [kind(part) for part in re.split("[:,]", value)]
        except ValueError:
            raise ArgumentError(argument, given, accepted) from None
        value = numbers if "," in value else tuple(numbers) if ":" in value else numbers[0]
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        return checked(argument, value)
    found = [checked(argument, number) for number in value]
    if isinstance(value, list):
        if not found or len(set(found)) < len(found):
            raise ArgumentError(argument, given, accepted)
        return found
    if len(found) != 2 or found[0] >= found[1]:
        raise ArgumentError(argument, given, accepted)
    return found[0], found[1]


def metrics(metric: Any, direction: Any) -> tuple[tuple[str, ...], tuple[Direction, ...]]:
    """The names, and of each whether it is minimised or maximised, which only goes without saying for those of ours.

    >>> metrics("validation_loss,seconds", None)
    (('validation_loss', 'seconds'), ('minimize', 'minimize'))
    """
    names = _texts("metric", metric)
    if not names or len({*names}) < len(names):
        raise ArgumentError("metric", metric, "one or more names, each once")
    directions: Any
    if direction is None:
        for name in names:
            if name not in MINIMISED:
                accepted = "minimize or maximize, for each metric"
                cure = f"Say which way {name!r} is better; only {', '.join(MINIMISED)} go without saying."
                raise ArgumentError("direction", None, accepted, cure)
        directions = ("minimize",) * len(names)
        return names, directions
    directions = _texts("direction", direction)
    for each in directions:
        one_of("direction", each, get_args(Direction))
    if len(directions) != len(names):
        raise ArgumentError("direction", direction, f"as many as metrics, {len(names)}")
    return names, directions


def _texts(argument: str, value: Any) -> tuple[str, ...]:
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise ArgumentTypeError(argument, value, "a text, or several")
    return tuple(found)


def sampler_of(value: Any) -> BaseSampler | Callable[[int], BaseSampler]:
    """One for all trials, or a function (seed) -> sampler, which for a name is among ``SAMPLERS``."""
    if isinstance(value, str):
        return SAMPLERS[_installed("sampler", one_of("sampler", value, tuple(SAMPLERS)))]
    if isinstance(value, type) or not isinstance(value, BaseSampler | Callable):
        accepted = f"a sampler of Optuna, a function (seed) -> sampler, or one of {', '.join(SAMPLERS)}"
        raise ArgumentTypeError("sampler", value, accepted)
    found: BaseSampler | Callable[[int], BaseSampler] = value
    return found


def check_grid(distributions: Mapping[str, BaseDistribution]) -> None:
    """Refuse what no grid can be gone through of.

    Raises:
        ArgumentError: a range has infinitely many values.
    """
    for name, distribution in distributions.items():
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            cure = f"{name} is a range, from {distribution.low:g} to {distribution.high:g}: list the values to try."
            raise ArgumentError("sampler", "grid", "a sampler of ranges, such as 'tpe'", cure)


def pruner_of(value: Any, samples: int) -> BasePruner:
    """By its name; the median of other trials is silent for a third of the samples."""
    if isinstance(value, BasePruner):
        return value
    if not isinstance(value, str):
        accepted = f"a pruner of Optuna, or one of {', '.join(('median', *PRUNERS))}"
        raise ArgumentTypeError("pruner", value, accepted)
    if one_of("pruner", value, ("median", *PRUNERS)) == "median":
        return pruners.MedianPruner(n_warmup_steps=samples // 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return PRUNERS[_installed("pruner", value)]()


def _installed(argument: str, name: str) -> str:
    package = _PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        cure = f"python -m pip install {package}."
        raise ArgumentError(argument, name, f"the package {package}, which it needs and which is not installed", cure)
    return name
