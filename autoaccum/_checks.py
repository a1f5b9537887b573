"""Checks of what a user passed, before anything runs: each error names the argument, the value, what is accepted."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autoaccum._units import parse_bytes, shown
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError


def positive_int(argument: str, value: object, cure: str = "") -> int:
    """Return an int of at least 1, and of at most 63 bits; a bool is a mistake, and so is a float that is whole."""
    return _int(argument, value, 1, cure)


def non_negative_int(argument: str, value: object) -> int:
    """Return an int of at least 0, and of at most 63 bits."""
    return _int(argument, value, 0, "")


def _int(argument: str, value: object, low: int, cure: str) -> int:
    # bool is a subclass of int, and epochs=True is not one epoch but a flag in the wrong place.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(argument, value, f"an int of at least {low}", cure)
    if value < low:
        raise ArgumentError(argument, value, f"an int of at least {low}", cure)
    # What is seeded, sized or counted by it is kept in 64 bits with a sign.
    if value >= 2**63:
        raise ArgumentError(argument, value, "an int below 2**63", cure)
    return value


def if_given(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return the same check of an argument that may be None."""
    return lambda argument, value: None if value is None else check(argument, value)


def flag(argument: str, value: object) -> bool:
    """Return True or False; what would only count as one of them is a mistake."""
    # "False" is true, as every text is, and shuffle=1 may have been meant for another argument.
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(argument, value, "True or False", f"Write {argument}=True or {argument}=False.")


def of_memory_saving(memory_saving: object) -> None:
    """Raise unless memory is saved in a way that there is, or in several."""
    # An empty list asks for nothing, for which there is a word.
    several = memory_saving if isinstance(memory_saving, list | tuple) else ()
    if several and all(_is(one, "checkpoint") or _is(one, "offload") for one in several):
        return
    if not isinstance(memory_saving, str) or memory_saving not in ("auto", "off", "checkpoint", "offload"):
        accepted = "'auto', 'off', 'checkpoint', 'offload' or ['checkpoint', 'offload']"
        raise ArgumentError("memory_saving", memory_saving, accepted)


def of_verification(verify: object, strict: object) -> None:
    """Check what is measured, and what becomes of a failure.

    Raises:
        ConflictingArgumentsError: nothing is to be measured, and a failure of that to be an error.
    """
    flag("verify", verify)
    flag("strict", strict)
    if strict and not verify:
        cure = "What is not measured cannot fail: leave verify out."
        raise ConflictingArgumentsError("verify", verify, "strict=True", cure)


def function(argument: str, value: object, parameters: tuple[str, ...], returns: str, cure: str = "") -> None:
    """Check that a value can be called with so many arguments, as far as its signature can be read.

    Args:
        argument: its name, for errors.
        value: what the user passed.
        parameters: what it will be called with.
        returns: what it is to return.
        cure: what to do instead.
    """
    accepted = f"a function ({', '.join(parameters)}) -> {returns}"
    if not callable(value):
        raise ArgumentTypeError(argument, value, accepted, cure)
    try:
        # A module is called by way of its forward: that of __call__ takes anything.
        is_module = hasattr(value, "named_parameters") and not isinstance(value, type)
        signature = inspect.signature(value.forward if is_module else value)  # type: ignore[attr-defined]
    except Exception:  # of a function in C, or an object that makes up its attributes: its first call will tell
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        found = f"It cannot be called with {len(parameters)} of them: {error}."
        raise ArgumentTypeError(argument, value, accepted, f"{found} {cure}".strip()) from None


class Positional(NamedTuple):
    """The parameters of a function that can be passed by position."""

    required: int
    """How many of them have no default."""
    most: float
    """How many there are; infinite where it takes any number."""
    names: tuple[str, ...]
    """What they are called."""


def positional(value: object) -> Positional | None:
    """Return which parameters of a function can be passed by position; None where its signature cannot be read."""
    try:
        signature = inspect.signature(value.forward if hasattr(value, "named_parameters") else value)  # type: ignore[attr-defined, arg-type]
    except Exception:  # as in ``function``
        return None
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_endless = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = sum(p.default is p.empty for p in named)
    return Positional(required, math.inf if is_endless else len(named), tuple(p.name for p in named))


def no_class(argument: str, value: object, accepted: str) -> None:
    """Refuse a class where an object of it was meant."""
    # It can be called, but what that returns is an object and not what its method would.
    if isinstance(value, type):
        cure = f"It is the class: make one, {value.__name__}(...)."
        raise ArgumentTypeError(argument, value.__name__, accepted, cure)


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
    try:
        return float(value)
    except OverflowError:  # an int may have more digits than floats reach
        raise ArgumentError(argument, value, f"a number below {sys.float_info.max:g}", cure) from None


