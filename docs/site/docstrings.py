"""Makes Markdown of docstrings that are written for people who read the code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n)*)+", re.MULTILINE)
"""Statements with what they print, up to the next empty line."""


def as_markdown(text: str) -> str:
    """Return a docstring with its examples in fences, and without the colons that stand before a picture of text."""
    text = re.sub(r"^::\n", "", f"{text}\n", flags=re.MULTILINE)
    return EXAMPLE.sub(r"```python\n\g<0>```\n", text)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it was read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite that of the package, which is an object of its own kind; and write out what ``fit`` takes."""
        self.on_object(obj=pkg)
        fields = [field for field in pkg["training.options.FitArguments"].attributes.values() if field.name != "_"]
        kinds = griffe.ParameterKind
        pkg["training.fit.fit"].parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    field.name,
                    annotation=field.annotation,
                    kind=kinds.keyword_only if field.name not in ("model", "data") else kinds.positional_or_keyword,
                    default=field.value,
                )
                for field in fields
            )
        )
