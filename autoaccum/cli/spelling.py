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


def as_options(text: str) -> str:
    """Return a text with arguments as the command that runs takes them: ``resume=False`` as ``--resume false``."""

    def option(found: re.Match[str]) -> str:
        parameter = offered.get().get(found["name"])
        flag, value = found["name"].replace("_", "-"), found["value"].strip("'\"")
        # What was left out is None, which no command line can say.
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY or value == "None":
            return found[0]
        if writable(parameter.annotation) == (bool,):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        return f"--{flag} {value.lower() if value in ('True', 'False') else shlex.quote(value)}"

    return re.sub(r"(?<![\w.(-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\"[^\"]*\"|\w+(?:\.\d+)?)", option, text)
