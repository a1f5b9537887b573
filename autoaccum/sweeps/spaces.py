"""What a sweep is asked to search, and for what: learning rates, effective batches, metrics, samplers and pruners.

The command line has texts for all of them, and a call in Python its own types: both are read here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from optuna import pruners, samplers
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from autoaccum._checks import one_of, positive_int, positive_number
from autoaccum._units import shown
from autoaccum.errors import ArgumentError, ArgumentTypeError

N = TypeVar("N", int, float)
Direction = Literal["minimize", "maximize"]
LearningRates = float | tuple[float, float] | list[float] | None
"""(low, high), a list to choose from, or one for all trials; None where it is not searched for."""
Batches = int | tuple[int, int] | list[int] | None
"""Samples per optimizer step, likewise."""
MINIMISED = ("validation_loss", "seconds", "samples")
"""Metrics that every sweep has, all of them to be minimised."""
# Functions of a seed, for each trial gets a sampler of its own: see Claims.next.
SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: samplers.TPESampler(seed=seed),
    "random": lambda seed: samplers.RandomSampler(seed=seed),
    "grid": lambda seed: samplers.BruteForceSampler(seed=seed),
    "nsgaii": lambda seed: samplers.NSGAIISampler(seed=seed),
}
PRUNERS: Mapping[str, Callable[[], BasePruner]] = {
    "none": pruners.NopPruner,
    "hyperband": pruners.HyperbandPruner,
    "halving": pruners.SuccessiveHalvingPruner,
}
"""Pruners by name, but for the median, which is told how much of a trial is too early to judge by."""


def learning_rates(value: Any) -> LearningRates:
    """Read learning rates: a number, a tuple (low, high), or a list to choose from.

    >>> learning_rates("1e-4:1e-2"), learning_rates("1e-4,1e-3"), learning_rates(0.01)
    ((0.0001, 0.01), [0.0001, 0.001], 0.01)
    """
    # What stands before "or" is Python's, and the text behind it the command line's: see cli.spelling.
    accepted = "(1e-4, 1e-1) or '1e-4:1e-1' for a range, [1e-4, 1e-3] or '1e-4,1e-3' to choose from, or a number"
    return _values("lr", value, float, positive_number, accepted)


def batches(value: Any) -> Batches:
    """Read effective batches, as learning rates are read; a range between two powers of two is a list of those.

    >>> batches("32:256"), batches((30, 100)), batches("64,96")
    ([32, 64, 128, 256], (30, 100), [64, 96])
    """
    accepted = "(32, 1024) or '32:1024' for a range, [32, 64] or '32,64' to choose from, or a number"
    found = _values("effective_batch", value, int, positive_int, accepted)
    if not isinstance(found, tuple):
        return found
    # (30, 100) is a range as it stands. (32, 256) hardly means 37: it is a choice of sizes that people try.
    low, high = found
    if low & (low - 1) or high & (high - 1):  # one is no power of two: those have a single bit
        return low, high
    return [2**power for power in range(low.bit_length() - 1, high.bit_length())]


def _values(
    argument: str, given: Any, kind: Callable[[str], N], checked: Callable[[str, Any], N], accepted: str
) -> N | tuple[N, N] | list[N] | None:
    """Read a number, a range or a list, or the text of one, and check each number.

    Args:
        argument: its name, for errors.
        given: what the user has passed.
        kind: makes a number of a text.
        checked: (argument, number) -> the number, or an ArgumentError.
        accepted: what is accepted, for errors.
    """
    value = given
    if isinstance(value, str):
        if "," in value and ":" in value:
            # "8, 3:16" is a schedule's text, which fit takes; a list of such ones would be read as numbers.
            cure = "For schedules to choose from pass search_space." if argument == "effective_batch" else ""
            raise ArgumentError(argument, given, accepted, cure)
        # "a:b" is a range and "a,b" a list, as (a, b) and [a, b] are.
        try:
            numbers = [kind(part) for part in re.split("[:,]", value)]
        except ValueError:
            raise ArgumentError(argument, given, accepted) from None
        if "," in value:
            value = numbers
        elif ":" in value:
            value = tuple(numbers)
        else:
            value = numbers[0]
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        return checked(argument, value)
    found = [checked(argument, number) for number in value]
    # A list keeps its order and a range has one; equal entries of a list would be one choice under two numbers.
    if isinstance(value, list):
        if not found or len(set(found)) < len(found):
            raise ArgumentError(argument, given, accepted)
        return found
    if len(found) != 2 or found[0] >= found[1]:
        cure = ""
        if len(found) == 2 and found[0] > found[1]:
            cure = f"The lower end comes first: '{found[1]:g}:{found[0]:g}'."
        elif len(found) == 2:
            cure = f"A range of one value is that value: {found[0]:g}."
        raise ArgumentError(argument, given, accepted, cure)
    return found[0], found[1]


def metrics(metric: Any, direction: Any) -> tuple[tuple[str, ...], tuple[Direction, ...]]:
    """Return the names, and the direction of each, which goes without saying only for those that every sweep has.

    >>> metrics("validation_loss,seconds", None)
    (('validation_loss', 'seconds'), ('minimize', 'minimize'))
    """
    names = _texts("metric", metric)
    if not names or len({*names}) < len(names):
        raise ArgumentError("metric", metric, "one or more names, each once")
    # Anything for the type checker: one_of has made sure, below, that they are directions.
    directions: Any
    if direction is None:
        for name in names:
            if name not in MINIMISED:
                accepted = "minimize or maximize, for each metric"
                cure = f"Say which way {shown(name)} is better; only {', '.join(MINIMISED)} go without saying."
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
    """Read one text, which may be several with commas between them, or a sequence of texts."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise ArgumentTypeError(argument, value, "a text, or several")
    return tuple(found)


