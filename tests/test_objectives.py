"""What a trial of a sweep is: the same data for each, its value, and when it is ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from autoaccum.errors import (
    ArgumentError,
    AutoaccumWarning,
    ConflictingArgumentsError,
    RecipeResultError,
    StopTraining,
)
from autoaccum.events import StepReport, Validated
from autoaccum.testing import simulated_memory
from tests.models import classes
from tests.sweeping import pruner, read, run, small


def test_what_the_recipe_takes_goes_to_it_and_the_rest_to_fit(tmp_path: Path) -> None:
    seen = []

    def recipe(lr: float, width: int) -> dict[str, Any]:
        seen.append(width)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        return small() | {"model": model, "optimizer": lambda params: torch.optim.SGD(params, lr=lr)}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 4, 6), "clip_norm": trial.suggest_float("clip_norm", 1, 2)}

    study = run(recipe, tmp_path, search_space=space, num_trials=2)
    for trial in study.trials:
        report = read(tmp_path, trial.number, StepReport)[0]
        assert report.lr == trial.params["lr"]
        assert report.grad_norm is not None, "clip_norm went to fit"
    assert seen[1:] == [trial.params["width"] for trial in study.trials], "the first was to check"


def test_lr_that_a_recipe_takes_and_makes_nothing_of_goes_to_fit_too(tmp_path: Path) -> None:
    def recipe(lr: float) -> dict[str, Any]:
        return small()

    study = run(recipe, tmp_path, num_trials=1)
    assert read(tmp_path, 0, StepReport)[0].lr == study.trials[0].params["lr"]


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


def test_the_value_is_the_last_validation_loss(tmp_path: Path) -> None:
    study = run(small, tmp_path, num_trials=1)
    (trial,) = study.trials
    assert trial.last_step == 128
    assert trial.value == trial.intermediate_values[128]


def test_what_does_not_fit_is_pruned_with_its_numbers(tmp_path: Path) -> None:
    def recipe(width: int) -> dict[str, Any]:
        return small() | {"model": nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": 16 if trial.number else 16 + trial.suggest_categorical("width", [20_000])}

    with simulated_memory(1_000_000):
        study = run(recipe, tmp_path, search_space=space, num_trials=2, samples=64)
    pruned, complete = study.trials
    assert (pruned.state, complete.state) == (TrialState.PRUNED, TrialState.COMPLETE)
    assert pruned.user_attrs["not_fitting"]["limit_bytes"] <= 1_000_000
    assert pruned.user_attrs["not_fitting"]["peak_bytes"] > 900_000


# Pruning.


class Spy(optuna.pruners.BasePruner):
    """Prunes trials of a small learning rate after half of the samples; remembers what it was asked."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        assert trial.last_step is not None
        self.steps.append((trial.params["effective_batch"], trial.last_step))
        return trial.params["effective_batch"] == 32 and trial.last_step >= 64


def test_pruning_is_by_samples(tmp_path: Path) -> None:
    """Windows end at other samples than validations are due at, and pruners compare trials at equal steps."""
    spy = Spy()
    study = run(small, tmp_path, effective_batch=[24, 32], num_trials=4, samples=128, validate_every=32, pruner=spy)
    assert {trial.params["effective_batch"] for trial in study.trials} == {24, 32}
    for trial in study.trials:
        if trial.params["effective_batch"] == 32:
            assert trial.state == TrialState.PRUNED
            assert list(trial.intermediate_values) == [32, 64]
            assert trial.user_attrs["num_samples"] == 64
            assert not (tmp_path / f"trial-{trial.number:04d}" / "checkpoints").exists()
        else:
            assert trial.state == TrialState.COMPLETE
            assert list(trial.intermediate_values) == [32, 64, 96, 128], "of windows that end at 48, 72, 96 and 128"
    assert (24, 128) not in spy.steps, "a trial at its end is complete"


def test_nothing_is_pruned_in_the_first_third_unless_one_asks_for_it(tmp_path: Path) -> None:
    study = run(small, tmp_path, lr=(1e-5, 10.0), effective_batch=16, num_trials=10, micro_batch=16)
    ends = [trial.last_step or 0 for trial in study.trials if trial.state == TrialState.PRUNED]
    assert min(ends) == 48, "16 times 3, which is a third of 128 and a little more"


def test_a_loss_that_is_not_finite_is_pruned_and_is_no_failure(tmp_path: Path) -> None:
    def recipe(lr: float) -> dict[str, Any]:
        return small() | {"optimizer": lambda params: torch.optim.SGD(params, lr=1e38)}

    study = run(recipe, tmp_path, num_trials=1)
    assert study.trials[0].state == TrialState.PRUNED
    assert study.trials[0].user_attrs["diverged"]


