"""What tests of sweeps share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from torch import nn

from autoaccum.runs.records import HISTORY, read_records
from autoaccum.sweeps.sweep import sweep
from tests.models import classes


def small() -> dict[str, Any]:
    return {
        "model": nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        "data": classes(128),
        "validation_data": classes(32, seed=2),
        "loss_fn": nn.functional.cross_entropy,
        "device": "cpu",
    }


def run(recipe: Any, directory: Path, **settings: Any) -> optuna.Study:
    """A sweep without a bar, over what tests have no wish to vary."""
    defaults: dict[str, Any] = {"lr": (1e-3, 1e-1), "effective_batch": [16, 32], "num_trials": 3, "progress": False}
    return sweep(recipe, directory=directory, **{**defaults, **settings})


def pruner() -> optuna.pruners.BasePruner:
    return optuna.pruners.NopPruner()


def outcomes(study: optuna.Study) -> list[tuple[str, Any, Any]]:
    return [(trial.state.name, trial.params, trial.values) for trial in study.trials]


def read(directory: Path, number: int, *kinds: type) -> list[Any]:
    return [r for r in read_records(directory / f"trial-{number:04d}" / HISTORY) if isinstance(r, kinds)]
