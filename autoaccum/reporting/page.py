"""A run, or several side by side, as one page of HTML that needs no network, and as pictures."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._units import format_bytes
from autoaccum._version import __version__
from autoaccum.memory import clock
from autoaccum.reporting.amounts import format_rate, format_seconds, many
from autoaccum.reporting.answers import Answer, twentieth
from autoaccum.reporting.columns import Run, load_run
from autoaccum.reporting.facts import Facts, facts_of
from autoaccum.reporting.lines import News, cut_text, is_scheduled
from autoaccum.reporting.plan_changes import tried_again
from autoaccum.reporting.plots import comparison, pictures, png, svg
from autoaccum.reporting.tables import (
    compared,
    differences,
    escaped,
    flat,
    html_table,
    number_cell,
    row_of,
    value_text,
    without_details,
    without_trained,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ``write_report`` wrote, and what it is about."""

    path: Path
    """The page."""
    images: tuple[Path, ...]
    """Its pictures, as files of their own."""
    runs: tuple[Facts, ...]


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    reload_every: float | None = None,
) -> Report:
    """Write ``report.html`` and ``report-*.png`` about a run, to ``output`` or its directory.

    About several it is ``comparison.html``, in the first one's directory, whose own page stays. An ``output`` that ends
    in .html or .htm is the page, and pictures are named after it.

    With ``reload_every`` the page alone is written, which browsers load again after so many seconds.

    Raises:
        NoHistoryError: a directory holds no ``history.jsonl``.
        OSError: something cannot be read or written.
    """
    # Everything is read before anything is written: of a directory without a run there is no half a page.
    runs = [load_run(run_dir) for run_dir in run_dirs]
    place = page_path(runs[0].path, output, "report" if len(runs) == 1 else "comparison")
    facts = tuple(facts_of(run) for run in runs)
    # Numbered, for two runs may have directories of the same name.
    labels = [f"{number}: {one.name}" for number, one in enumerate(facts, start=1)]
    figures = pictures(runs[0]) if len(runs) == 1 else comparison(runs, labels)
    # Drawn once for the page, where they take the colours of the reader's system, and once more for the files.
    shown = html_pictures(figures)
    body = _one(runs[0], facts[0], shown) if len(runs) == 1 else _several(runs, facts, labels, shown)
    title = facts[0].title if len(runs) == 1 else ", ".join(one.name for one in facts)
    path, images = write_page(place, title, body, figures, reload_every)
    return Report(path=path, images=images, runs=facts)


def page_path(folder: Path, output: str | os.PathLike[str] | None, name: str = "report") -> Path:
    """Return the file of a page: ``output`` if that is one, else the page of that name there, or in ``folder``."""
    if output is None:
        return folder / f"{name}.html"
    is_file = Path(output).suffix.lower() in (".html", ".htm") and not Path(output).is_dir()
    return Path(output) if is_file else Path(output) / f"{name}.html"


