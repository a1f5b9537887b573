"""Checks of what a user passed, before anything runs: each error names the argument, the value, what is accepted."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from autoaccum.errors import ArgumentError, ArgumentTypeError


def positive_int(argument: str, value: object, cure: str = "") -> int:
    """Return an int of at least 1; a bool is a mistake, and a float is one even when it is whole."""
    # bool is a subclass of int, and epochs=True is not one epoch but a flag in the wrong place.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(argument, value, "an int of at least 1", cure)
    if value < 1:
        raise ArgumentError(argument, value, "an int of at least 1", cure)
    return value


def non_negative_int(argument: str, value: object) -> int:
    """Return an int of at least 0, and of at most 63 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(argument, value, "an int of at least 0")
    if value < 0:
        raise ArgumentError(argument, value, "an int of at least 0")
    # What is seeded or counted by it is kept in 64 bits with a sign.
    if value >= 2**63:
        raise ArgumentError(argument, value, "an int below 2**63")
    return value


def number_between(argument: str, value: object, low: float, high: float = math.inf, cure: str = "") -> float:
    """Return a finite number with ``low <= value < high``."""
    # The smallest positive float stands for "above 0", so that both kinds of bound are one comparison.
    accepted = ("a number above 0" if low == sys.float_info.min else f"a number of at least {low:g}") + (
        "" if high == math.inf else f" and below {high:g}"
    )
    # Neither a tensor nor a text is one, although each could be made one: a mistake elsewhere is likelier.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(argument, value, accepted, cure)
    if not low <= value < high:  # NaN is refused here too
        raise ArgumentError(argument, value, accepted, cure)
    return float(value)


def positive_number(argument: str, value: object) -> float:
    """Return a finite number above 0."""
    return number_between(argument, value, sys.float_info.min)


def one_of(argument: str, value: object, choices: tuple[str, ...]) -> str:
    """Return one of a few texts."""
    if value not in choices:
        raise ArgumentError(argument, value, f"one of {', '.join(map(repr, choices))}")
    return str(value)


# Checks of arguments by their names, each of those that have to be looked at together: ``training.options`` says which
# argument has which.


def of_windows(num_items: object, max_micro_batch: object, headroom: object, clip_norm: object) -> None:
    """Check the arguments that say how windows are run."""
    # A number would be right for one micro-batch size at most, and it is not the user who chooses that.
    if num_items is not None and not callable(num_items):
        raise ArgumentTypeError("num_items", num_items, "a function")
    if max_micro_batch is not None:
        positive_int("max_micro_batch", max_micro_batch)
    number_between("headroom", headroom, 0, 1)
    if clip_norm is not None:
        positive_number("clip_norm", clip_norm)


def of_patience(patience: object) -> None:
    """Check the seconds to wait for memory; without end is long, but no mistake."""
    if patience != math.inf:
        number_between("patience", patience, 0)


def of_micro_batch(micro_batch: object) -> None:
    """Check a micro-batch that is "auto" or a number: there is no recorded run to repeat."""
    if micro_batch != "auto":
        positive_int("micro_batch", micro_batch, "Leave it out to have it found.")


def of_num_workers(num_workers: object) -> None:
    """Check the number of processes that read the data."""
    non_negative_int("num_workers", num_workers)


def of_seed(seed: object) -> None:
    """Check the seed of a run, or of a sweep."""
    non_negative_int("seed", seed)


def of_lr(lr: object) -> None:
    """Check a learning rate, where there is one: 0 trains nothing, but is no mistake."""
    if lr is not None:
        number_between("lr", lr, 0)


def of_callbacks(callbacks: object) -> list[Any]:
    """Return the callbacks as a list: they may come as an iterator, which can be read only once."""
    return functions("callbacks", callbacks)


TAKEN = ("loss", "validation_loss", "seconds", "samples")
"""Names of what validations and sweeps report already; no metric of a user's may have one of them."""


