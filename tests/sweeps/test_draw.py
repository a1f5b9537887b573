"""What a trial chooses, and where it goes: to the recipe or to fit."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.events import StepReport
from autoaccum.sweeps.draw import chosen_by, taken_by
from tests.sweeps.sweeping import read, run, small


def ask() -> optuna.trial.Trial:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()


def test_a_range_is_drawn_from_a_list_chosen_from_and_one_value_taken() -> None:
    trial = ask()
    chosen = chosen_by(trial, (1e-3, 1e-1), [16, 32], lambda trial: {"width": trial.suggest_int("width", 4, 6)})
    assert 1e-3 <= chosen["lr"] <= 1e-1
    assert chosen["effective_batch"] in (16, 32)
    assert chosen == trial.params
    assert chosen_by(ask(), 0.1, None, None) == {"lr": 0.1}


def test_a_search_space_returns_a_dict_of_what_is_not_searched_besides() -> None:
    with pytest.raises(ArgumentTypeError, match="a function that returns a dict of arguments"):
        chosen_by(ask(), 0.1, None, lambda trial: [3])  # type: ignore[arg-type, return-value]
    with pytest.raises(ConflictingArgumentsError, match="Leave lr out of one of them"):
        chosen_by(ask(), 0.1, None, lambda trial: {"lr": 1.0})


def test_a_recipe_takes_what_it_has_parameters_for() -> None:
    def recipe(width: int, depth: int = 2, **others: Any) -> None: ...

    assert taken_by(recipe, {"lr": 0.1, "width": 3}) == ["width"]
    with pytest.raises(ArgumentError, match=r"width=None: expected a value, as the recipe takes it. Pass it, return"):
        taken_by(recipe, {"lr": 0.1})


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


def test_a_recipe_takes_what_is_common_for_its_own_use(tmp_path: Path) -> None:
    def recipe(seed: int) -> dict[str, Any]:
        return small()

    study = run(recipe, tmp_path, num_trials=2, search_space=lambda trial: {"seed": trial.suggest_int("seed", 5, 9)})
    assert [trial.user_attrs["seed"] for trial in study.trials] == [0, 1]


def test_what_a_draw_had_no_memory_for_is_gone_before_the_next(tmp_path: Path) -> None:
    made: list[weakref.ref[nn.Module]] = []
    alive: list[bool] = []

    def recipe(width: int) -> dict[str, Any]:
        alive.extend(reference() is not None for reference in made)
        if len(made) < 2:
            model = nn.Linear(8, 3)
            made.append(weakref.ref(model))
            raise torch.OutOfMemoryError("as of a model that is made on the device")
        return small()

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 0, 100)}

    run(recipe, tmp_path, search_space=space, num_trials=1)
    assert len(alive) > 2
    assert not any(alive)
