"""``--set NAME=VALUE``: parameters of a recipe, as they are written on a command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from autoaccum.errors import ArgumentError

FORM = "NAME=VALUE"
_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""What stands for a truth value or nothing, in Python's spelling and in JSON's."""


def parameters_of(texts: Iterable[str] | None) -> dict[str, Any]:
    """Return values by the names of a recipe's parameters.

    >>> parameters_of(["width=64", "lr=1e-3", "bias=False", "act=gelu", "sizes=[1, 2]", "tag='3'"])
    {'width': 64, 'lr': 0.001, 'bias': False, 'act': 'gelu', 'sizes': [1, 2], 'tag': '3'}

    Raises:
        ArgumentError: a text is not of that form, or names a parameter once more.
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError("set", text, FORM, "Write --set width=64, once for each parameter of the recipe.")
        # The last one might be meant as well as the first.
        if name in found:
            raise ArgumentError("set", text, f"one value for {name}, which is {found[name]!r} already")
        found[name] = value_of(value)
    return found


def value_of(text: str) -> Any:
    """Return the value of a text: a number, a truth value, None, a list or a dict of JSON, or else the text itself.

    Quotes around a text are taken off, so that ``'3'`` is no number.

    Raises:
        ArgumentError: it begins as a list, a dict or a quoted text does, and is none.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # From the narrowest on: 64 is an int, 64.0 and 1e3 are floats.
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    # Shells leave single quotes inside of double ones, which JSON does not know.
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1]
    if text[:1] in ("[", "{", '"'):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ArgumentError("set", text, f"a value that JSON can read ({error})") from None
    return text
