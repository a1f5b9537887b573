"""A sweep as one page of HTML that needs no network, and as pictures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import optuna

from autoaccum.reporting.facts import Answer, format_seconds
from autoaccum.reporting.lines import cut_text
from autoaccum.reporting.page import escaped, html_head, html_pictures, html_table, number_cell, write_page
from autoaccum.sweeps.facts import StudyFacts, TrialFacts, facts_of, importances_of, runs_of, shown
from autoaccum.sweeps.plots import pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """What ``write_study_report`` wrote, and what it is about."""

    path: Path
    """The page."""
    images: tuple[Path, ...]
    """Its pictures, as files of their own."""
    study: StudyFacts


def write_study_report(
    study: optuna.Study, directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> StudyReport:
    """Write ``report.html`` and ``report-*.png`` about a study that a sweep has made.

    Args:
        study: as far as it has come.
        directory: of the sweep, where its trials' records are; without one nothing is shown over
            seconds, and of several metrics no curves.
        output: where to write; ``directory`` when left out.

    Raises:
        OSError: something cannot be read or written.
    """
    facts = facts_of(study)
    importances, unknown = importances_of(study)
    # Curves over seconds are read from the runs' records; the storage has only samples.
    figures = pictures(facts, runs_of(study, Path(directory)), importances)
    # The page stands beside the trials unless it is to go elsewhere.
    folder = Path(directory if output is None else output)
    body = "\n".join(
        (
            html_head(facts.name, facts.state, _what(facts), [*facts.answers, _important(facts, importances, unknown)]),
            html_pictures(figures),
            _trials(facts),
        )
    )
    path, images = write_page(folder, facts.name, body, figures)
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
    # Optuna takes no reports of several metrics: then there is no such column.
    last = [f"last {facts.reported}"] if any(trial.reports for trial in facts.trials) else []
    head = ("trial", "state", *names, *facts.metrics, *last, "samples", "training time", "OOMs", "micro-batches")
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
    for value in trial.values or [None] * len(facts.metrics):
        cells.append(number_cell(value, ".4g"))
    if has_last:
        cells.append(number_cell(trial.reports[-1][1] if trial.reports else None, ".4g"))
    return [
        *cells,
        number_cell(trial.num_samples),
        "-" if trial.seconds is None else escaped(format_seconds(trial.seconds)),
        number_cell(trial.ooms),
        escaped(cut_text(trial.micro_batches)) if trial.micro_batches else "-",
    ]
