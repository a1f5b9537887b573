"""What results show of themselves, in a line and in a notebook: a few facts, and not all that they hold."""

from __future__ import annotations

from html import escape

Facts = dict[str, object]
"""What is shown, by its name."""


def as_line(title: str, facts: Facts) -> str:
    """Return facts as the ``repr`` of an object.

    >>> as_line("Result", {"steps": 3, "loss": 0.5})
    'Result(steps=3, loss=0.5)'
    """
    return f"{title}({', '.join(f'{name}={value}' for name, value in facts.items())})"


def as_table(title: str, facts: Facts) -> str:
    """Return facts as a table in HTML, as notebooks show it.

    >>> as_table("Result", {"steps": 3})
    '<table><caption>Result</caption><tr><th>steps</th><td>3</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
