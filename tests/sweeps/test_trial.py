"""One trial of a sweep: its value, and what becomes of it otherwise."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from autoaccum.errors import ArgumentError, StopTraining
from autoaccum.events import StepReport, Validated
from autoaccum.testing import simulated_memory
from tests.sweeps.sweeping import read, run, small


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


@pytest.mark.parametrize("of", ["search_space", "Started", "StepReport"])
def test_a_trial_may_be_pruned_as_with_optuna(of: str, tmp_path: Path) -> None:
    def prune(here: str) -> None:
        if here == of:
            raise optuna.TrialPruned

    def space(trial: optuna.Trial) -> dict[str, Any]:
        if trial.suggest_int("odd", 0, 1):
            prune("search_space")
        return {}

    def callback(record: Any) -> None:
        prune(type(record).__name__)

    study = run(small, tmp_path, search_space=space, callbacks=[callback], num_trials=6)
    pruned = [trial.state == TrialState.PRUNED for trial in study.trials]
    assert pruned == [of != "search_space" or bool(trial.params["odd"]) for trial in study.trials]
    assert True in pruned


class Models:
    """A recipe that looks whether any model that it made before is still in memory."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[nn.Module]] = []
        self.alive: list[bool] = []

    def __call__(self) -> dict[str, Any]:
        self.alive += [reference() is not None for reference in self.made]
        found = small()
        found["model"].itself = [found["model"]]  # as hooks and wrappers do
        self.made.append(weakref.ref(found["model"]))
        return found


@contextmanager
def uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_no_trial_is_in_memory_beside_the_next(tmp_path: Path) -> None:
    models = Models()
    with uncollected():
        run(models, tmp_path)
    assert models.alive == [False] * 6


def test_what_a_sampler_raises_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step must be given"):
        run(small, tmp_path, sampler=lambda seed: optuna.samplers.BruteForceSampler(seed=seed))


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


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


@pytest.mark.filterwarnings("ignore:Trial 0 cannot be gone on with")
def test_a_trial_whose_checkpoints_are_all_corrupt_begins_anew(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"micro_batch": 8, "num_trials": 1, "checkpoint_every": 1}
    expected = run(small, tmp_path / "whole", **settings).trials[0].value

    def interrupt(record: object) -> None:
        if isinstance(record, StepReport) and record.num_samples >= 64:
            signal.raise_signal(signal.SIGINT)

    run(small, tmp_path / "torn", callbacks=[interrupt], **settings)
    files = list((tmp_path / "torn" / "trial-0000" / "checkpoints").rglob("*.pt"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    models = Models()
    with uncollected():
        (trial,) = run(models, tmp_path / "torn", study_name="small", **settings).trials
    assert (trial.state, trial.value) == (TrialState.COMPLETE, expected)
    assert models.alive == [False] * 3, "the one that was to go on has made room"


@pytest.mark.parametrize("at", [64, 128])
def test_a_trial_that_somebody_else_ends_is_left_as_they_said(at: int, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"

    def end(record: object) -> None:
        if isinstance(record, StepReport) and record.num_samples == at:
            study = optuna.load_study(study_name="small", storage=storage)
            if len(study.trials) == 1:
                study.tell(0, state=TrialState.FAIL)

    study = run(small, tmp_path / "runs", storage=storage, callbacks=[end], validate_every=64, num_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, *[TrialState.COMPLETE] * 2]


def test_a_queued_trial_of_other_choices_fails_and_says_so(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(storage=storage, study_name="small").enqueue_trial({"effective_batch": 48})
    with pytest.raises(
        ArgumentError, match=r"effective_batch='\[16, 32\]': expected what study 'small' can draw: '?48"
    ):
        run(small, tmp_path / "runs", storage=storage)
    states = [trial.state for trial in run(small, tmp_path / "runs", storage=storage).trials]
    assert states == [TrialState.FAIL, *[TrialState.COMPLETE] * 3]
