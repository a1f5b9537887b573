"""How errors and warnings, which are written for Python, spell arguments on the command line."""

from __future__ import annotations

import inspect
import re
import shlex
import types
from collections.abc import Mapping
from contextvars import ContextVar

from autoaccum.cli.options import writable

offered: ContextVar[Mapping[str, inspect.Parameter]] = ContextVar("offered", default=types.MappingProxyType({}))
"""The parameters of the command that runs, by their names in Python."""


_NUMBER = r"-?\d[\w.+-]*"
_ASSIGNED = (
    r"(?<![\w.(-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\"[^\"]*\"|-?\w+(?:\.\d+)?(?:e-\d+)?|"
    rf"\({_NUMBER}, {_NUMBER}\)|\[{_NUMBER}(?:, {_NUMBER})*\])"
)
"""An argument with its value, as errors begin and cures say it; a range and a list of numbers among them."""
_RANGES = ("lr", "effective_batch")
"""What a sweep takes as a range or a list; of others both are Python's alone."""
_TWICE = r"[(\[][\w., -]+[)\]] or (?P<text>'[\w.:,-]+')"
"""A value of Python, and the text that stands for it."""
_SET = r"recipe_arguments(?:\['(?P<set>\w+)'\]=)?"
"""What ``--set`` passes: all of it, or one of a recipe's parameters."""
_ALONE = r"(?<![\w.('\"/-])(?P<alone>[a-z]+(?:_[a-z]+)+)(?![\w=(\['\"/]|\.\w)"
"""An argument without a value, which an underscore tells from words of English."""
_WORD = r"(?P<before>\b(?:another|[Pp]ass|Use|[Ll]eave|one of) )(?P<word>[a-z]+)(?![\w=(\['])"
"""One of a single word, told by what stands before it."""


def as_options(text: str) -> str:
    """Return a text with arguments as the command that runs takes them.

    ``resume=False`` is ``--resume false``, ``lr=(1e-4, 0.1)`` is ``--lr 1e-4:0.1``, and what was left out has its name
    alone.
    """

    def option(found: re.Match[str]) -> str:
        if found[0].startswith("recipe_arguments"):
            return f"--set {found['set']}=" if found["set"] else "--set"
        if found["text"]:
            return found["text"]
        name = found["name"] or found["alone"] or found["word"]
        parameter = offered.get().get(name)
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            return found[0]
        flag = name.replace("_", "-")
        if found["name"] is None:
            return f"{found['before'] or ''}--{flag}"
        value = found["value"].strip("'\"")
        if value == "None":  # what was left out, which no command line can say: an error begins by its name
            return f"--{flag}" if found.start() == 0 else found[0]
        if found["value"][0] in "([" and name not in _RANGES:
            return found[0]
        if found["value"][0] in "([":
            value = value[1:-1].replace(", ", ":" if value[0] == "(" else ",")
        if writable(parameter.annotation) == (bool,):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        return f"--{flag} {value.lower() if value in ('True', 'False') else shlex.quote(value)}"

    return re.sub("|".join((_SET, _TWICE, _ASSIGNED, _WORD, _ALONE)), option, text)
