"""Studies that no sweep has made."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1.0, log=True),
    "effective_batch": CategoricalDistribution([16, 64, 256]),
}


def study(
    *trials: optuna.trial.FrozenTrial,
    metric: tuple[str, ...] = ("validation_loss",),
    direction: tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    made = optuna.create_study(directions=direction or ["minimize"] * len(metric), **{"study_name": "made", **options})
    made.set_user_attr("autoaccum", {"samples": 1000, "metric": list(metric)})
    made.add_trials(trials)
    return made


def trial(
    value: float | tuple[float, ...] | None,
    lr: float | None = 0.1,
    effective_batch: int | None = 16,
    *,
    state: TrialState | None = None,
    reports: dict[int, float] | None = None,
    space: dict[str, BaseDistribution] | None = None,
    **attributes: Any,
) -> optuna.trial.FrozenTrial:
    """A complete one, or a pruned one when it has no value; lr and effective_batch of None were not searched for."""
    params = {"lr": lr, "effective_batch": effective_batch}
    params = {name: chosen for name, chosen in params.items() if chosen is not None}
    took = {"num_samples": 1000, "seconds": 2.0, "search_trials": 3, "ooms": 1, "wasted_samples": 10}
    values = value if isinstance(value, tuple | None) else (value,)
    return optuna.trial.create_trial(
        state=state or (TrialState.COMPLETE if values else TrialState.PRUNED),
        values=values,
        params=params,
        distributions={name: {**SPACE, **(space or {})}[name] for name in params},
        intermediate_values={500: 1.0} if reports is None else reports,
        user_attrs={**took, "micro_batches": [8, 8], **attributes},
    )


def running(**attributes: Any) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)


def law(power: float) -> list[optuna.trial.FrozenTrial]:
    """The value is least at lr = 0.001 * effective_batch**power, and grows with the square of the logarithm."""
    tried = (1e-3, 2e-3, 8e-3, 3e-2, 0.1, 0.2, 0.9)
    best = {batch: 0.001 * batch**power for batch in (16, 64, 256)}
    return [
        trial(0.5 + math.log(lr / best[batch]) ** 2 + batch / 1000, lr, batch, reports={500: 3.0, 1000: 0.5 + lr})
        for batch in best
        for lr in tried
    ]


def storage(path: Path) -> str:
    return f"sqlite:///{path / 'study.db'}"