def write_page(
    path: Path, title: str, body: str, figures: Mapping[str, Figure], reload_every: float | None = None
) -> tuple[Path, tuple[Path, ...]]:
    """Write the page, and its pictures beside it, in a folder that is made where there is none; return both paths.

    A page that is loaded again every so many seconds has no pictures beside it, for it will be written again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Put in its place when it is whole, for a browser may load it meanwhile; and a link there could lead anywhere.
    beside = path.with_name(f".{path.stem}-{os.getpid()}.html")
    try:
        # Names of files may hold any bytes.
        beside.write_text(_page(title, body, reload_every), encoding="utf-8", errors="replace")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if reload_every is not None:
        return path, ()
    images = tuple(path.with_name(f"{path.stem}-{name}.png") for name in figures)
    for image, figure in zip(images, figures.values(), strict=True):
        png(figure, image)
    return path, images


def _page(title: str, body: str, reload_every: float | None) -> str:
    """Return the document; nothing in it is loaded from elsewhere."""
    # In UTC, since nobody knows where the page is read.
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.stamp()))
    again = "" if reload_every is None else f'<meta http-equiv="refresh" content="{reload_every:g}">\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{again}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>autoaccum {escaped(__version__)}, written {written}</footer>\n</body>\n</html>\n"
    )


def _one(run: Run, facts: Facts, figures: str) -> str:
    """Return the body of a page about one run."""
    parts = [
        html_head(facts.title, _what(facts), facts.answers, html_origin(run.environment), _results(run, facts)),
        figures,
        _plans(run),
        _notices(run),
        _measurements(run),
        _ranks(run),
        _folded("Configuration", flat(without_trained(run.config))),
        _folded("Environment", flat(without_details(run.environment))),
    ]
    if run.garbled:  # one line is usual after a kill; many tell of a disk, or of another file
        parts.append(f"<p>Lines of the history that could not be read: {run.garbled:,}.</p>")
    return "\n".join(filter(None, parts))  # parts without anything to show are empty


def _several(runs: Sequence[Run], facts: Sequence[Facts], labels: Sequence[str], figures: str) -> str:
    """Return the body of a page about several runs: a row for each, and what is said of each folded below."""
    # In the order of the arguments, by which people know them.
    rows = [row_of(at, one, label) for at, (one, label) in enumerate(zip(facts, labels, strict=True))]
    parts = [f"<h1>{len(runs)} runs</h1>", compared(rows), figures, differences(runs, labels)]
    for run, one, label in zip(runs, facts, labels, strict=True):
        answers = "".join(f"<p><b>{escaped(a.question)}</b> {escaped(a.text)}</p>" for a in one.answers)
        plans = _plans(run) + _notices(run) + _measurements(run) + _ranks(run)
        parts.append(
            f"<details><summary>{escaped(label)}</summary><p>{escaped(_what(one))}</p>{html_origin(run.environment)}"
            f"{answers}{plans}</details>"
        )
    return "\n".join(filter(None, parts))


def _what(facts: Facts) -> str:
    """Return name, date, device, budget and duration in a line."""
    # In UTC, because nobody knows where the page is read.
    date = "" if facts.started is None else time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(facts.started))
    parts = [
        facts.name,
        date.lstrip("0"),
        f"on {facts.device}" + (f", {facts.num_ranks} ranks" if facts.num_ranks > 1 else ""),
        f"{facts.num_samples:,} samples in {many(facts.num_steps, 'step')}",
        f"{format_seconds(facts.seconds)} of training",
    ]
    return " · ".join(filter(None, parts))


def _results(run: Run, facts: Facts) -> str:
    """Return the results in large figures, and the line that loads the best checkpoint."""
    # What is unknown has no figure, as before the first step or without validations.
    best, load = facts.best, facts.load
    shown: list[tuple[str, str, str]] = []  # (name, value, detail)
    if facts.samples_per_second is not None:
        shown.append(("Samples per second", format_rate(facts.samples_per_second), "mean of the run"))
    if facts.num_steps:
        loss, few = "not finite" if facts.loss is None else f"{facts.loss:.4g}", twentieth(run)
        mean = f"mean of the last {few:,} steps" if few > 1 else f"step {facts.num_steps:,}"
        shown.append(("Final training loss", loss, mean))
    if best is not None:
        name = "validation loss" if best.metric == "loss" else best.metric
        shown.append((f"Best {name}", f"{best.value:.4g}", f"step {best.step:,}, epoch {best.epoch:,}"))
    if facts.limit_share is not None:
        shown.append(("Peak memory", format_bytes(facts.peak_bytes), f"{facts.limit_share:.0%} of the limit"))
    figures = "".join(
        f"<div><dt>{escaped(name)}</dt><dd><b>{escaped(value)}</b> {escaped(detail)}</dd></div>"
        for name, value, detail in shown
    )
    line = f'<p class="load"><code>{escaped(load.text)}</code> {escaped(load.effect)}</p>\n' if load else ""
    return (f'<dl class="results">{figures}</dl>\n' if shown else "") + line


def html_origin(environment: Mapping[str, Any]) -> str:
    """Return by what a run or a sweep was started, which versions and which commit; nothing where nothing is known."""
    # Of the last process, where there were several. Runs of earlier versions have kept neither command nor commit.
    names = [name for name in ("autoaccum", "torch", "python", "commit") if environment.get(name)]
    said = " · ".join(f"{name} {value_text(environment[name])}" for name in names)
    command = environment.get("command")
    parts = [f"<code>{escaped(value_text(command))}</code>" if command else "", escaped(said)]
    return "".join(f'<p class="origin">{part}</p>\n' for part in parts if part)


def _plans(run: Run) -> str:
    """Return the table of plans: each and what it gave way to, and of a schedule's ramp what is news.

    Where the way in which memory is saved has changed, that stands among them, for sizes are found out anew then.
    """
    planned, replanned, saved = (run.events[name] for name in ("Planned", "Replanned", "MemorySaving"))
    # All as (step, time, sizes, reason, the plan before it), which a plan that was settled on does not name. That one
    # is recorded with the windows before it, the others with the one that they begin with, as all are shown here.
    settled = zip(planned["step"] + 1, planned["time"], planned["sizes"], planned["reason"], strict=True)
    plans: list[tuple[Any, ...]] = [(*plan, None) for plan in settled]
    plans += zip(*(replanned[field] for field in ("step", "time", "new", "reason", "old")), strict=True)
    # Texts in place of sizes.
    saved_by = zip(*(saved[field] for field in ("step", "time", "new", "reason", "old")), strict=True)
    plans += [(*rest, f"memory saving {old}") for *rest, old in saved_by]
    for step, number, sizes in tried_again(run):
        why = "the speeds of plans were compared again" + (f", for {number:,} steps" if number > 1 else "")
        plans.append((step, -math.inf, "other plans", why, cut_text(sizes)))
    rows, is_news = [], News()
    for step, _, new, reason, old in sorted(plans, key=lambda plan: plan[:2]):
        if isinstance(new, str):
            rows.append([number_cell(int(step)), escaped(old), escaped(new), escaped(reason)])
            continue
        if (old is not None and not is_scheduled(old, new)) or is_news(new):
            before, why = ("", reason) if old is None else (cut_text(old), reason)
            rows.append([number_cell(int(step)), escaped(before), escaped(cut_text(new)), escaped(why)])
    if not rows:
        return ""
    table = html_table(("from step", "from", "to", "why"), rows, numbers={0}, cuts={1, 2})
    return f'<h2>Plans</h2>\n<p class="what">{_SIZES}</p>\n{table}'


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
        cells = [escaped(cell) for cell in (_by(hypothesis), off, tensor or "", f"{samples} samples split {shown}")]
        rows.append([number_cell(int(step)), *cells])
    joined = run.events["Joined"]
    for step, error, tolerance, tensor, samples in dict.fromkeys(
        zip(*(joined[field] for field in _JOINED), strict=True)
    ):
        off = f"{error:.1e} ({tolerance:.0e} allowed)"
        cells = [escaped(cell) for cell in ("joined", off, tensor or "", f"{samples} samples")]
        rows.append([number_cell(int(step)), *cells])
    heads = ("step", "the loss, by", "relative error", "most in", "measured on")
    return f"<h2>Gradients of split batches</h2>\n{html_table(heads, rows, numbers={0})}" if rows else ""


def _by(hypothesis: str) -> str:
    """Return a hypothesis as people read it: of several terms each with what it is by.

    >>> _by("items"), _by('terms {"words": "items", "0": "sum"}')
    ('items', 'words: items, 0: sum')
    """
    try:
        terms = json.loads(hypothesis.removeprefix("terms "))
    except ValueError:
        return hypothesis
    if not isinstance(terms, dict):
        return hypothesis
    return ", ".join(f"{name}: {how}" for name, how in terms.items())


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
    heads = ("rank", "samples of a batch", "micro-batches", "peak", "limit", "computed", "waited")
    return f"<h2>Ranks</h2>\n{html_table(heads, rows, numbers={0, 1})}"


_SIZES = "A plan is micro-batch x accumulation steps: 8 x 32 is 32 micro-batches of 8 samples."
"""Explanation above the table of plans."""
_JOINED = ("step", "error", "tolerance", "tensor", "samples")
_VERIFIED = ("step", "hypothesis", "error", "tolerance", "tensor", "samples", "cuts")
"""Fields of a measurement that are shown."""
_NOTICE = ("cause", "consequence", "cure")
"""Fields of a notice, and the heads of their columns."""


def _folded(title: str, values: Mapping[str, Any]) -> str:
    """Return a table that is shown when its title is clicked; nothing without values."""
    # By an element of HTML's own, which needs no script.
    if not values:
        return ""
    rows = [[escaped(key), escaped(value_text(value))] for key, value in values.items()]
    return f"<details><summary>{escaped(title)}</summary>\n{html_table(('', ''), rows)}</details>"


def html_head(title: str, what: str, answers: Sequence[Answer], origin: str = "", results: str = "") -> str:
    """Return the first screen of a page; ``origin`` and ``results`` are HTML, and all else is text."""
    listed = "\n".join(
        f'<dt class="{ {True: "good", False: "bad", None: "none"}[answer.good] }">{escaped(answer.question)}</dt>'
        f"<dd>{escaped(answer.text)}</dd>"
        for answer in answers
    )
    return (
        f'<h1>{escaped(title)}</h1>\n<p class="what">{escaped(what)}</p>\n{results}'
        f'<dl class="answers">\n{listed}\n</dl>\n{origin}'
    )


def html_pictures(figures: Mapping[str, Figure]) -> str:
    """Return the figures as a block of pictures; nothing without one."""
    # Salted by their names, for ids in a page have to differ from picture to picture.
    elements = [f"<figure>{svg(figure, salt=name)}</figure>\n" for name, figure in figures.items()]
    return f'<div class="pictures">\n{"".join(elements)}</div>' if elements else ""
