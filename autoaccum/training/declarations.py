"""What functions take, read off their signatures and docstrings; and the checks that are made of it.

The signature and the ``Args:`` of a function are the declaration of its arguments: the command line makes its options
of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument, as a function takes it."""

    name: str
    type: Any
    default: Any
    text: str
    is_required: bool
    """Whether a value has to be passed."""


@functools.cache
def arguments_of(function: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a function, or of a class, by their names, with the texts of its docstring."""
    described = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    texts = _texts(inspect.getdoc(described) or "")
    return {
        name: Argument(
            name=name,
            type=found.annotation,
            default=found.default,
            text=texts.get(name, ""),
            is_required=found.default is found.empty,
        )
        for name, found in inspect.signature(function, eval_str=True).parameters.items()
    }


def _texts(doc: str) -> dict[str, str]:
    """Return what a docstring says of each argument, on one line.

    >>> _texts('''Train.
    ...
    ... Args:
    ...     model: the module
    ...         to train.
    ...     **options: any others.
    ...
    ... Returns:
    ...     nothing.''')
    {'model': 'the module to train.', 'options': 'any others.'}
    """
    section = doc.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = [" ".join(entry.split()).partition(": ") for entry in re.split(r"\n {4}(?=\S)", section)]
    return {name.lstrip("*"): text for name, _, text in entries}


def taking(declared: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Make a decorator that gives a function the parameters of ``declared``, to which it passes them on."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(declared, eval_str=True).replace(return_annotation=returned)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def taking_method(
    declared: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """Make such a decorator of methods."""

    def decorate(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(declared, eval_str=True).parameters.values()
        method.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        return method

    return decorate


def values_of(given: Any) -> dict[str, Any]:
    """Return the values of a dataclass by the names of its fields, themselves and no copies."""
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}


class Checked:
    """What the checks of arguments have returned: ``checked[schedule_of]`` is the schedule."""

    def __init__(self, results: Mapping[Callable[..., Any], Any]) -> None:
        self._results = results

    def __getitem__(self, check: Callable[..., T]) -> T:
        """Return what that check has returned."""
        # By the function and not by a name, so that type checkers know what comes of it.
        return self._results[check]  # type: ignore[no-any-return]

    def get(self, check: Callable[..., T]) -> T | None:
        """Return what that check has returned; None where it was not made."""
        return self._results.get(check)


def check(
    given: Mapping[str, Any], each: Mapping[str, Callable[[str, Any], Any]], together: Sequence[Callable[..., Any]]
) -> Checked:
    """Check arguments: each by itself, then those that make sense together, in a fixed order.

    Args:
        given: their values by their names.
        each: (name, value) -> anything; for an argument that is looked at alone.
        together: are called with the arguments that their parameters are named after, where the first of these is
            given; others that are not are None.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
    """
    for name, alone in each.items():
        if name in given:
            alone(name, given[name])
    results = {}
    for function in together:
        names = list(inspect.signature(function).parameters)
        if names[0] in given:
            results[function] = function(**{name: given.get(name) for name in names})
    return Checked(results)
