"""The study of a sweep is found by its directory or its storage."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autoaccum.errors import ArgumentError
from autoaccum.sweeps.studies import best_trials, load_study, ranked, totals
from tests.sweeps.studies import running, storage, study, trial


def test_by_its_directory(tmp_path: Path) -> None:
    study(trial(0.5), storage=storage(tmp_path), study_name="a")
    found, directory = load_study(str(tmp_path))
    assert (found.study_name, found.best_value, directory) == ("a", 0.5, tmp_path)


@pytest.mark.parametrize("journal", [True, False])
def test_by_its_storage(journal: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "study.journal")
    place = f"journal:{path}" if journal else storage(tmp_path)
    opened = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path)) if journal else place
    for name, value in (("a", 0.5), ("b", 0.25)):
        study(trial(value), storage=opened, study_name=name)
    found, directory = load_study(place, "b")
    assert (found.best_value, directory) == (0.25, Path("sweeps/b"))
    for name in (None, "c"):
        with pytest.raises(ArgumentError, match="one of a, b"):
            load_study(place, name)


def test_a_study_that_no_sweep_has_made_is_not_meant(tmp_path: Path) -> None:
    optuna.create_study(storage=storage(tmp_path), study_name="other")
    with pytest.raises(ArgumentError, match="a study that a sweep has made"):
        load_study(str(tmp_path))
    study(storage=storage(tmp_path), study_name="a")
    assert load_study(str(tmp_path))[0].study_name == "a"


@pytest.mark.parametrize("place", ["sqlite:///{}/none.db", "journal:{}/none", "{}"])
def test_looking_for_a_study_makes_no_file(place: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="the storage of a sweep"):
        load_study(place.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


# What it has come to.


@pytest.mark.parametrize(
    ("direction", "best"),
    [
        (("minimize",), [2, 1, 0]),
        (("maximize",), [0, 1, 2]),
        (("minimize", "minimize"), [2, 1]),
        (("minimize", "maximize"), [2, 0]),
        (("maximize", "minimize"), [0, 1]),
        (("maximize", "maximize"), [0]),
    ],
)
def test_the_best_trials(direction: tuple[str, ...], best: list[int]) -> None:
    values = [(0.9, 8.0), (0.5, 2.0), (0.1, 4.0)]
    trials = [trial(value[: len(direction)]) for value in values]
    made = study(*trials, trial(None), metric=("a", "b")[: len(direction)], direction=direction)
    assert [one.number for one in best_trials(made)] == best
    assert best_trials(study(trial(None), running())) == []


def test_the_order_is_best_first() -> None:
    made = study(
        running(),
        trial(None, reports={500: 0.1}),
        trial(0.5),
        trial(None, reports={500: 0.9, 700: 0.8}),
        trial(0.25),
        trial(None, diverged=True),
        trial(None, reports={500: math.nan}),
        trial(None, reports={500: 0.05}),
        trial(None, reports={}),
    )
    assert [one.number for one in ranked(made)] == [4, 2, 3, 7, 1, 6, 8, 5, 0]
    reports = [trial(None, reports={500: value}) for value in (0.1, 0.3)]
    highest = study(trial(0.5), trial(0.9), *reports, metric=("accuracy",), direction=("maximize",))
    assert [one.number for one in ranked(highest)] == [1, 0, 3, 2]
    front = study(trial((0.5, 9.0)), trial((0.6, 9.5)), trial((0.1, 20.0)), metric=("a", "b"))
    assert [one.number for one in ranked(front)] == [2, 0, 1]


def test_totals() -> None:
    made = study(
        trial(0.5, replays=2), trial(None), trial(None, diverged=True), trial(None, not_fitting={}, replays=1),
        trial(None, stopped=True), trial(None, state=TrialState.FAIL), running(),
        metric=("accuracy",), direction=("maximize",),
    )  # fmt: skip
    assert totals(made) == {
        "metric": ("accuracy",), "direction": ("maximize",), "finished": 5, "complete": 1, "pruned": 4, "failed": 1,
        "not_fitting": 1, "diverged": 1, "stopped": 1, "num_samples": 6000, "seconds": 12.0, "search_trials": 18,
        "ooms": 6, "replays": 3, "wasted_samples": 60,
    }  # fmt: skip
