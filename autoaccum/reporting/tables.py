"""Tables of a page, and those in which runs are compared: they show only what differs."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoaccum._units import format_bytes
from autoaccum.reporting.amounts import format_rate, format_seconds
from autoaccum.reporting.columns import Run
from autoaccum.reporting.facts import Best, Facts
from autoaccum.reporting.plots import COLORS

ROWS = 200
"""Show at most so many rows of a table; of more, the first and the last ones."""
_HEAD = (
    "run", "state", "effective batch", "samples", "steps", "training time", "samples/s", "loss at the end",
    "best validation", "peak", "most of the limit", "out of memory", "re-plans", "prediction off by",
    "gradient off by", "ranks",
)  # fmt: skip
"""Heads of the columns of a table of runs."""


def row_of(at: int, facts: Facts, label: str) -> list[str]:
    """Return the cells of the run at this place, beside a swatch of the colour that it has in the pictures."""
    return [
        f'<span class="swatch" style="background: {COLORS[at % len(COLORS)]}"></span>{escaped(label)}',
        escaped(facts.state),
        escaped(facts.effective_batch),
        number_cell(facts.num_samples),
        number_cell(facts.num_steps),
        escaped(format_seconds(facts.seconds)),
        "-" if facts.samples_per_second is None else format_rate(facts.samples_per_second),
        number_cell(facts.loss, ".4g"),
        _best_cell(facts.best),
        escaped(format_bytes(facts.peak_bytes)),
        number_cell(facts.limit_share, ".0%"),
        number_cell(facts.num_out_of_memory),
        number_cell(facts.num_replans),
        number_cell(facts.prediction_error, "+z.1%"),
        number_cell(facts.gradient_error, ".1e"),
        number_cell(facts.num_ranks),
    ]


def _best_cell(best: Best | None) -> str:
    """Return the best validation as the text of a cell, with the name of a metric that is not the loss."""
    if best is None:
        return "-"
    return escaped(f"{best.value:.4g}" if best.metric == "loss" else f"{best.metric} {best.value:.4g}")


def compared(rows: Sequence[list[str]]) -> str:
    """Return the table of runs, without the columns that are the same in all of them: these are told below it."""
    differ, alike = [0], []  # the run's name is always there
    for at, head in enumerate(_HEAD[1:], start=1):
        values = {row[at] for row in rows}
        if len(values) > 1:
            differ.append(at)
        elif values != {"-"}:  # what no run has is no news
            alike.append(f"{escaped(head)} {rows[0][at]}")
    table = html_table(
        [_HEAD[at] for at in differ],
        [[row[at] for at in differ] for row in rows],
        numbers=[place for place, at in enumerate(differ) if at > 2],
        cuts=[place for place, at in enumerate(differ) if at in (0, 2)],
    )
    return f'{table}\n<p class="what">The same in all: {" · ".join(alike)}.</p>' if alike else table


def differences(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the table of what the runs were asked and run on differently; nothing where all of it is the same."""
    asked = [flat({**without_trained(run.config), **_known(run)}) for run in runs]
    found: dict[str, list[str]] = {}
    # Compared as the texts that are shown. A key that a run lacks is null in it.
    for key in dict.fromkeys(key for values in asked for key in values):
        values = [value_text(one.get(key)) for one in asked]
        if len(set(values)) > 1:
            found[key] = values
    # What was made of an argument differs as that does: "optimizer group 0 lr" says nothing beside "lr".
    said = {key: values for key, values in found.items() if found.get(key.split()[-1]) != values or " " not in key}
    rows = [[escaped(key), *map(escaped, values)] for key, values in said.items()]
    return f"<h2>What differs</h2>\n{html_table(('', *labels), rows)}" if rows else ""


def _known(run: Run) -> dict[str, Any]:
    """Return on what a run has run, without the moment, which is another for each."""
    return {name: value for name, value in without_details(run.environment).items() if name != "started"}


def without_details(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment without what tells that code or data have changed: digests, which nobody reads."""
    return {name: value for name, value in environment.items() if name != "details"}


def without_trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what it says twice: the arguments that are among what decides what is trained."""
    asked = {name: value for name, value in config.items() if name not in ("trained", "run_dir")}
    trained = config.get("trained")
    if isinstance(trained, Mapping):
        for name, value in trained.items():
            # What was made of an argument, entry by entry, says more than the argument, which may be None.
            if name not in asked or isinstance(value, Mapping):
                asked[name] = _without_first_lr(value) if name == "optimizer" else value
    return asked


def _without_first_lr(optimizer: Any) -> Any:
    """Return an optimizer's description without what a scheduler has made of each ``lr`` for the first step alone."""
    if not isinstance(optimizer, Mapping):  # the user may have edited the file
        return optimizer
    found = {}
    for name, group in optimizer.items():
        is_scheduled = isinstance(group, Mapping) and "initial_lr" in group
        found[name] = {key: group[key] for key in group if key != "lr"} if is_scheduled else group
    return found


def flat(values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return the entries of nested mappings side by side.

    >>> flat({"seed": 0, "data": {"samples": 5}})
    {'seed': 0, 'data samples': 5}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{name} {key}".strip()
        found |= flat(value, path) if isinstance(value, Mapping) and value else {path: value}
    return found


def html_table(
    head: Sequence[str], rows: list[list[str]], *, numbers: Iterable[int] = (), cuts: Iterable[int] = ()
) -> str:
    """Return a table, whose cells are HTML already and whose head is text.

    Args:
        head: titles of the columns; all empty for a table without a head.
        rows: of as many cells.
        numbers: columns that are aligned to the right.
        cuts: columns whose cells are not broken into lines.
    """
    # By the column's index; a column of both kinds is one of numbers.
    kinds = {**dict.fromkeys(cuts, ' class="cut"'), **dict.fromkeys(numbers, ' class="number"')}

    def line(cells: Sequence[str], tag: str) -> str:
        filled = "".join(f"<{tag}{kinds.get(at, '')}>{cell}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{filled}</tr>\n"

    # A run with thousands of re-plans is told by how it began and how it ended.
    shown = rows if len(rows) <= ROWS else [*rows[: ROWS // 2], *rows[-ROWS // 2 :]]
    lines = [line(row, "td") for row in shown]
    if len(rows) > ROWS:
        lines.insert(ROWS // 2, f'<tr><td colspan="{len(head)}">… {len(rows) - ROWS:,} more …</td></tr>\n')
    # A table of names and values explains itself.
    header = line([escaped(title) for title in head], "th") if any(head) else ""
    return f'<div class="wide"><table>\n{header}{"".join(lines)}</table></div>'


def value_text(value: Any) -> str:
    """Return a value of a configuration as a text."""
    return value if isinstance(value, str) else json.dumps(value)  # as it stands in config.json


def number_cell(value: float | None, form: str = ",") -> str:
    """Return a number as the text of a cell, a dash for None."""
    return "-" if value is None else escaped(format(value, form))


def escaped(text: object) -> str:
    """Return a text as it stands in a page, whatever is in it: names of files and models are a stranger's."""
    return html.escape(str(text))