def positive_number(argument: str, value: object) -> float:
    """Return a finite number above 0."""
    return number_between(argument, value, sys.float_info.min)


_FEWEST_BYTES = 512
"""No memory has fewer bytes: a smaller number was meant in GiB."""


def no_bytes(argument: str, num_bytes: int, cure: str = "") -> None:
    """Refuse a number of bytes that can only be one of GiB."""
    if 0 < num_bytes < _FEWEST_BYTES:
        fact = f"{argument}={num_bytes} is {num_bytes} byte{'s' * (num_bytes > 1)}."
        cure = f"Pass {argument}='{num_bytes}GiB'{cure}."
        raise ArgumentError(argument, num_bytes, "bytes", cure, fact=fact)


def num_bytes(argument: str, value: object, accepted: str, least: int = 1) -> int:
    """Return the bytes that an int, or a text such as "24GiB", stands for."""
    # A share has nothing to be one of: there is no device whose memory it would be.
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ArgumentTypeError(argument, value, accepted)
    try:
        found = parse_bytes(value)
    except ValueError:
        found = -1  # refused below, like a number that is too low: with one error for both
    if found < least:
        raise ArgumentError(argument, value, accepted)
    return found


def one_of(argument: str, value: object, choices: tuple[str, ...]) -> str:
    """Return one of a few texts."""
    # Only a text can be one, and nothing else is compared: an array has an == of its own.
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(argument, value, f"one of {', '.join(map(repr, choices))}")
    return str(value)


def _is(value: object, text: str) -> bool:
    """Return whether a value is this text; objects with an == of their own are not."""
    return isinstance(value, str) and value == text


# Checks of arguments by their names, each of those that have to be looked at together: ``training.options`` says which
# argument has which.


def of_smallest(min_micro_batch: object, micro_batch: object, max_micro_batch: object) -> None:
    """Refuse a smallest micro-batch that the other arguments leave no room for."""
    if min_micro_batch is None:
        return
    smallest = positive_int("min_micro_batch", min_micro_batch)
    cure = "Lower it, or leave it out."
    if isinstance(max_micro_batch, int) and smallest > max_micro_batch:
        raise ArgumentError("min_micro_batch", smallest, f"at most max_micro_batch={max_micro_batch}", cure)
    if isinstance(micro_batch, int) and smallest > micro_batch:
        raise ArgumentError("min_micro_batch", smallest, f"at most micro_batch={micro_batch}", cure)
    # The one micro-batch of a short window may have fewer; what is wrong with a plan itself has a check of its own.
    plans = micro_batch if isinstance(micro_batch, Sequence) and not isinstance(micro_batch, str) else ()
    for plan in plans:
        sizes = plan if isinstance(plan, Sequence) and all(isinstance(size, int) for size in plan) else ()
        if len(sizes) > 1 and min(sizes) < smallest:
            raise ArgumentError("min_micro_batch", smallest, f"at most {min(sizes)}, as micro_batch has it", cure)


def of_smallest_window(min_micro_batch: int | None, smallest_window: int | None) -> None:
    """Refuse a smallest micro-batch that full windows have too few samples for.

    Raises:
        ArgumentError: they have.
    """
    if min_micro_batch is not None and smallest_window is not None and min_micro_batch > smallest_window:
        cure = "A window has no micro-batch that is larger than itself: lower it, or raise effective_batch."
        accepted = f"at most {smallest_window}, the samples of the smallest effective_batch"
        raise ArgumentError("min_micro_batch", min_micro_batch, accepted, cure)


def of_num_items(num_items: object) -> None:
    """Check what counts items."""
    # A number would be right for one micro-batch size at most, and it is not the user who chooses that.
    if isinstance(num_items, Mapping | list | tuple):  # of several losses
        named = num_items.items() if isinstance(num_items, Mapping) else enumerate(num_items)
        functions = {f"num_items[{name!r}]": count for name, count in named}
        if not functions:
            raise ArgumentError("num_items", num_items, "a function for each of the losses that are returned")
    else:
        functions = {} if num_items is None else {"num_items": num_items}
    for name, count in functions.items():
        no_class(name, count, "a function")
        function(name, count, ("micro_batch",), "how many items")


def of_patience(patience: object) -> None:
    """Check the seconds to wait for memory; without end is long, but no mistake."""
    # Asked of a number alone: what a tensor answers is no flag.
    if not (isinstance(patience, float) and patience == math.inf):
        number_between("patience", patience, 0)


def of_micro_batch(micro_batch: object) -> None:
    """Check a micro-batch that is "auto" or a number: there is no recorded run to repeat."""
    if not _is(micro_batch, "auto"):
        positive_int("micro_batch", micro_batch, "Leave it out to have it found.")


