"""The report: one page of HTML for a run or several, that needs no network and runs no script."""

from __future__ import annotations

import base64
import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._version import __version__
from autoaccum.memory import clock
from autoaccum.reporting.columns import Run, load_run
from autoaccum.reporting.facts import Facts, facts_of, replans
from autoaccum.reporting.lines import cut_text, format_seconds
from autoaccum.reporting.plots import pictures, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 200
"""Show at most so many rows of a table: the first and the last ones."""
_CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SIZES = "A plan is micro-batch x accumulation steps: 8 x 32 is 32 micro-batches of 8 samples."


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The page that ``write_report`` wrote, and the facts of its runs."""

    path: Path
    runs: tuple[Facts, ...]


def write_report(run_dirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Report:
    """Write ``report.html`` about a run, to ``output`` or its directory.

    Several runs are compared in ``comparison.html``, in the first one's directory. An ``output`` that ends in .html or
    .htm is the page itself.

    Raises:
        NoHistoryError: a directory holds no ``history.jsonl``.
        OSError: something cannot be read or written.
    """
    # Everything is read before anything is written, so that a missing run leaves no half a page.
    runs = [load_run(run_dir) for run_dir in run_dirs]
    facts = tuple(facts_of(run) for run in runs)
    # Numbered, because two runs may have directories of the same name.
    labels = [f"{number}: {one.name}" for number, one in enumerate(facts, start=1)] if len(runs) > 1 else ["run"]
    figures = html_pictures(pictures(dict(zip(labels, runs, strict=True))))
    if len(runs) == 1:
        title, body = facts[0].title, _one(runs[0], facts[0], figures)
    else:
        title, body = ", ".join(one.name for one in facts), _several(runs, facts, labels, figures)
    path = page_path(runs[0].path, output, "report" if len(runs) == 1 else "comparison")
    write_page(path, title, body)
    return Report(path=path, runs=facts)


def page_path(folder: Path, output: str | os.PathLike[str] | None, name: str = "report") -> Path:
    """Return the file of a page: ``output`` if that is one, else the page of that name there, or in ``folder``."""
    if output is None:
        return folder / f"{name}.html"
    is_file = Path(output).suffix.lower() in (".html", ".htm") and not Path(output).is_dir()
    return Path(output) if is_file else Path(output) / f"{name}.html"


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page, in a folder that is made where there is none."""
    # In UTC, because nobody knows where the page is read.
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.stamp()))
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>autoaccum {escaped(__version__)}, written {written}</footer>\n</body>\n</html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: a browser may load it meanwhile, and a link in its place could lead anywhere.
    beside = path.with_name(f".{path.stem}-{os.getpid()}.html")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")  # names of files may hold any bytes
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _one(run: Run, facts: Facts, figures: str) -> str:
    """Return the body of a page about one run."""
    parts = [
        html_head(facts.title, _what(facts), run.environment),
        html_table(("", ""), facts.rows().items()),
        figures,
        *_tables(run),
        html_folded("Configuration", _asked(run)),
        html_folded("Environment", flat(_known(run))),
    ]
    if run.garbled:  # one line is usual after a kill
        parts.append(f"<p>Lines of the history that could not be read: {run.garbled:,}.</p>")
    return "\n".join(filter(None, parts))


def _several(runs: Sequence[Run], facts: Sequence[Facts], labels: Sequence[str], figures: str) -> str:
    """Return the body of a page about several runs, a column for each."""
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        html_table(("", *labels), _side_by_side([one.rows() for one in facts], "-")),
        figures,
    ]
    # Of what was asked and what it ran on, only what differs; every run has a start of its own.
    known = [{**_asked(run), **flat({name: v for name, v in _known(run).items() if name != "started"})} for run in runs]
    differing = [row for row in _side_by_side(known, "null") if len({*row[1:]}) > 1]
    if differing:
        parts.append(f"<h2>What differs</h2>\n{html_table(('', *labels), differing)}")
    for run, one, label in zip(runs, facts, labels, strict=True):
        parts.append(f"<details><summary>{escaped(label)}</summary>{html_head('', _what(one), run.environment)}")
        parts += [*_tables(run), "</details>"]
    return "\n".join(filter(None, parts))


