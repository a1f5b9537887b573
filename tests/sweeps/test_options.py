"""Arguments of ``sweep``: those of its own, and those that it passes on to ``fit``."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.sweeps import spaces
from autoaccum.sweeps.options import PassedOn, SweepArguments, of_sampler
from autoaccum.training.declarations import arguments_of
from autoaccum.training.options import NOT_IN_SWEEPS, SHARED_IN_SWEEPS


def recipe() -> dict[str, Any]:
    return {}


def given(**options: Any) -> SweepArguments:
    return SweepArguments(**{"recipe": recipe, "fit_arguments": {}, **options})


def test_what_is_passed_on_is_of_fit_and_not_of_the_sweep() -> None:
    of_fit, own = arguments_of(autoaccum.fit), arguments_of(autoaccum.sweep)
    passed_on = {name: one.type for name, one in of_fit.items() if name not in own and name not in NOT_IN_SWEEPS}
    assert get_type_hints(PassedOn) == passed_on


def test_a_sweep_has_the_arguments_that_it_works_with() -> None:
    parameters, fields = inspect.signature(autoaccum.sweep).parameters, inspect.signature(SweepArguments).parameters
    assert list(parameters) == list(fields)
    assert all(fields[name].default == parameter.default for name, parameter in parameters.items())


def test_trials_share_what_would_make_them_incomparable() -> None:
    assert set(SHARED_IN_SWEEPS) == {"samples", "epochs", "steps", "validate_every", "seed"}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"num_trials": 0}, ArgumentError),
        ({"seed": -1}, ArgumentError),
        ({"recipe": 3}, ArgumentTypeError),
        ({"search_space": 3}, ArgumentTypeError),
        ({"study_name": 3}, ArgumentTypeError),
        ({"fit_arguments": {"clip_nrm": 1.0}}, ArgumentError),
        ({"fit_arguments": {"run_dir": "a"}}, ArgumentError),
        ({"metric": []}, ArgumentError),
        ({"sampler": "best"}, ArgumentError),
        ({"pruner": 3}, ArgumentTypeError),
    ],
)
def test_wrong_ones_are_refused_by_name(wrong: dict[str, Any], kind: type[ArgumentError]) -> None:
    (name,) = wrong.get("fit_arguments", wrong)
    with pytest.raises(kind) as caught:
        given(**wrong).check()
    assert caught.value.argument == name


def test_checks_return_what_they_have_read() -> None:
    checked = given(metric="validation_loss,seconds", sampler="random").check()
    assert checked[spaces.metrics] == (("validation_loss", "seconds"), ("minimize", "minimize"))
    assert checked[of_sampler] is spaces.SAMPLERS["random"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("study_name", "a" * 201), ("study_name", "a\0"), ("recipe", torch.nn.Linear(1, 1)), ("recipe", "a\0"),
     ("search_space", dict), ("search_space", lambda one, two: {}), ("directory", "a\0"), ("directory", 3), ("progress", 1),
     ("storage", 3), ("storage", "study")],
)  # fmt: skip
def test_what_cannot_be_meant(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        autoaccum.sweep(**{"recipe": "recipe.py", "lr": [0.1, 0.2], name: value})
    assert caught.value.argument == name
