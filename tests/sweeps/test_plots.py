"""Pictures of a sweep: Optuna draws them, and what there is nothing of has none."""

from __future__ import annotations

from typing import Any

import matplotlib
import optuna
import pytest

pytest.importorskip("matplotlib")

from autoaccum.sweeps.plots import pictures
from tests.sweeps.studies import law, running, study, trial

FRONT = [trial((0.5, 9.0), 0.1, 16), trial((0.6, 9.5), 0.2, 64), trial((0.1, 20.0), 0.3, 16)]


@pytest.mark.parametrize(
    ("trials", "metric", "names"),
    [
        (law(0.5), ("validation_loss",), ["history", "rank", "slice-2", "slice-3", "reports", "importance"]),
        ([], ("validation_loss",), []),
        ([running()], ("validation_loss",), []),
        ([trial(0.5)], ("validation_loss",), ["history", "reports"]),
        ([trial(None), trial(None)], ("validation_loss",), ["reports"]),
        ([trial(0.5, reports={}), trial(0.4, 0.2, reports={})], ("validation_loss",), ["history", "slice-1"]),
        ([trial(0.5, lr, reports={}) for lr in (0.1, 0.2) * 5], ("validation_loss",), ["history", "slice-1"]),
        (FRONT, ("validation_loss", "seconds"), ["history", "rank", "slice-2", "slice-3", "reports", "front"]),
    ],
)
def test_what_there_is_something_of_has_a_picture(trials: list[Any], metric: tuple[str, ...], names: list[str]) -> None:
    before = dict(matplotlib.rcParams)
    assert list(pictures(study(*trials, metric=metric))) == names
    assert dict(matplotlib.rcParams) == before, "Optuna's style is left behind nowhere"


def test_reports_are_over_samples_and_have_no_endless_legend() -> None:
    few, many = (pictures(study(*trials))["reports"].axes[0] for trials in (law(0.5)[:3], law(0.5)))
    assert few.get_xlabel() == "samples"
    assert few.get_legend() is not None
    assert many.get_legend() is None


def test_trials_of_a_search_space_with_conditions() -> None:
    depth = {"depth": optuna.distributions.IntDistribution(1, 3)}
    odd = optuna.trial.create_trial(value=0.3, params={"depth": 2}, distributions=depth)
    assert list(pictures(study(odd, trial(0.5, reports={})))) == ["history"]
