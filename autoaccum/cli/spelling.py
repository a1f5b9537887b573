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


_ASSIGNED = r"(?<![\w.(-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\"[^\"]*\"|-?\w+(?:\.\d+)?)"
"""An argument with its value, as errors begin and cures say it."""
_SET = r"recipe_arguments(?:\['(?P<set>\w+)'\]=)?"
"""What ``--set`` passes: all of it, or one of a recipe's parameters."""
_ALONE = r"(?<![\w.('\"/-])(?P<alone>[a-z]+(?:_[a-z]+)+)(?![\w=(\['\"/]|\.\w)"
"""An argument without a value, which an underscore tells from words of English."""
_WORD = r"(?P<before>\b(?:another|[Pp]ass|one of) )(?P<word>[a-z]+)(?![\w=(\['])"
"""One of a single word, told by what stands before it."""


def as_options(text: str) -> str:
    """Return a text with arguments as the command that runs takes them: ``resume=False`` as ``--resume false``."""

    def option(found: re.Match[str]) -> str:
        if found[0].startswith("recipe_arguments"):
            return f"--set {found['set']}=" if found["set"] else "--set"
        name = found["name"] or found["alone"] or found["word"]
        parameter = offered.get().get(name)
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            return found[0]
        flag = name.replace("_", "-")
        if found["name"] is None:
            return f"{found['before'] or ''}--{flag}"
        value = found["value"].strip("'\"")
        if value == "None":  # what was left out, which no command line can say
            return found[0]
        if writable(parameter.annotation) == (bool,):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        return f"--{flag} {value.lower() if value in ('True', 'False') else shlex.quote(value)}"

    return re.sub("|".join((_SET, _ASSIGNED, _WORD, _ALONE)), option, text)
