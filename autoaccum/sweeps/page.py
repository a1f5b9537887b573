"""A sweep as one page of HTML that needs no network, and as pictures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import optuna

from autoaccum.reporting.amounts import format_seconds
from autoaccum.reporting.answers import Answer
from autoaccum.reporting.lines import cut_text
from autoaccum.reporting.page import html_head, html_origin, html_pictures, page_path, write_page
from autoaccum.reporting.tables import escaped, html_table, number_cell
from autoaccum.sweeps.facts import StudyFacts, TrialFacts, facts_of, importances_of, shown
from autoaccum.sweeps.plots import pictures
from autoaccum.sweeps.studies import runs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """What ``write_study_report`` wrote, and what it is about."""

    path: Path
    """The page."""
    images: tuple[Path, ...]
    """Its pictures, as files of their own."""
    study: StudyFacts


def write_study_report(
    study: optuna.Study,
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    reload_every: float | None = None,
) -> StudyReport:
    """Write ``report.html`` and ``report-*.png`` about a study that a sweep has made.

    Args:
        study: as far as it has come.
        directory: of the sweep, where its trials' records are; without one nothing is shown over
            seconds, and of several metrics no curves.
        output: where to write, a directory or a file that ends in .html or .htm; ``directory`` when left out.
        reload_every: seconds after which browsers load the page again; there are no pictures beside such a page.

    Raises:
        OSError: something cannot be read or written.
    """
    facts = facts_of(study)
    importances, unknown = importances_of(study)
    # Curves over seconds are read from the runs' records; the storage has only samples.
    figures = pictures(facts, runs_of(study, Path(directory)), importances)
    # The page stands beside the trials unless it is to go elsewhere.
    place = page_path(Path(directory), output)
    answers = [*facts.answers, _important(facts, importances, unknown)]
    body = "\n".join(
        (
            html_head(f"{facts.name}: {facts.state}", _what(facts), answers, html_origin(facts.origin)),
            html_pictures(figures),
            _trials(facts),
        )
    )
    path, images = write_page(place, facts.name, body, figures, reload_every)
    return StudyReport(path=path, images=images, study=facts)


def _what(facts: StudyFacts) -> str:
    """Say in a line what the study was."""
    count = len(facts.trials)
    return (
        f"sweep · {count:,} trial{'' if count == 1 else 's'} of {facts.num_samples:,} samples · "
        f"{int(facts.totals['num_samples']):,} samples in all · {format_seconds(facts.totals['seconds'])} of training"
    )


def _important(facts: StudyFacts, importances: dict[str, float], unknown: str) -> Answer:
    """Say which parameters matter, or why that cannot be said."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in importances.items())
    text = unknown or f"For {facts.metrics[0]}: {shares}."
    return Answer(question="Which parameter matters most?", text=text, good=None)


def _trials(facts: StudyFacts) -> str:
    """Return the table of trials, the best first; nothing without one."""
    if not facts.trials:
        return ""
    # Of all trials, for search_space may draw something in one and not in another.
    names = list(dict.fromkeys(name for trial in facts.trials for name in trial.params))
    # What trials report has a column of its own only where it is not what is searched for; and so has what they take.
    last = [facts.reported] if any(trial.reports for trial in facts.trials) else []
    last = [f"last {name}" for name in last if name not in facts.metrics]
    took = [_TOOK[name] for name in _TOOK if name not in facts.metrics]
    head = ("trial", "state", *names, *facts.metrics, *last, *took, "OOMs", "micro-batches")
    rows = [_row(facts, trial, names, has_last=bool(last)) for trial in facts.trials]
    # All columns are numbers but the state and the micro-batches, which are not broken into lines.
    numbers = {0, *range(2, len(head) - 1)}
    return f"<h2>Trials</h2>\n{html_table(head, rows, numbers=numbers, cuts={1, len(head) - 1})}"


def _row(facts: StudyFacts, trial: TrialFacts, names: list[str], *, has_last: bool) -> list[str]:
    """Return the cells of a trial; a dash stands for what it has not, or not yet."""
    is_on_front = len(facts.metrics) > 1 and trial.number in facts.best
    cells = [str(trial.number), escaped(trial.state) + (" (Pareto front)" if is_on_front else "")]
    for name in names:
        cells.append(escaped(shown(trial.params[name])) if name in trial.params else "-")
    seen, report = trial.reports[-1] if trial.reports else (0, None)
    for at, name in enumerate(facts.metrics):
        if not trial.values and name == facts.reported and report is not None:
            cells.append(f"{number_cell(report, '.4g')} after {seen:,}")  # it has not come to the end
        else:
            cells.append(number_cell(trial.values[at] if trial.values else None, ".4g"))
    if has_last:
        cells.append(number_cell(report, ".4g"))
    if "samples" not in facts.metrics:
        cells.append(number_cell(trial.num_samples))
    if "seconds" not in facts.metrics:
        cells.append("-" if trial.seconds is None else escaped(format_seconds(trial.seconds)))
    micro_batches = escaped(cut_text(trial.micro_batches)) if trial.micro_batches else "-"
    return [*cells, number_cell(trial.ooms), micro_batches]


_TOOK = {"samples": "samples", "seconds": "training time"}
"""Columns of what trials have taken, by the metric that says the same."""
