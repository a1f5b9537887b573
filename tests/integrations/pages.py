"""The pages on other libraries: their code, and both halves of their diffs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language on a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```\n", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def halves(diff: str) -> tuple[str, str]:
    """Return what a diff begins with, and what it makes of it."""
    lines = diff.splitlines()
    return (
        "\n".join(line[1:] for line in lines if line[:1] != "+"),
        "\n".join(line[1:] for line in lines if line[:1] != "-"),
    )


def namespace_after(page: str, code: str) -> dict[str, Any]:
    """Run the Python of a page, then some code; return what is there then."""
    namespace: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(block, namespace)
    exec(code, namespace)
    return namespace
