"""A run, or several side by side, as one page of HTML that needs no network, and as pictures."""

from __future__ import annotations

import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._units import format_bytes
from autoaccum._version import __version__
from autoaccum.memory import clock
from autoaccum.reporting.columns import Run, load_run
from autoaccum.reporting.facts import Answer, Facts, facts_of, format_rate, format_seconds
from autoaccum.reporting.lines import News, cut_text, is_scheduled
from autoaccum.reporting.plots import COLORS, comparison, pictures, png, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 200
"""Show at most so many rows of a table; of more, the first and the last ones."""

# Light or dark as the reader's system is; on paper always light. Pictures take the colour of the text.
_CSS = """
:root { color-scheme: light dark; --ink: #24282e; --soft: #667; --paper: #fff; --card: #f6f7f9; --line: #dde1e6;
  --good: #2f9e77; --bad: #d1495b; --none: #8a8f98; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #dfe3e8; --soft: #98a1ac; --paper: #14171b;
  --card: #1d2126; --line: #343a42; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1240px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
.what { margin: .2rem 0 1.2rem; color: var(--soft); overflow-wrap: anywhere; }
.state { display: inline-block; margin-left: .5rem; padding: .1rem .6rem; border-radius: 1rem; background: var(--card);
  border: 1px solid var(--line); font-size: .8rem; font-weight: normal; vertical-align: middle; }
dl.answers { display: grid; grid-template-columns: max-content 1fr; gap: .45rem 1.2rem; margin: 0;
  padding: 1rem 1.2rem; background: var(--card); border-radius: .5rem; }
.answers dt { font-weight: 600; } .answers dt::before { content: ""; display: inline-block; width: .6rem; height: .6rem;
  margin-right: .6rem; border-radius: 50%; background: var(--none); }
.answers dt.good::before { background: var(--good); } .answers dt.bad::before { background: var(--bad); }
.answers dd { margin: 0; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1rem;
  margin-top: 1.2rem; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: .5rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.number { text-align: right; } td.cut, td.number { white-space: nowrap; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .5rem; border-radius: 2px; }
details { margin-top: 1rem; border-top: 1px solid var(--line); padding-top: .6rem; }
summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 2rem; color: var(--soft); font-size: .8rem; }
@media (max-width: 640px) { dl.answers { grid-template-columns: 1fr; gap: .1rem; }
  .answers dd { margin-bottom: .6rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .pictures { grid-template-columns: 1fr 1fr; } }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ``write_report`` wrote, and what it is about."""

    path: Path
    """The page."""
    images: tuple[Path, ...]
    """Its pictures, as files of their own."""
    runs: tuple[Facts, ...]


