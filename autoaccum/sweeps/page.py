"""A sweep as one page of HTML that needs no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from autoaccum.reporting.lines import counted, cut_text, format_seconds
from autoaccum.reporting.page import html_head, html_pictures, html_table, page_path, write_page
from autoaccum.sweeps.claims import SEED
from autoaccum.sweeps.plots import pictures
from autoaccum.sweeps.studies import ORIGIN, SETTINGS, STATES, best_trials, ranked, state_of, totals


def write_study_report(
    study: optuna.Study, directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write ``report.html`` about a study that a sweep has made, and return its path.

    Args:
        study: as far as it has come.
        directory: of the sweep.
        output: where to write, a directory or a file that ends in .html or .htm; ``directory`` when left out.

    Raises:
        OSError: it cannot be written.
    """
    trials, found, samples = ranked(study), totals(study), study.user_attrs[SETTINGS]["samples"]
    states = [state_of(trial) for trial in trials]
    ends = ", ".join(f"{states.count(state):,} {state}" for state in STATES if state in states)
    what = (
        f"sweep · {counted(len(trials), 'trial')} of {samples:,} samples · {found['num_samples']:,} samples in all · "
        f"{format_seconds(found['seconds'])} of training"
    )
    parts = [
        html_head(f"{study.study_name}: {ends or 'no trial yet'}", what, study.user_attrs.get(ORIGIN, {})),
        html_table(("", ""), _facts(study, found)),
        html_pictures(pictures(study)),
        _best_of_each_batch(study, found),
        f"<h2>Trials</h2>\n{_trials(study, trials, found['metric'])}" if trials else "",
    ]
    path = page_path(Path(directory), output)
    write_page(path, study.study_name, "\n".join(filter(None, parts)))
    return path


def _facts(study: optuna.Study, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was searched, what was best and what the search for micro-batches cost."""
    rows, trials = [], study.get_trials(deepcopy=False)
    for name in dict.fromkeys(name for trial in trials for name in trial.distributions):
        ranges = dict.fromkeys(str(trial.distributions[name]) for trial in trials if name in trial.distributions)
        rows.append((f"searched: {name}", ", then ".join(ranges)))
    for name, direction in zip(found["metric"], found["direction"], strict=True):
        rows.append((f"{direction}d", name))
    for place, trial in zip(("best", "next best"), best_trials(study), strict=False):
        values = ", ".join(f"{name} {value:.4g}" for name, value in zip(found["metric"], trial.values, strict=True))
        chosen = ", ".join(f"{name} {_shown(value)}" for name, value in trial.params.items())
        rows.append((place, f"trial {trial.number}: {values} ({chosen}, seed {trial.user_attrs.get(SEED, '-')})"))
    rows.append(
        (
            "search for micro-batches",
            f"{counted(found['search_trials'], 'size')} tried, {counted(found['ooms'], 'out-of-memory error')}, at "
            f"most {found['wasted_samples']:,} of {found['num_samples']:,} samples run again",
        )
    )
    return rows


def _best_of_each_batch(study: optuna.Study, found: dict[str, Any]) -> str:
    """Return the table of the best complete trial at each effective batch, by the first metric."""
    best: dict[Any, FrozenTrial] = {}
    for trial in ranked(study):
        if trial.state == TrialState.COMPLETE and {"lr", "effective_batch"} <= trial.params.keys():
            best.setdefault(trial.params["effective_batch"], trial)
    rows = [
        (batch, _shown(trial.params["lr"]), f"{trial.values[0]:.4g}", trial.number)
        for batch, trial in sorted(best.items(), key=lambda one: (str(type(one[0])), one[0]))
    ]
    head = ("effective batch", "lr", found["metric"][0], "trial")
    return f"<h2>Best lr of each effective batch</h2>\n{html_table(head, rows)}" if len(rows) > 1 else ""


def _trials(study: optuna.Study, trials: list[FrozenTrial], metrics: tuple[str, ...]) -> str:
    """Return the table of trials, the best first."""
    # search_space may draw something in one trial and not in another.
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    front = {trial.number for trial in best_trials(study)} if len(metrics) > 1 else set()
    rows = []
    for trial in trials:
        took = trial.user_attrs
        seen, last = max(trial.intermediate_values.items(), default=(None, 0.0))
        rows.append(
            [
                trial.number,
                state_of(trial) + (" (Pareto front)" if trial.number in front else ""),
                *(_shown(trial.params[name]) if name in trial.params else "-" for name in names),
                *(f"{value:.4g}" for value in trial.values or []),
                *("-" for _ in metrics if not trial.values),
                "-" if seen is None else f"{last:.4g} after {seen:,}",
                f"{took['num_samples']:,}" if "num_samples" in took else "-",
                format_seconds(took["seconds"]) if "seconds" in took else "-",
                took.get("ooms", "-"),
                cut_text(tuple(took["micro_batches"])) if "micro_batches" in took else "-",
            ]
        )
    head = (
        "trial",
        "state",
        *names,
        *metrics,
        "last report",
        "samples trained",
        "training time",
        "OOMs",
        "micro-batches",
    )
    return html_table(head, rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