ON_PLATEAUS = (
    "Pass callbacks=[autoaccum.callbacks.ReduceOnPlateau()] beside validation_data instead, and leave lr_scheduler out."
)
"""What to do in the place of a scheduler that goes by validations."""


def of_lr_scheduler(lr_scheduler: object) -> None:
    """Check the function that makes a scheduler.

    Raises:
        ArgumentTypeError: it cannot be called with two arguments, or what it takes second is plainly something else
            than the number of steps.
    """
    if lr_scheduler is None:
        return
    made = getattr(lr_scheduler, "func", lr_scheduler)  # of a partial, what it calls
    name = getattr(made, "__name__", "")
    takes = positional(lr_scheduler)
    second = "" if takes is None else "".join(takes.names[1:2])
    # A number of steps would pass for it: ExponentialLR would have a gamma of 1,000. What others call it is their own.
    is_known = str(getattr(made, "__module__", "")).startswith(("torch.optim.", "transformers."))
    if is_known and second not in ("T_max", "total_iters"):
        cure = f"Write lambda optimizer, num_steps: {name}(optimizer, {second}=...)."
        accepted = f"a function (optimizer, num_steps) -> LRScheduler, and not one whose second parameter is {second}"
        raise ArgumentTypeError("lr_scheduler", name, accepted, ON_PLATEAUS if name == "ReduceLROnPlateau" else cure)
    cure = "For example lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps)."
    function("lr_scheduler", lr_scheduler, ("optimizer", "num_steps"), "LRScheduler", cure)


def of_optimizer(optimizer: object) -> None:
    """Check the function that makes an optimizer; one that is made already is no function."""
    # A class such as SGD is such a function. What cannot be called is refused where optimizers are known.
    if callable(optimizer):
        function("optimizer", optimizer, ("params",), "Optimizer")


def takes_trainer(callback: object) -> bool:
    """Return whether a callback is called with the record and the trainer: it needs two, or names the second so."""
    # A default may stand second for the callback's own use, as in ``lambda record, seen=[]: ...``.
    takes = positional(callback)
    return takes is not None and (takes.required >= 2 or takes.names[1:2] == ("trainer",))


def of_callbacks(callbacks: object) -> list[Any]:
    """Return the callbacks as a list: they may come as an iterator, which can be read only once."""
    return _callbacks(callbacks, "a list of functions (record) -> None or (record, trainer) -> None", has_trainer=True)


def of_event_callbacks(callbacks: object) -> list[Any]:
    """Return the callbacks of an Accumulator, which has no trainer to call them with."""
    return _callbacks(callbacks, "a list of functions (event) -> None", has_trainer=False)


def _callbacks(callbacks: object, accepted: str, *, has_trainer: bool) -> list[Any]:
    found: list[Any] = []
    # One by one, for what has indices can be iterated over, a dataset too, and need not come to an end.
    try:
        for callback in callbacks:  # type: ignore[attr-defined]
            no_class("callbacks", callback, accepted)
            is_given_two = has_trainer and takes_trainer(callback)
            one = "record" if has_trainer else "event"
            # Those of other trainers are objects with hooks, which nobody here would call.
            cure = "" if callable(callback) else "Ready ones are in autoaccum.callbacks and autoaccum.reporting."
            function("callbacks", callback, (one, "trainer") if is_given_two else (one,), "None", cure)
            found.append(callback)
    except ArgumentError:
        raise
    except Exception as error:
        cure = f"A single function goes into a list; reading this one failed: {shown(error)}."
        raise ArgumentTypeError("callbacks", callbacks, accepted, cure) from error
    return found


TAKEN = ("loss", "validation_loss", "seconds", "samples")
"""Names of what validations and sweeps report already; no metric of a user's may have one of them."""


