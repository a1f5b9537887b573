"""Pictures of a sweep, by Optuna's own matplotlib visualisation."""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib.pyplot as plt
import optuna
from matplotlib.figure import Figure
from optuna.exceptions import ExperimentalWarning
from optuna.visualization import matplotlib as visualization

from autoaccum.reporting.plots import SIZE
from autoaccum.sweeps.studies import best_trials, totals

_ENOUGH = 8
"""Draw importances from so many different values on."""
_NAMED = 10
"""Name at most so many trials in a legend."""


def pictures(study: optuna.Study) -> dict[str, Figure]:
    """Draw the pictures of a study by their names; those without data are left out."""
    metrics = totals(study)["metric"]
    complete = [trial for trial in study.get_trials(deepcopy=False) if trial.values]
    chosen: dict[str, set[str]] = {}
    for trial in complete:
        for name, value in trial.params.items():
            chosen.setdefault(name, set()).add(str(value))
    varied = [name for name, values in sorted(chosen.items()) if len(values) > 1]
    # Optuna asks for a target where there are several metrics, and reads the direction where there is none.
    first: dict[str, Any] = {
        "target_name": metrics[0],
        **({"target": lambda trial: trial.values[0]} if len(metrics) > 1 else {}),
    }
    found: dict[str, Any] = {}  # axes
    with plt.rc_context(), warnings.catch_warnings():  # Optuna sets a style for the whole process
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Attempting to set identical low and high")
        if complete:
            found["history"] = visualization.plot_optimization_history(study, **first)
        if {"effective_batch", "lr"} <= set(varied):
            found["rank"] = visualization.plot_rank(study, params=["effective_batch", "lr"], **first)
        for name in varied:
            found[f"slice-{len(found)}"] = visualization.plot_slice(study, params=[name], **first)
        if any(trial.intermediate_values for trial in study.get_trials(deepcopy=False)):
            found["reports"] = visualization.plot_intermediate_values(study)
            found["reports"].set(xlabel="samples", ylabel="reported value")
            if (legend := found["reports"].get_legend()) is not None and len(legend.get_texts()) > _NAMED:
                legend.remove()
        if len(metrics) in (2, 3) and best_trials(study):
            found["front"] = visualization.plot_pareto_front(study, target_names=list(metrics))
        if len(metrics) == 1 and len({trial.values[0] for trial in complete}) >= _ENOUGH and varied:
            found["importance"] = visualization.plot_param_importances(study, params=varied, **first)
        for axes in found.values():
            axes.figure.set_size_inches(SIZE)
            plt.close(axes.figure)
    return {name: axes.figure for name, axes in found.items()}