def of_validation(validation_data: object, validate_every: object, metrics: object) -> None:
    """Check the arguments that say when validations are, and what they report beside the loss."""
    # With nothing to validate on, it would be left out in silence for the whole run.
    if validate_every is not None:
        positive_int("validate_every", validate_every, "It is in samples.")
        if validation_data is None:
            cure = "Pass what to validate on, or leave validate_every out."
            raise ArgumentError("validate_every", validate_every, "validation_data beside it", cure)
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError("metrics", metrics, "names and functions, {'accuracy': function}")
    # They name entries of records and a sweep's metrics, of which a command line writes several with commas between.
    for name, function in metrics.items():
        if not isinstance(name, str):
            raise ArgumentTypeError("metrics", name, "names that are texts, such as 'accuracy'")
        if not name.isidentifier():
            raise ArgumentError("metrics", name, "names of letters, digits and underscores, such as 'top_5'")
        if name in TAKEN:
            cure = "It would stand for two things: choose another."
            raise ArgumentError("metrics", name, f"other names than {', '.join(TAKEN)}", cure)
        if isinstance(function, type):  # callable, but what it returns is an object and not the metric
            cure = f"It is the class: make one, {function.__name__}()."
            raise ArgumentTypeError("metrics", f"{name}: {function.__name__}", "a function for each name", cure)
        if not callable(function):
            raise ArgumentTypeError("metrics", {name: function}, "a function for each name")
    if metrics and validation_data is None:
        cure = "Pass what to compute them on, or leave metrics out."
        raise ArgumentError("metrics", ", ".join(metrics), "validation_data beside them", cure)


Cadence = tuple[Literal["steps", "seconds", "epoch"], float]
"""How often: every so many steps or seconds, or at each epoch's end."""

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def cadence(argument: str, value: object) -> Cadence:
    """Read how often: steps as an int, a time as "30s", "10m" or "2h", or "epoch".

    >>> cadence("checkpoint_every", "10m")
    ('seconds', 600.0)
    """
    accepted = "a number of steps, a time such as '30s', '10m' or '2h', or 'epoch'"
    if value == "epoch":
        return "epoch", 1
    # A unit is asked for: "10" may be steps or seconds to whoever reads it.
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", value)
        if found is None or float(found[1]) == 0:
            raise ArgumentError(argument, value, accepted)
        return "seconds", float(found[1]) * _SECONDS[found[2]]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(argument, value, accepted)
    if value < 1:
        raise ArgumentError(argument, value, accepted)
    return "steps", value


def of_checkpoint_every(checkpoint_every: object) -> Cadence:
    """Return how often checkpoints are written: every ten minutes, unless told otherwise."""
    return cadence("checkpoint_every", "10m" if checkpoint_every is None else checkpoint_every)


def of_run_directory(run_dir: object, checkpoint_every: object, keep_checkpoints: object, resume: object) -> None:
    """Check the arguments that say what outlives the process."""
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        raise ArgumentTypeError("run_dir", run_dir, "a path")
    if run_dir == "":  # pathlib reads it as the current directory, which is seldom what an unset variable means
        raise ArgumentError("run_dir", run_dir, "a path", "Pass '.' for the directory that you are in.")
    if run_dir is None and checkpoint_every is not None:
        cure = "Pass where checkpoints are to go, or leave checkpoint_every out."
        raise ArgumentError("checkpoint_every", checkpoint_every, "run_dir beside it", cure)
    positive_int("keep_checkpoints", keep_checkpoints)
    if resume != "auto" and not isinstance(resume, bool):
        raise ArgumentError("resume", resume, "'auto', True or False")
    if resume is True and run_dir is None:
        raise ArgumentError("resume", resume, "run_dir beside it", "Pass the directory of the run to go on with.")


def recorded_plans(micro_batch: object) -> list[tuple[int, ...]]:
    """Return the plans of a recorded run, one a window; none when the micro-batch is a number or to be found."""
    accepted = "'auto', an int of at least 1, or a list of plans, each a tuple of micro-batch sizes"
    if micro_batch == "auto":
        return []
    if isinstance(micro_batch, str) or not isinstance(micro_batch, Sequence):  # a str is a Sequence of str
        positive_int("micro_batch", micro_batch, "Leave it out to have it found.")
        return []
    if not micro_batch:
        raise ArgumentError("micro_batch", micro_batch, accepted)
    # Nothing is to be checked against the effective batch: the sum of a plan is that of its window.
    plans = []
    for plan in micro_batch:
        if isinstance(plan, str) or not isinstance(plan, Sequence) or not plan:
            raise ArgumentTypeError("micro_batch", micro_batch, accepted)
        plans.append(tuple(positive_int("micro_batch", size) for size in plan))
    return plans


def functions(argument: str, value: object) -> list[Any]:
    """Return the functions of any iterable as a list."""
    found = list(value) if isinstance(value, Iterable) else [None]  # which is no function, and so is refused below
    if not all(callable(item) for item in found):
        raise ArgumentTypeError(argument, value, "a list of functions")
    return found
