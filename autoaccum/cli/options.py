"""Options of the command line, made from the declared arguments of the functions that commands call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Parameter, Token

from autoaccum.training.recipes import FORMS

if TYPE_CHECKING:  # it takes torch with it, which `plan` and `--help` have no use for
    from autoaccum.training.declarations import Argument

_RECIPE_HELP = f"{FORMS}: a function (recipe() when none is named) that returns fit's arguments as a dict."

Recipe = Annotated[str, Parameter(help=_RECIPE_HELP)]
Settings = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        help="a parameter of the recipe's function, as NAME=VALUE: a number, true, false, none, JSON, or else a text. "
        "It may be given several times.",
        show_default=False,
        negative=(),
    ),
]
Json = Annotated[
    bool,
    Parameter(help="print one JSON document on standard output, and nothing else.", show_default=False, negative=()),
]


def command(run: Callable[..., int | None], offered: Iterable[inspect.Parameter], doc: str = "") -> Callable[..., Any]:
    """Return ``run`` with options in place of its ``**options``.

    cyclopts passes on only what was given, so the defaults, though shown in the help, stay the function's business.

    Args:
        run: a command: its positional arguments, its own options, and any others by their names.
        offered: parameters of the function that it calls; those that a command line can write become options.
        doc: a docstring with the texts of those that bring none.
    """
    # A command's own come first in the help, as what it cannot do without.
    own = inspect.signature(run, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [option for parameter in offered if (option := _option(parameter)) is not None]

    # A new function each time: what cyclopts reads is attached to it, and ``run`` stays what it is.
    def call(*args: Any, **kwargs: Any) -> int | None:
        return run(*args, **kwargs)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__ = doc
    return call


def of_declared(declared: Iterable[Argument]) -> list[inspect.Parameter]:
    """Return declared arguments as parameters; a recipe may say any of them, so none has to be given."""
    return [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY,
            # None stands for nothing here, and is never passed on.
            default=None if argument.is_required else argument.default,
            annotation=Annotated[argument.type, Parameter(help=argument.text)],
        )
        for argument in declared
    ]


def of_function(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, whose docstring has the texts."""
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _option(parameter: inspect.Parameter) -> inspect.Parameter | None:
    """Return an option for a parameter; None where no text can stand for it."""
    members = writable(parameter.annotation)
    if not members:
        return None
    # Declared arguments bring their texts in their annotation, those of a plain function have them in its docstring.
    helps = [extra.help for extra in getattr(parameter.annotation, "__metadata__", ())]
    converter = None if members == (bool,) else _convert
    # With no help at all, even None, the docstring's text is shown.
    shown = Parameter(converter=converter, help=helps[0]) if helps else Parameter(converter=converter)
    # With None, where that is the default: once anything has imported pydantic, cyclopts has it judge what is left out.
    accepted = reduce(or_, members) | None if parameter.default is None else reduce(or_, members)
    annotation: Any = Annotated[accepted, shown]
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


def writable(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a type that can be written on a command line; none of them where there are none.

    >>> writable(int | Literal["auto"] | list[int] | None)
    (<class 'int'>, typing.Literal['auto'])
    """
    if get_origin(annotation) is Annotated:
        return writable(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for one in get_args(annotation) for member in writable(one))
    return (annotation,) if annotation in (int, float, bool, str) or get_origin(annotation) is Literal else ()


def _convert(annotation: Any, tokens: Sequence[Token]) -> Any:
    """Return the value of a text, by the narrowest type that takes it.

    cyclopts' own conversion would round 2.5 to an int, and so read a memory limit of 0.5 as 0 bytes.
    """
    text = tokens[0].value
    members = writable(annotation)
    # Before numbers and other texts, for "auto" or "true" would pass for any text.
    words = {str(choice): choice for member in members for choice in get_args(member)}
    if bool in members:
        words |= {"true": True, "false": False}
        text = text.lower() if text in ("True", "False") else text  # as Python has them
    if text in words:
        return words[text]
    # From the narrowest on: "8" is the number where one is taken, and a text where none is.
    for narrow in (int, float, str):
        if narrow in members:
            with suppress(ValueError):
                return narrow(text)
    numbers = ["a number"] if float in members else ["a whole number"] if int in members else []
    raise ValueError(f"expected {' or '.join([*words, *numbers])}, not {text!r}")