def write_report(run_dirs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Report:
    """Write ``report.html`` and ``report-*.png`` about the runs, to ``output`` or the first run's directory.

    Raises:
        NoHistoryError: a directory holds no ``history.jsonl``.
        OSError: something cannot be read or written.
    """
    # Everything is read before anything is written: of a directory without a run there is no half a page.
    runs = [load_run(run_dir) for run_dir in run_dirs]
    folder = runs[0].path if output is None else Path(output)
    facts = tuple(facts_of(run) for run in runs)
    # Numbered, for two runs may have directories of the same name.
    labels = [f"{number}: {one.name}" for number, one in enumerate(facts, start=1)]
    figures = pictures(runs[0]) if len(runs) == 1 else comparison(runs, labels)
    # Drawn once for the page, where they take the colours of the reader's system, and once more for the files.
    shown = html_pictures(figures)
    body = _one(runs[0], facts[0], shown) if len(runs) == 1 else _several(runs, facts, labels, shown)
    path, images = write_page(folder, ", ".join(one.name for one in facts), body, figures)
    return Report(path=path, images=images, runs=facts)


def write_page(folder: Path, title: str, body: str, figures: Mapping[str, Figure]) -> tuple[Path, tuple[Path, ...]]:
    """Write the page and its pictures to the folder, made where there is none; return the paths of both."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.unlink(missing_ok=True)  # a link could lead anywhere
    path.write_text(_page(title, body), encoding="utf-8", errors="replace")  # names of files may hold any bytes
    images = tuple(folder / f"report-{name}.png" for name in figures)
    for image, figure in zip(images, figures.values(), strict=True):
        png(figure, image)
    return path, images


def _page(title: str, body: str) -> str:
    """Return the document; there is no script in it, and nothing that is loaded from elsewhere."""
    # In UTC, since nobody knows where the page is read.
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.stamp()))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>autoaccum {escaped(__version__)}, written {written}</footer>\n</body>\n</html>\n"
    )


def _one(run: Run, facts: Facts, figures: str) -> str:
    """Return the body of a page about one run."""
    parts = [
        html_head(facts.name, facts.state, _what(facts), facts.answers),
        figures,
        _plans(run),
        _notices(run),
        _measurements(run),
        _ranks(run),
        _folded("Configuration", run.config),
        _folded("Environment", run.environment),
    ]
    if run.garbled:  # one line is usual after a kill; many tell of a disk, or of another file
        parts.append(f"<p>Lines of the history that could not be read: {run.garbled:,}.</p>")
    return "\n".join(filter(None, parts))  # parts without anything to show are empty


def _several(runs: Sequence[Run], facts: Sequence[Facts], labels: Sequence[str], figures: str) -> str:
    """Return the body of a page about several runs: a row for each, and what is said of each folded below."""
    # In the order of the arguments, by which people know them.
    rows = [_row(at, one, label) for at, (one, label) in enumerate(zip(facts, labels, strict=True))]
    head = (
        "run", "state", "effective batch", "samples", "steps", "training time", "samples/s", "loss at the end",
        "best validation", "peak", "most of the limit", "out of memory", "re-plans", "prediction off by",
    )  # fmt: skip
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        html_table(head, rows, numbers=range(3, 14), cuts={0, 2}),
        figures,
        _differences(runs, labels),
    ]
    for run, one, label in zip(runs, facts, labels, strict=True):
        answers = "".join(f"<p><b>{escaped(a.question)}</b> {escaped(a.text)}</p>" for a in one.answers)
        plans = _plans(run) + _notices(run) + _measurements(run) + _ranks(run)
        parts.append(
            f"<details><summary>{escaped(label)}</summary><p>{escaped(_what(one))}</p>{answers}{plans}</details>"
        )
    return "\n".join(filter(None, parts))


def _row(at: int, facts: Facts, label: str) -> list[str]:
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
        number_cell(facts.best_validation_loss, ".4g"),
        escaped(format_bytes(facts.peak_bytes)),
        number_cell(facts.limit_share, ".0%"),
        number_cell(facts.num_out_of_memory),
        number_cell(facts.num_replans),
        number_cell(facts.prediction_error, "+.1%"),
    ]


def _what(facts: Facts) -> str:
    """Say in a line what the run was."""
    # Of a run without a configuration the model is not known, and left out.
    parts = [
        facts.model,
        f"effective batch {facts.effective_batch}",
        f"on {facts.device}",
        f"{facts.num_samples:,} samples in {facts.num_steps:,} steps",
        f"{format_seconds(facts.seconds)} of training",
    ]
    return " · ".join(filter(None, parts))


def _plans(run: Run) -> str:
    """Return the table of plans: each and what it gave way to, and of a schedule's ramp what is news."""
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    # Both kinds as (time, step, sizes, reason, the plan before it), which a plan that was settled on does not name.
    settled = zip(planned["time"], planned["step"], planned["sizes"], planned["reason"], strict=True)
    plans: list[tuple[Any, ...]] = [(*plan, None) for plan in settled]
    plans += zip(*(replanned[field] for field in ("time", "step", "new", "reason", "old")), strict=True)
    # By time: the step alone does not tell what came first, and a resumed run has steps twice.
    rows, is_news = [], News()
    for _, step, new, reason, old in sorted(plans, key=lambda plan: plan[0]):
        if (old is not None and not is_scheduled(old, new)) or is_news(new):
            before, why = ("", f"planned, for {reason}") if old is None else (cut_text(old), reason)
            rows.append([number_cell(int(step)), escaped(before), escaped(cut_text(new)), escaped(why)])
    return (
        f"<h2>Plans</h2>\n{html_table(('step', 'from', 'to', 'why'), rows, numbers={0}, cuts={1, 2})}" if rows else ""
    )


def _notices(run: Run) -> str:
    """Return the table of notices, each of them once."""
    # Side by side, for what a notice says is all three together.
    notices = run.events["Notice"]
    said = zip(*(notices[field] for field in _NOTICE), strict=True)
    rows = []
    for notice in dict.fromkeys(said):  # a resumed run says them again
        rows.append([escaped(cell) for cell in notice])
    return f"<h2>Notices</h2>\n{html_table(_NOTICE, rows)}" if rows else ""


def _measurements(run: Run) -> str:
    """Return the table of what was measured of gradients: how far those of cut windows are off whole ones'."""
    measured = run.events["Verified"]
    shown_once = dict.fromkeys(zip(*(measured[field] for field in _VERIFIED), strict=True))
    rows = []
    for step, hypothesis, error, tolerance, tensor, samples, cuts in shown_once:
        off = f"{error:.1e} ({tolerance:.0e} allowed)"
        shown = ", ".join("+".join(map(str, sizes)) for sizes in cuts)
        cells = [escaped(cell) for cell in (hypothesis, off, tensor or "", f"{samples} samples cut {shown}")]
        rows.append([number_cell(int(step)), *cells])
    heads = ("step", "the loss, by", "the gradient is off", "most in", "measured on")
    return f"<h2>Cut windows and whole ones</h2>\n{html_table(heads, rows, numbers={0})}" if rows else ""


def _ranks(run: Run) -> str:
    """Return the table of what each of several ranks had of a window, and how long it has waited for the others."""
    shared = run.events["Shared"]
    if not len(shared["step"]):
        return ""
    rows = []
    for rank, sizes in enumerate(shared["micro_batches"][-1]):
        # Plans and memory as they are in the end; seconds of the whole run, which may have gone on with other ranks.
        busy, waited = (
            sum(seconds[rank] for seconds in shared[field] if rank < len(seconds))
            for field in ("busy_seconds", "waited_seconds")
        )
        memory = (format_bytes(shared[field][-1][rank]) for field in ("peak_bytes", "limit_bytes"))
        cells = [number_cell(rank), number_cell(sum(sizes)), escaped(cut_text(sizes) if sizes else "-")]
        rows.append([*cells, *map(escaped, memory), *map(escaped, map(format_seconds, (busy, waited)))])
    heads = ("rank", "samples of a window", "micro-batches", "peak", "limit", "computed", "waited")
    return f"<h2>Ranks</h2>\n{html_table(heads, rows, numbers={0, 1})}"


_VERIFIED = ("step", "hypothesis", "error", "tolerance", "tensor", "samples", "cuts")
"""Fields of a measurement that are shown."""
_NOTICE = ("cause", "consequence", "cure")
"""Fields of a notice, and the heads of their columns."""


def _differences(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the table of what the runs' configurations do not have in common; nothing where they are the same."""
    # Compared as the texts that are shown. A key that a configuration lacks is null in it.
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [_value(run.config.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append([escaped(key), *map(escaped, values)])
    if not rows:
        return ""
    return f"<h2>What differs in the configuration</h2>\n{html_table(('', *labels), rows)}"


def _folded(title: str, values: Mapping[str, Any]) -> str:
    """Return a table that is shown when its title is clicked; nothing without values."""
    # By an element of HTML's own: the page has no script.
    if not values:
        return ""
    rows = [[escaped(key), escaped(_value(value))] for key, value in values.items()]
    return f"<details><summary>{escaped(title)}</summary>\n{html_table(('', ''), rows)}</details>"


def html_head(title: str, state: str, what: str, answers: Sequence[Answer]) -> str:
    """Return the head of a page, what it is about and the answers; all arguments are text and not HTML."""
    listed = "\n".join(
        f'<dt class="{ {True: "good", False: "bad", None: "none"}[answer.good] }">{escaped(answer.question)}</dt>'
        f"<dd>{escaped(answer.text)}</dd>"
        for answer in answers
    )
    return (
        f'<h1>{escaped(title)}<span class="state">{escaped(state)}</span></h1>\n'
        f'<p class="what">{escaped(what)}</p>\n<dl class="answers">\n{listed}\n</dl>'
    )


def html_pictures(figures: Mapping[str, Figure]) -> str:
    """Return the figures as a block of pictures; nothing without one."""
    # Salted by their names, for ids in a page have to differ from picture to picture.
    elements = "".join(f"<figure>{svg(figure, salt=name)}</figure>\n" for name, figure in figures.items())
    return f'<div class="pictures">\n{elements}</div>' if elements else ""


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


def _value(value: Any) -> str:
    """Return a value of a configuration as a text."""
    return value if isinstance(value, str) else json.dumps(value)  # as it stands in config.json


def number_cell(value: float | None, form: str = ",") -> str:
    """Return a number as the text of a cell, a dash for None."""
    return "-" if value is None else escaped(format(value, form))


def escaped(text: object) -> str:
    """Return a text as it stands in a page, whatever is in it: names of files and models are a stranger's."""
    return html.escape(str(text))
