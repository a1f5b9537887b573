"""What a trial of a sweep is: the same data for each, its value, and when it is ended."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from torch import nn

from autoaccum.errors import (
    ArgumentError,
    ConflictingArgumentsError,
    RecipeResultError,
)
from autoaccum.sweeps.page import write_study_report
from tests.models import classes
from tests.sweeps.sweeping import pruner, run, small


def test_every_trial_gets_the_same_samples_and_its_own_seed(tmp_path: Path) -> None:
    study = run(small, tmp_path, samples=96, seed=5, pruner=pruner())
    assert [trial.user_attrs["num_samples"] for trial in study.trials] == [96] * 3
    assert [trial.user_attrs["seed"] for trial in study.trials] == [5, 6, 7]
    assert [trial.user_attrs["num_steps"] for trial in study.trials] == [
        96 // trial.params["effective_batch"] for trial in study.trials
    ]


def test_the_budget_may_be_in_the_recipes_epochs(tmp_path: Path) -> None:
    study = run(small, tmp_path, epochs=2, num_trials=1)
    assert study.trials[0].user_attrs["num_samples"] == 256


# Errors.


def test_a_budget_in_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConflictingArgumentsError, match="a step is more samples where the effective batch is larger"):
        run(small, tmp_path, steps=5)


def test_data_without_a_length_needs_a_budget(tmp_path: Path) -> None:
    def recipe() -> dict[str, Any]:
        inputs, targets = classes(64)
        return small() | {"data": ((inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 64, 16))}

    with pytest.raises(ArgumentError, match="samples=None: expected a budget, as the data has no length"):
        run(recipe, tmp_path)


def test_settings_that_would_make_trials_incomparable_are_refused(tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    for changed in ({"samples": 64}, {"metric": "seconds"}):
        with pytest.raises(ArgumentError, match="as study 'small' has it. Trials of one study are compared by it"):
            run(small, tmp_path, num_trials=2, **changed)


@pytest.mark.parametrize("changed", [[16, 64], (16, 48)])
def test_what_optuna_cannot_change_within_a_study_is_told(changed: Any, tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    with pytest.raises(
        ArgumentError, match="effective_batch=.*: expected what study 'small' can draw: .*another study"
    ):
        run(small, tmp_path, num_trials=2, effective_batch=changed)


def test_another_range_joins_the_study_and_the_report_has_both(tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    study = run(small, tmp_path, num_trials=2, lr=(1e-2, 1.0))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    run(small, tmp_path, num_trials=3, lr=0.01)
    page = write_study_report(study, tmp_path).read_text()
    assert "low=0.001, step=None), then FloatDistribution(high=1.0, log=True, low=0.01" in page


def test_what_a_search_space_draws_from_is_its_own_business(tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-2 * (1 + trial.number))}

    for number in (1, 2):
        run(small, tmp_path, num_trials=number, lr=None, search_space=space)


def test_a_model_that_trials_would_share_is_refused(tmp_path: Path) -> None:
    body = nn.Linear(8, 16)

    def recipe() -> dict[str, Any]:
        return small() | {"model": nn.Sequential(body, nn.Tanh(), nn.Linear(16, 3))}

    with pytest.raises(RecipeResultError, match="recipe returned a model that it has returned before, in whole or in"):
        run(recipe, tmp_path)
    body.requires_grad_(False)
    assert len(run(recipe, tmp_path, num_trials=1).get_trials(states=(TrialState.COMPLETE,))) == 1


def test_a_model_that_only_trials_would_share_is_refused(tmp_path: Path) -> None:
    """Not the first draw, whose choices were others: models are cached by what they are made of."""
    shared, calls = small()["model"], count()

    def recipe() -> dict[str, Any]:
        return small() | ({"model": shared} if next(calls) else {})

    with pytest.raises(RecipeResultError, match="returned a model that it has returned before"):
        run(recipe, tmp_path)
    assert next(calls) == 3, "the second trial's is the first's"


def test_a_recipe_that_was_mended_joins_a_study_of_failed_trials(tmp_path: Path) -> None:
    def broken(record: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(lambda: small() | {"callbacks": [broken], "clip_norm": 1.0}, tmp_path, study_name="a")
    study = run(small, tmp_path, study_name="a", num_trials=1)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


RECIPE = """
import torch
from tests.sweeps.sweeping import small

def recipe(width):
    if width:
        raise torch.OutOfMemoryError("as of a model that is made on the device")
    return small()
"""


def test_a_model_that_the_recipe_has_no_memory_for_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(RECIPE)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 0, 1)}

    study = run(str(tmp_path / "large.py"), tmp_path, search_space=space, num_trials=6)
    assert {trial.params["width"]: trial.state for trial in study.trials} == {
        0: TrialState.COMPLETE,
        1: TrialState.PRUNED,
    }
    assert all(("not_fitting" in trial.user_attrs) == trial.params["width"] for trial in study.trials)