def sampler_of(value: Any) -> BaseSampler | Callable[[int], BaseSampler]:
    """Return a sampler for all trials, or a function (seed) -> sampler; for a name one of ``SAMPLERS``."""
    if isinstance(value, str):
        return SAMPLERS[one_of("sampler", value, tuple(SAMPLERS))]
    # A class can be called as well, but the first argument of most samplers is not a seed.
    if isinstance(value, type) or not isinstance(value, BaseSampler | Callable):
        accepted = f"a sampler of Optuna, a function (seed) -> sampler, or one of {', '.join(SAMPLERS)}"
        raise ArgumentTypeError("sampler", value, accepted)
    found: BaseSampler | Callable[[int], BaseSampler] = value
    return found


def check_grid(distributions: Mapping[str, BaseDistribution]) -> None:
    """Refuse to go through a grid of a range that has no steps.

    Raises:
        ArgumentError: a range has infinitely many values.
    """
    for name, distribution in distributions.items():
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            cure = f"{name} is a range, from {distribution.low:g} to {distribution.high:g}: list the values to try."
            raise ArgumentError("sampler", "grid", "a sampler of ranges, such as 'tpe'", cure)


def pruner_of(value: Any, samples: int) -> BasePruner:
    """Return a pruner, or the one of that name; the median of other trials is silent for a third of the samples."""
    if isinstance(value, BasePruner):
        return value
    if not isinstance(value, str):
        accepted = f"a pruner of Optuna, or one of {', '.join(('median', *PRUNERS))}"
        raise ArgumentTypeError("pruner", value, accepted)
    if one_of("pruner", value, ("median", *PRUNERS)) == "median":
        # Steps of a report are samples; early on a high learning rate, which may be the best in the end, looks worst.
        return pruners.MedianPruner(n_warmup_steps=samples // 3)
    with warnings.catch_warnings():  # who asks for one by name need not be told how new it is
        warnings.simplefilter("ignore", ExperimentalWarning)
        return PRUNERS[value]()