def test_a_first_loss_that_is_not_finite_is_pruned_too(tmp_path: Path) -> None:
    def recipe(scale: float) -> dict[str, Any]:
        return small() | {"loss_fn": lambda outputs, targets: nn.functional.cross_entropy(outputs * scale, targets)}

    space = {"scale": [float("inf"), 1.0]}
    study = run(
        recipe,
        tmp_path,
        lr=0.01,
        effective_batch=16,
        num_trials=2,
        search_space=lambda trial: {"scale": trial.suggest_categorical("scale", space["scale"])},
        sampler=optuna.samplers.GridSampler(space, seed=0),
    )
    ends = {trial.params["scale"]: (trial.state, trial.user_attrs.get("diverged")) for trial in study.trials}
    assert ends == {float("inf"): (TrialState.PRUNED, True), 1.0: (TrialState.COMPLETE, None)}


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"samples": trial.suggest_categorical("samples", [32, 64, 96])}

    study = run(small, tmp_path, metric=("validation_loss", "samples"), search_space=space, num_trials=4)
    for trial in study.trials:
        assert trial.values[1] == trial.params["samples"] == trial.user_attrs["num_samples"]
    least = min(trial.values[1] for trial in study.trials)
    assert least in [trial.values[1] for trial in study.best_trials]
    timed = run(small, tmp_path / "timed", metric="validation_loss,seconds", num_trials=1).trials[0]
    assert timed.values[1] == timed.user_attrs["seconds"] > 0


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
def test_what_optuna_cannot_change_within_a_study_is_refused_before_a_trial(changed: Any, tmp_path: Path) -> None:
    run(small, tmp_path, num_trials=1)
    with pytest.raises(ArgumentError, match=r"effective_batch=.*choices=\(16, 32\).*choose another study_name"):
        run(small, tmp_path, num_trials=2, effective_batch=changed)
    study = run(small, tmp_path, num_trials=2, lr=(1e-2, 1.0))  # other than a range, which it can
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2


def test_a_recipe_takes_what_is_common_for_its_own_use(tmp_path: Path) -> None:
    def recipe(seed: int) -> dict[str, Any]:
        return small()

    study = run(recipe, tmp_path, num_trials=2, search_space=lambda trial: {"seed": trial.suggest_int("seed", 5, 9)})
    assert [trial.user_attrs["seed"] for trial in study.trials] == [0, 1]


def test_a_trial_that_a_callback_stops_is_not_compared_with_those_that_saw_all_samples(tmp_path: Path) -> None:
    def stop(record: object) -> None:
        if isinstance(record, StepReport) and record.effective_batch == 16 and record.num_samples == 64:
            raise StopTraining

    study = run(small, tmp_path, effective_batch=[16, 32], sampler="grid", lr=0.01, num_trials=2, callbacks=[stop])
    ends = {
        trial.params["effective_batch"]: (trial.state, trial.user_attrs.get("stopped"), trial.user_attrs["num_samples"])
        for trial in study.trials
    }
    assert ends == {16: (TrialState.PRUNED, True, 64), 32: (TrialState.COMPLETE, None, 128)}


def test_a_recipe_that_was_edited_does_not_join_the_study_of_the_old_one(tmp_path: Path) -> None:
    study = run(small, tmp_path, num_trials=1)

    def wider() -> dict[str, Any]:
        return small() | {"model": nn.Linear(8, 3)}

    def other_data() -> dict[str, Any]:
        return small() | {"validation_data": classes(33, seed=2)}

    settings: dict[str, Any] = {"num_trials": 2, "study_name": "small"}
    for changed, lr, difference in (
        (wider, (1e-3, 1e-1), "model: Sequential .* -> Linear"),
        (other_data, (1e-3, 1e-1), "validation_data samples: 32 -> 33"),
        (other_data, (1e-3, 1.0), "validation_data samples: 32 -> 33"),
    ):
        with pytest.raises(ArgumentError, match=f"what study 'small' was begun with .*{difference}"):
            run(changed, tmp_path, lr=lr, **settings)
    with pytest.raises(ArgumentError, match="clip_norm: nothing -> 1.0"):
        run(small, tmp_path, clip_norm=1.0, **settings)
    more = run(small, tmp_path, lr=(1e-3, 1.0), micro_batch=3, **settings)
    assert [trial.value for trial in more.trials][:1] == [study.trials[0].value]
    assert [trial.state for trial in more.trials] == [TrialState.COMPLETE] * 2


