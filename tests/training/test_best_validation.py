"""Which validation is the best: by the loss, or by what ``KeepBest`` names; and that its checkpoint is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import KeepBest
from autoaccum.errors import ArgumentError, AutoaccumWarning, StopTraining
from autoaccum.events import Validated
from autoaccum.runs import checkpoint
from autoaccum.training.best_validation import Validations
from tests.models import classes, mlp


def test_of_losses_is_the_lowest_that_is_a_number() -> None:
    validations = Validations()
    assert not validations.is_best_at(0), "before the first"
    for step, loss in enumerate([math.nan, 3.0, 2.0, 2.0, 4.0, math.nan], start=1):
        validations.step = step
        validations.add(loss)
        assert validations.is_best_at(step) is (step in (2, 3, 4))
        assert not validations.is_best_at(step - 1)
        assert validations.is_unsaved_best is (step in (2, 3)), "the same loss again is no better"
        validations.is_unsaved_best = False
    assert validations.best_loss == 2.0


class Scored:
    """A run whose validations report scores that are said beforehand, one after the other."""

    def __init__(self, place: Path, scores: list[float]) -> None:
        self.place, self.scores, self.heard = place, scores, 0
        self.states: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []
        self.stop_after = 0

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), self.scores[min(self.heard, len(self.scores) - 1)])

    def __call__(self, record: Any, trainer: Any) -> None:
        if isinstance(record, Validated):
            self.heard += 1
            self.losses.append(record.loss)
            self.states.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
            if self.heard == self.stop_after:
                raise StopTraining

    def fit(self, *callbacks: Any, **options: Any) -> autoaccum.FitResult:
        given: dict[str, Any] = {
            "run_dir": self.place,
            "validation_data": classes(16),
            "metrics": {"score": self.score},
        }
        return autoaccum.fit(
            mlp(), classes(16), effective_batch=8, micro_batch=8, epochs=4, lr=1e-2, loss_fn=cross_entropy, device="cpu",
            progress=False, cache=False, verify=False, callbacks=[*callbacks, self], **given | options,
        )  # fmt: skip

    def best(self) -> int:
        """Return which validation, counted from 0, ``load_best`` has the weights of."""
        loaded = autoaccum.load_best(self.place, mlp(seed=5)).state_dict()
        return [all(loaded[name].equal(state[name]) for name in loaded) for state in self.states].index(True)


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", [1, 5, 3, 5], 1),
        ("max", [5, 1, 3, 4], 0),
        ("min", [2, 5, 1, 3], 2),
        ("max", [math.nan, 1, 0, math.nan], 1),
    ],
)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_metric_says_which(mode: Any, scores: list[float], best: int, stop: int, tmp_path: Path) -> None:
    """Whether or not the run was stopped after some validation, and goes on."""
    run = Scored(tmp_path, scores)
    if stop:
        run.stop_after = stop
        run.fit(KeepBest("score", mode))
    run.fit(KeepBest("score", mode))
    assert run.heard == 4
    assert run.losses == sorted(run.losses, reverse=True), "by the loss it would be the last"
    assert run.best() == best
    found, _ = checkpoint.every(tmp_path / "checkpoints")
    assert len([one for one in found if one.is_best]) == 1


@pytest.mark.parametrize("other", [("score", "min"), ("loss", "max")])
def test_of_another_metric_or_mode_it_begins_anew_and_says_so(other: Any, tmp_path: Path) -> None:
    """The best of the one says nothing of the other: 9 is no score that a lower one has to be below."""
    run = Scored(tmp_path, [9, 8, 7, 6])
    run.stop_after = 1
    run.fit(KeepBest("score", "max"))
    told = r"holds the state of a KeepBest with another metric or mode at callbacks\[0\]"
    with pytest.warns(AutoaccumWarning, match=told):
        run.fit(KeepBest(*other))
    assert run.best() == (3 if other[0] == "score" else 1)


def test_what_began_anew_goes_on_in_another_run() -> None:
    """The same object may be in several."""
    kept, of_other = KeepBest("score", "max"), KeepBest("score", "min")
    kept.best, kept.num_bad = 3.0, 1
    kept.load_state_dict(of_other.state_dict())
    assert (kept.begins_anew, kept.best) == (True, 3.0)
    kept.load_state_dict({"best": 5.0, "num_bad": 2, "metric": "score", "mode": "max"})
    assert (kept.begins_anew, kept.best, kept.num_bad) == (False, 5.0, 2)


def test_without_it_the_loss_does(tmp_path: Path) -> None:
    run = Scored(tmp_path, [1, 5, 3, 2])
    run.fit()
    assert run.best() == 3


def test_a_score_that_was_never_a_number_has_no_best(tmp_path: Path) -> None:
    run = Scored(tmp_path, [math.nan])
    run.fit(KeepBest("score", "max"))
    with pytest.raises(ArgumentError, match="run_dir"):
        run.best()


@pytest.mark.parametrize(
    ("callbacks", "options", "told"),
    [
        ([("score", "max")], {"run_dir": None}, "callbacks='KeepBest': expected run_dir beside it"),
        ([("score", "max")], {"validation_data": None, "metrics": None}, "validation_data beside it"),
        ([("scor", "max")], {}, "metric='scor': expected one of loss, score, which validations report"),
        ([("score", "max"), ("loss", "min")], {}, "callbacks='KeepBest, KeepBest': expected one of them"),
        ([("score", "maximum")], {}, "mode='maximum'"),
    ],
)
def test_what_it_cannot_do_is_said_before_training(callbacks: Any, options: Any, told: str, tmp_path: Path) -> None:
    run = Scored(tmp_path, [1])
    with pytest.raises(ArgumentError, match=told):
        run.fit(*(KeepBest(*given) for given in callbacks), **options)
    assert run.heard == 0