def of_validation(validation_data: object, validate_every: object, metrics: object) -> None:
    """Check the arguments that say when validations are, and what they report beside the loss."""
    # With nothing to validate on, it would be left out in silence for the whole run.
    if validate_every is not None:
        # "epoch", as checkpoint_every takes it, is what nothing says.
        cure = "It is in samples. Leave it out to validate at the end of each epoch."
        positive_int("validate_every", validate_every, cure)
        if validation_data is None:
            cure = "Pass what to validate on, or leave validate_every out."
            raise ArgumentError("validate_every", validate_every, "validation_data beside it", cure)
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError("metrics", metrics, "names and functions, {'accuracy': function}")
    # A mapping of the user's own class is read once, here.
    items = list(metrics.items())
    # They name entries of records and a sweep's metrics, of which a command line writes several with commas between.
    for name, metric in items:
        if not isinstance(name, str):
            raise ArgumentTypeError("metrics", name, "names that are texts, such as 'accuracy'")
        if not name.isidentifier():
            raise ArgumentError("metrics", name, "names of letters, digits and underscores, such as 'top_5'")
        if name in TAKEN:
            cure = "It would stand for two things: choose another."
            raise ArgumentError("metrics", name, f"other names than {', '.join(TAKEN)}", cure)
        no_class("metrics", metric, "a function for each name")
        if not callable(metric):
            raise ArgumentTypeError("metrics", {name: metric}, "a function for each name")
        function(f"metrics[{name!r}]", metric, ("outputs", "targets"), "a tensor")
    if items and validation_data is None:
        cure = "Pass what to compute them on, or leave metrics out."
        raise ArgumentError("metrics", ", ".join(name for name, _ in items), "validation_data beside them", cure)


Cadence = tuple[Literal["steps", "seconds", "epoch"], float]
"""How often: every so many steps or seconds, or at each epoch's end."""

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def cadence(argument: str, value: object) -> Cadence:
    """Read how often: steps as an int, a time as "30s", "10m" or "2h", or "epoch".

    >>> cadence("checkpoint_every", "10m")
    ('seconds', 600.0)
    """
    accepted = "a number of steps, a time such as '30s', '10m' or '2h', or 'epoch'"
    if _is(value, "epoch"):
        return "epoch", 1
    # A unit is asked for: "10" may be steps or seconds to whoever reads it.
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", value)
        if found is None or float(found[1]) == 0:
            raise ArgumentError(argument, value, accepted)
        return "seconds", float(found[1]) * _SECONDS[found[2]]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(argument, value, accepted)
    if not 1 <= value < 2**63:
        raise ArgumentError(argument, value, accepted)
    return "steps", value


def of_checkpoint_every(checkpoint_every: object) -> Cadence:
    """Return how often checkpoints are written: every ten minutes, unless told otherwise."""
    return cadence("checkpoint_every", "10m" if checkpoint_every is None else checkpoint_every)


_LONGEST_PATH = 4096
"""Characters that no path reaches: Linux takes no more bytes, and other systems take fewer."""


def path(argument: str, value: object) -> str:
    """Return a path as a text: one that the system can be asked for, whether it is there or not."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(argument, value, "a path")
    try:
        text = os.fspath(value)
        # What Python cannot write in the system's encoding, and a NUL, would fail where it is first opened.
        is_possible = isinstance(text, str) and b"\0" not in os.fsencode(text) and len(text) < _LONGEST_PATH
    except Exception:  # a path of the user's own class, or half a surrogate pair
        is_possible = False
    if not is_possible:
        raise ArgumentError(argument, value, "a path that a file system can have, without NUL")
    if not text:  # pathlib reads it as the current directory, which is seldom what an unset variable means
        raise ArgumentError(argument, value, "a path", "Pass '.' for the directory that you are in.")
    return text


def of_run_directory(run_dir: object, checkpoint_every: object, resume: object) -> None:
    """Check the arguments that say what outlives the process."""
    if run_dir is not None:
        path("run_dir", run_dir)
    if run_dir is None and checkpoint_every is not None:
        cure = "Pass where checkpoints are to go, or leave checkpoint_every out."
        raise ArgumentError("checkpoint_every", checkpoint_every, "run_dir beside it", cure)
    if not _is(resume, "auto") and not isinstance(resume, bool):
        raise ArgumentError("resume", resume, "'auto', True or False")
    if resume is True and run_dir is None:
        raise ArgumentError("resume", resume, "run_dir beside it", "Pass the directory of the run to go on with.")


def recorded_plans(micro_batch: object) -> list[tuple[int, ...]]:
    """Return the plans of a recorded run, one a window; none when the micro-batch is a number or to be found."""
    accepted = "'auto', an int of at least 1, or a list of plans, each a tuple of micro-batch sizes"
    if _is(micro_batch, "auto"):
        return []
    if isinstance(micro_batch, str) or not isinstance(micro_batch, Sequence):  # a str is a Sequence of str
        positive_int("micro_batch", micro_batch, "Leave it out to have it found.")
        return []
    if not micro_batch:
        raise ArgumentError("micro_batch", micro_batch, accepted)
    # What they sum to is compared with the windows once the data are known: see ``Budget.check_plans``.
    plans = []
    for plan in micro_batch:
        if isinstance(plan, str) or not isinstance(plan, Sequence) or not plan:
            raise ArgumentTypeError("micro_batch", micro_batch, accepted)
        plans.append(tuple(positive_int("micro_batch", size) for size in plan))
    return plans