def _side_by_side(columns: Sequence[Mapping[str, Any]], missing: str) -> list[list[str]]:
    """Return a row for each name, with the value of each column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(value_text(column[name]) if name in column else missing for column in columns)] for name in names]


def _what(facts: Facts) -> str:
    """Return name, date, device, budget and duration in a line."""
    date = "" if facts.started is None else time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(facts.started))
    parts = [
        facts.name,
        date.lstrip("0"),
        f"on {facts.device}" + (f", {facts.num_ranks} ranks" if facts.num_ranks > 1 else ""),
        f"{facts.num_samples:,} samples in {facts.num_steps:,} step{'' if facts.num_steps == 1 else 's'}",
        f"{format_seconds(facts.seconds)} of training",
    ]
    return " · ".join(filter(None, parts))


def _asked(run: Run) -> dict[str, Any]:
    """Return the configuration, with what was made of arguments that were left out, such as the optimizer."""
    given = {name: value for name, value in run.config.items() if name not in ("trained", "run_dir")}
    trained = run.config.get("trained")
    made = trained if isinstance(trained, Mapping) else {}  # the user may have edited the file
    return flat({**given, **{name: value for name, value in made.items() if given.get(name) is None}})


def _known(run: Run) -> dict[str, Any]:
    """Return the environment without digests, which nobody reads."""
    return {name: value for name, value in run.environment.items() if name != "details"}


def _tables(run: Run) -> list[str]:
    """Return the tables of plans and notices; empty texts for those without a row."""
    return [
        _table("Plans", ("from step", "from", "to", "why"), _plans(run), _SIZES),
        _table("Notices", ("cause", "consequence", "cure"), _rows(run, "Notice", "cause", "consequence", "cure")),
    ]  # fmt: skip


def _rows(run: Run, event: str, *fields: str) -> list[tuple[Any, ...]]:
    """Return those fields of each event, once: a resumed run may record the same event again."""
    return list(dict.fromkeys(zip(*(run.events[event][field].tolist() for field in fields), strict=True)))


def _plans(run: Run) -> list[tuple[str, ...]]:
    """Return each plan and why it came, without those that the schedule of the effective batch asked for."""
    # A settled plan is recorded with the step before it, a re-plan with the step that it begins with.
    found = [(step + 1, at, "", cut_text(new), why) for step, at, new, why in _rows(
        run, "Planned", "step", "time", "sizes", "reason")]  # fmt: skip
    found += [(step, at, cut_text(old), cut_text(new), why) for step, at, old, new, why in replans(run)]
    found += [(step, at, f"memory saving {old}", new, why) for step, at, old, new, why in _rows(
        run, "MemorySaving", "step", "time", "old", "new", "reason")]  # fmt: skip
    return [(f"{step:,}", *rest) for step, _, *rest in sorted(found, key=lambda plan: plan[:2])]


# What pages of runs and of sweeps are made of.


def html_head(title: str, what: str, environment: Mapping[str, Any]) -> str:
    """Return the head of a page: title, a line about it, and the command, versions and commit as far as known."""
    names = [name for name in ("autoaccum", "torch", "python", "commit") if environment.get(name)]
    command, versions = environment.get("command"), " · ".join(f"{n} {value_text(environment[n])}" for n in names)
    lines = [
        f"<h1>{escaped(title)}</h1>" if title else "",
        f'<p class="what">{escaped(what)}</p>',
        f'<p class="what"><code>{escaped(value_text(command))}</code></p>' if command else "",
        f'<p class="what">{escaped(versions)}</p>' if versions else "",
    ]
    return "\n".join(filter(None, lines))


def html_pictures(figures: Mapping[str, Figure]) -> str:
    """Return the figures as pictures of the page, each of which a browser can save as a file."""
    elements = []
    for name, figure in figures.items():
        data = base64.b64encode(svg(figure)).decode()
        elements.append(f'<figure><img alt="{escaped(name)}" src="data:image/svg+xml;base64,{data}"></figure>\n')
    return f'<div class="pictures">\n{"".join(elements)}</div>' if elements else ""


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of texts; a head of empty texts is left out."""

    def line(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>\n"

    lines = [line(row, "td") for row in rows]
    if len(lines) > ROWS:
        more = f'<tr><td colspan="{len(head)}">… {len(lines) - ROWS:,} more …</td></tr>\n'
        lines = [*lines[: ROWS // 2], more, *lines[-ROWS // 2 :]]
    header = line(head, "th") if any(head) else ""
    return f'<div class="wide"><table>\n{header}{"".join(lines)}</table></div>'


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], what: str = "") -> str:
    said = f'<p class="what">{escaped(what)}</p>\n' if what else ""
    return f"<h2>{escaped(title)}</h2>\n{said}{html_table(head, rows)}" if rows else ""


def html_folded(title: str, values: Mapping[str, Any]) -> str:
    """Return a table that is shown when its title is clicked; nothing without values."""
    if not values:
        return ""
    table = html_table(("", ""), [(name, value_text(value)) for name, value in values.items()])
    return f"<details><summary>{escaped(title)}</summary>\n{table}</details>"


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


def value_text(value: Any) -> str:
    """Return a value of a configuration as a text."""
    return value if isinstance(value, str) else json.dumps(value)  # as it stands in config.json


def escaped(text: object) -> str:
    """Return a text as it stands in a page: names of files and models may hold anything."""
    return html.escape(str(text))
