"""How an argument is declared, and what can be asked of declared arguments.

A class of options is a frozen dataclass whose fields are made by ``option``: see ``training.options`` for those of
``fit``, and ``sweeps.options`` for those of ``sweep``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeVar, cast, dataclass_transform, overload

T = TypeVar("T")
C = TypeVar("C", bound=type)
_AS_IN_FIT: Any = object()  # None is a default like any other, and dataclasses' MISSING says that there is none

Verb = Literal["probe", "accumulator", "check"]
"""What else takes arguments of ``fit``."""

Decides = Literal["training", "budget", "how"]
"""What an argument decides.

* ``training``: what is trained. A run that is resumed has to be given the same value.
* ``budget``: how long. Of several ways to say it, one replaces the other.
* ``how``: by what means, what is looked at and what is kept; or it decides what is trained, and a run's directory
  describes the object itself: the model, the data, the optimizer and the schedules.
"""

InSweeps = Literal["searched", "shared", "own"]
"""What a sweep does with an argument: its search may set it for each trial; all trials share it; or none passes it on,
as the recipe returns it or the sweep itself decides it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """How an argument of ``fit`` differs where something else takes it too; what is left out is as in ``fit``."""

    # Empty texts and None stand for "as in fit", so that only what differs is written down.
    name: str = ""
    text: str = ""
    annotation: str = ""
    default: Any = _AS_IN_FIT
    """MISSING where a value has to be passed."""
    check: Callable[..., Any] | None = None
    is_positional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument, as a function takes it."""

    name: str
    annotation: str
    """Its type, as it is written in a signature."""
    default: Any
    """MISSING where a value has to be passed."""
    text: str
    check: Callable[..., Any] | None
    """Its parameters bear the names of the arguments that it looks at; see ``check``."""
    is_positional: bool
    is_rest: bool
    """Whether it gathers further arguments by their names."""
    # The defaults of ``option`` are the common case: what decides nothing of training may be searched by a sweep.
    decides: Decides
    in_sweeps: InSweeps
    module: str
    """Where it is declared, and the names in its type are known."""

    @property
    def is_required(self) -> bool:
        """Return whether a value has to be passed."""
        return self.default is MISSING

    @property
    def type(self) -> Any:
        """Return the type itself, of which ``annotation`` is the text."""
        # With postponed annotations, fields know the texts of their types: which is what signatures are written of.
        return eval(self.annotation, vars(sys.modules[self.module]))


# Two forms, for type checkers: with a default an option has its type, and without one the field says it.
@overload
def option(
    text: str,
    *,
    default: T,
    check: Callable[..., Any] | None = None,
    decides: Decides = "how",
    in_sweeps: InSweeps = "searched",
    probe: Own | None = None,
    accumulator: Own | None = None,
    in_check: Own | None = None,
) -> T: ...


@overload
def option(
    text: str,
    *,
    check: Callable[..., Any] | None = None,
    is_positional: bool = False,
    is_rest: bool = False,
    decides: Decides = "how",
    in_sweeps: InSweeps = "searched",
    probe: Own | None = None,
    accumulator: Own | None = None,
    in_check: Own | None = None,
) -> Any: ...


def option(text: str, *, default: Any = MISSING, **facts: Any) -> Any:
    """Declare an argument: a field of a class that ``arguments`` decorates.

    Args:
        text: what users read of it.
        default: what it is when it is left out; without one it has to be passed.
        facts: what else an ``Argument`` holds; and under ``probe``, ``accumulator`` and ``in_check`` how it differs
            there, for those arguments that these take too.
    """
    # Kept as a field's metadata, which dataclasses hand on and do not look at.
    return dataclasses.field(default=default, metadata={"text": text, **facts})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def arguments(cls: C) -> C:
    """Make a class of options a frozen dataclass; two of them are equal only if they are the same."""
    # Values may be tensors and data sets, of which neither a comparison nor a text would be of use.
    decorated: Any = dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)(cls)
    return cast(C, decorated)


def arguments_of(declared: type, verb: Verb | None = None) -> dict[str, Argument]:
    """Return the arguments that a class declares by their names, those that stand before the ``*`` first.

    Args:
        declared: a class that ``arguments`` has decorated.
        verb: return those that it shares with this, as they are there.
    """
    found = []
    for field in dataclasses.fields(declared):
        facts = dict(field.metadata)  # a copy, for the field's own serves every caller
        own = {
            "probe": facts.pop("probe", None),
            "accumulator": facts.pop("accumulator", None),
            "check": facts.pop("in_check", None),  # by another name, for ``check`` is what checks an argument
        }
        differs = Own() if verb is None else own[verb]
        if differs is None:  # an argument of fit alone
            continue
        argument = Argument(
            name=differs.name or field.name,
            annotation=differs.annotation or str(field.type),
            default=field.default if differs.default is _AS_IN_FIT else differs.default,
            text=differs.text or facts["text"],
            check=differs.check or facts.get("check"),
            is_positional=differs.is_positional or facts.get("is_positional", False),
            is_rest=facts.get("is_rest", False),
            decides=facts.get("decides", "how"),
            in_sweeps=facts.get("in_sweeps", "searched"),
            module=declared.__module__,
        )
        found.append(argument)
    # An optimizer is positional in one place and named in another. The sort keeps the order within both kinds.
    found.sort(key=lambda argument: not argument.is_positional)
    return {argument.name: argument for argument in found}


def values_of(given: Any) -> dict[str, Any]:
    """Return the values of such an object by their arguments' names."""
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}


class Checked:
    """What the checks of arguments have returned: ``checked[schedule_of]`` is the schedule."""

    def __init__(self, results: Mapping[Callable[..., Any], Any]) -> None:
        self._results = results

    def __getitem__(self, check: Callable[..., T]) -> T:
        """Return what that check has returned."""
        # By the function and not by a name, so that type checkers know what comes of it.
        return self._results[check]  # type: ignore[no-any-return]


def check(declared: Mapping[str, Argument], order: Sequence[Callable[..., Any]], /, **values: Any) -> Checked:
    """Make the checks of these arguments, each once, in this order.

    A check is called with the arguments that its parameters are named after. What the caller does not take is None.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
    """
    # Several arguments may name the same check.
    named = {argument.check for argument in declared.values()}
    results = {}
    for function in order:  # and not that of the arguments: a check may need more than one of them
        if function in named:
            # What a check wants to see it says by the names of its parameters, so none is handed on twice.
            results[function] = function(**{name: values.get(name) for name in inspect.signature(function).parameters})
    return Checked(results)