# Metrics.


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def test_a_model_that_trials_would_share_is_refused(tmp_path: Path) -> None:
    body = nn.Linear(8, 16)

    def recipe() -> dict[str, Any]:
        return small() | {"model": nn.Sequential(body, nn.Tanh(), nn.Linear(16, 3))}

    with pytest.raises(RecipeResultError, match="recipe returned a model that it has returned before, in whole or in"):
        run(recipe, tmp_path)
    body.requires_grad_(False)
    assert len(run(recipe, tmp_path, num_trials=1).get_trials(states=(TrialState.COMPLETE,))) == 1


def test_a_recipe_that_was_mended_joins_a_study_of_failed_trials(tmp_path: Path) -> None:
    def broken(record: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(lambda: small() | {"callbacks": [broken], "clip_norm": 1.0}, tmp_path, study_name="a")
    study = run(small, tmp_path, study_name="a", num_trials=1)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]
    with pytest.raises(ArgumentError, match="clip_norm: nothing -> 1.0"):
        run(small, tmp_path, study_name="a", clip_norm=1.0)


def test_data_that_trials_do_not_share_are_announced(tmp_path: Path) -> None:
    def recipe() -> dict[str, Any]:
        inputs, targets = classes(128)
        return small() | {"data": (inputs + torch.randn(()), targets)}

    with pytest.warns(AutoaccumWarning, match="The recipe has made other data for this trial than for another"):
        run(recipe, tmp_path, num_trials=2)


@pytest.mark.parametrize("of", ["search_space", "callback"])
def test_a_trial_may_be_pruned_as_with_optuna(of: str, tmp_path: Path) -> None:
    def prune(here: str) -> None:
        if here == of:
            raise optuna.TrialPruned

    def space(trial: optuna.Trial) -> dict[str, Any]:
        if trial.suggest_int("odd", 0, 1):
            prune("search_space")
        return {}

    def callback(record: Any) -> None:
        if isinstance(record, StepReport):
            prune("callback")

    study = run(small, tmp_path, search_space=space, callbacks=[callback], num_trials=6)
    pruned = [trial.state == TrialState.PRUNED for trial in study.trials]
    assert pruned == [of == "callback" or bool(trial.params["odd"]) for trial in study.trials]
    assert True in pruned


RECIPE = """
import torch
from tests.sweeping import small

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


def test_what_a_sampler_raises_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step must be given"):
        run(small, tmp_path, sampler=lambda seed: optuna.samplers.BruteForceSampler(seed=seed))


def test_any_metric_that_validations_report(tmp_path: Path) -> None:
    """The best is that of the highest accuracy; what is pruned by is the accuracy too."""
    seen: list[tuple[float, ...]] = []

    class Spy(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            seen.append(tuple(trial.intermediate_values.values()))
            return False

    settings: dict[str, Any] = {"metrics": {"accuracy": right}, "metric": "accuracy", "direction": "maximize"}
    study = run(small, tmp_path, lr=(1e-4, 1.0), num_trials=4, pruner=Spy(), validate_every=64, **settings)
    for trial in study.trials:
        last = read(tmp_path, trial.number, Validated)[-1]
        assert trial.value == last.metrics["accuracy"] != last.loss
        assert trial.intermediate_values[128] == trial.value
    assert study.best_value == max(trial.value or 0.0 for trial in study.trials)
    assert len({trial.value for trial in study.trials}) > 1
    assert seen
    assert all(0 <= value <= 1 and 32 * value == int(32 * value) for values in seen for value in values)


def test_what_a_trial_costs_is_no_reason_to_prune_it(tmp_path: Path) -> None:
    class Never(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            raise AssertionError

    study = run(small, tmp_path, metric="seconds", num_trials=2, pruner=Never())
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert [trial.intermediate_values for trial in study.trials] == [{}, {}]


def test_a_metric_of_no_samples_cannot_be_compared(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"metrics": {"none": lambda outputs, targets: targets[:0]}, "metric": "none"}
    study = run(small, tmp_path, num_trials=1, direction="maximize", **settings)
    assert study.trials[0].state == TrialState.PRUNED
    assert study.trials[0].user_attrs["diverged"]


def test_a_loss_and_a_metric_have_a_front(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"metrics": {"accuracy": right}, "metric": ("validation_loss", "accuracy")}
    study = run(small, tmp_path, num_trials=3, direction=("minimize", "maximize"), **settings)
    for trial in study.trials:
        last = read(tmp_path, trial.number, Validated)[-1]
        assert trial.values == [last.loss, last.metrics["accuracy"]]
