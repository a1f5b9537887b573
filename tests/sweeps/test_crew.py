"""The ranks of a sweep: what becomes of a trial that one of them ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from autoaccum.errors import ArgumentError, RankError
from autoaccum.sweeps import crew
from autoaccum.sweeps.crew import Crew, EndedElsewhere, Order, crew_of

CPU = torch.device("cpu")
ORDER = Order(0, {"lr": 0.1}, 7, Path("trial-0000"), "auto")


class Scripted:
    """A group that hears what it was told to."""

    is_first = False

    def __init__(self, *heard: Any) -> None:
        self.heard = list(heard)
        self.told: list[Any] = []
        self.failed: list[BaseException] = []

    def exchange(self, told: Any) -> list[Any]:
        self.told.append(told)
        return [self.heard.pop(0) if self.heard else told, told]

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function (what is heard) -> (a crew, its own group, that of the fits)."""

    def make(*heard: Any) -> tuple[Crew, Scripted, Scripted]:
        own, of_fits = Scripted(*heard), Scripted()
        monkeypatch.setattr(crew, "join", lambda device: of_fits)
        monkeypatch.setattr(crew, "Group", lambda device: own)
        return Crew(CPU), own, of_fits

    return make


def end_of(error: BaseException) -> dict[str, Any] | None:
    return {"not_fitting": {}} if isinstance(error, MemoryError) else None


def raising(error: Exception) -> Any:
    def run() -> None:
        raise error

    return run


def test_what_all_ranks_have_trained_is_returned(joined: Any) -> None:
    one, own, of_fits = joined()
    assert one.train(lambda: 5, end_of) == 5
    assert own.told == of_fits.told == [None]
    assert not of_fits.failed


def test_a_trial_that_another_rank_has_ended_is_told_from_a_sweep(joined: Any) -> None:
    heard = RankError(0, "MemoryError: ")
    one, _, of_fits = joined((False, {"not_fitting": {"micro_batch": 1}}))
    with pytest.raises(EndedElsewhere) as caught:
        one.train(raising(heard), end_of)
    assert caught.value.noted == {"not_fitting": {"micro_batch": 1}}
    assert of_fits.failed == [heard]
    one, _, _ = joined((False, None))
    with pytest.raises(RankError):
        one.train(raising(heard), end_of)


def test_its_own_error_stays_what_it_is(joined: Any) -> None:
    one, own, _ = joined((True, None))
    with pytest.raises(MemoryError):
        one.train(raising(MemoryError()), end_of)
    assert own.told == [(False, {"not_fitting": {}})]


def test_a_rank_follows_until_there_is_nothing_left(joined: Any) -> None:
    trials = [optuna.trial.create_trial(value=0.5)]
    outcome = crew.Outcome("of ranks", [optuna.study.StudyDirection.MINIMIZE], {"settings": 1}, trials)
    one, _, _ = joined(ORDER, (True, None), ORDER, None, outcome)
    orders: list[Order] = []

    def train(order: Order) -> None:
        orders.append(order)
        if len(orders) == 1:
            raise MemoryError

    study = one.follow(train, end_of)
    assert orders == [ORDER, ORDER]
    assert (study.study_name, study.user_attrs, study.best_value) == ("of ranks", {"settings": 1}, 0.5)


def test_a_sweep_of_one_process_has_no_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crew_of("together", 4) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert crew_of("independent", 1) is None
    with pytest.raises(ArgumentError, match="cannot find each other"):
        crew_of("together", 1)
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="jobs=2"):
        crew_of("together", 2)
