"""A study in numbers and sentences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import optuna.importance  # a lazy stand-in until then, whose attributes are not those that importances_of sees
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from autoaccum.sweeps.facts import StudyFacts, facts_of, importances_of
from autoaccum.sweeps.studies import runs_of
from tests.reporting.synthetic import report, write
from tests.sweeps.studies import law, running, study, trial


def answer(facts: StudyFacts, question: str) -> str:
    (found,) = (answer.text for answer in facts.answers if question in answer.question)
    return found


def test_the_sentences() -> None:
    facts = facts_of(
        study(
            trial(0.5, 0.1, 16, search_trials=5),
            trial(0.25, 0.01, 64, seconds=75.0),
            trial(None, 0.5),
            trial(None, 0.6, not_fitting={"micro_batch": 1}),
            trial(None, 0.7, diverged=True),
            trial(None, state=TrialState.FAIL),
            running(),
        )
    )
    assert answer(facts, "searched") == (
        "lr from 0.0001 to 1 (logarithmic); effective_batch among 16, 64, 256. A trial has 1,000 samples, and what is "
        "sought is the lowest validation_loss."
    )
    assert answer(facts, "end?") == (
        "7 trials: 2 came to the end, 1 pruned, 1 did not fit, 1 diverged, 1 running or killed, 1 failed."
    )
    assert answer(facts, "best?") == (
        "Trial 1 (lr 0.01, effective_batch 64) has the lowest validation_loss, 0.25, after 1 min 15 s of training. The "
        "next best has 0.5: trial 0 (lr 0.1, effective_batch 16)."
    )
    assert answer(facts, "cost?") == (
        "20 sizes were tried, 5 of them in the first trial; the device ran out of memory 6 times, and at most 60 of "
        "6,000 samples (1.0%) had to be run again."
    )
    assert [one.good for one in facts.answers] == [None, False, None, False, None]
    assert facts.best == (1, 0)
    assert facts.counts == {
        "complete": 2, "pruned": 1, "did not fit": 1, "diverged": 1, "stopped": 0, "running": 1, "failed": 1,
        "waiting": 0,
    }  # fmt: skip
    assert facts.state == "1 running or killed, 6 ended"
    assert facts.totals["seconds"] == 85.0


def test_choices_that_hold_commas_are_told_apart() -> None:
    space = {"effective_batch": CategoricalDistribution(["16", "16, 5:64"])}
    facts = facts_of(study(trial(0.5, None, "16", space=space, search_trials=1)))  # type: ignore[arg-type, dict-item]
    assert "effective_batch among 16, '16, 5:64'. A trial has 1,000 samples" in answer(facts, "searched")
    assert answer(facts, "cost?").startswith("1 size was tried, 1 of them in the first trial;")


def test_no_failed_trial_is_good_news() -> None:
    facts = facts_of(study(trial(0.5), trial(None)))
    assert [one.good for one in facts.answers] == [None, True, None, True, None]
    assert answer(facts, "cost?").endswith(" No trial was lost by it.")
    assert facts.state == "2 ended"


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_how_lr_grows_with_the_batch(power: float) -> None:
    facts = facts_of(study(*law(power)))
    assert [best.lr for best in facts.best_lrs] == pytest.approx([0.001 * b**power for b in (16, 64, 256)])
    assert answer(facts, "grow").startswith(
        f"As its power {power:.2f} ± 0.00, over 3 effective batches from 16 to 256;"
    )


def test_any_effective_batch_is_taken_by_octaves() -> None:
    space: dict[str, Any] = {"effective_batch": IntDistribution(10, 100, log=True)}
    trials = [trial(lr, lr, batch, space=space) for lr, batch in ((0.1, 15), (0.2, 17), (0.3, 60), (0.4, 66))]
    assert [best.effective_batch for best in facts_of(study(*trials)).best_lrs] == [15, 60]


def test_the_order_is_best_first() -> None:
    facts = facts_of(
        study(
            running(),
            trial(None, reports={500: 0.1}),
            trial(0.5),
            trial(None, reports={500: 0.9, 700: 0.8}),
            trial(0.25),
            trial(math.inf),
            trial(None, reports={500: 0.05}),
            trial(None, reports={}),
        )
    )
    assert [one.number for one in facts.trials] == [4, 2, 5, 3, 6, 1, 7, 0]
    assert facts.best == (4, 2, 5)


def test_of_several_metrics_the_front_comes_first() -> None:
    made = study(
        trial((0.5, 9.0)), trial((0.6, 9.5)), trial((0.1, 20.0)), trial(None), trial((0.7, 1.0)),
        metric=("validation_loss", "seconds"),
    )  # fmt: skip
    facts = facts_of(made)
    assert facts.best == (2, 0, 4)
    assert [one.number for one in facts.trials] == [2, 0, 4, 1, 3]
    assert answer(facts, "best?") == (
        "3 trials are not beaten in all of validation_loss and seconds; trial 2 (lr 0.1, effective_batch 16) has "
        "the lowest validation_loss, 0.1; trial 4 (lr 0.1, effective_batch 16) has the lowest seconds, 1."
    )


def test_of_what_is_maximised_the_highest_is_best() -> None:
    facts = facts_of(
        study(
            trial(0.5),
            trial(0.9, 0.01),
            trial(-math.inf),
            trial(None, reports={500: 0.1}),
            trial(None, reports={500: math.nan}),
            trial(None, reports={500: 0.3}),
            metric=("accuracy",),
            direction=("maximize",),
        )
    )
    assert [one.number for one in facts.trials] == [1, 0, 2, 5, 3, 4]
    assert facts.best == (1, 0, 2)
    assert (facts.directions, facts.is_maximised()) == (("maximize",), True)
    assert facts.trials[0].values == (0.9,), "signs are for comparing only"
    assert answer(facts, "searched").endswith(" and what is sought is the highest accuracy.")
    assert answer(facts, "best?").startswith("Trial 1 (lr 0.01, effective_batch 16) has the highest accuracy, 0.9")
    assert " The next best has 0.5: trial 0 " in answer(facts, "best?")


def test_the_best_lr_is_that_of_the_highest_where_it_is_maximised() -> None:
    mirrored = [trial(7 - one.values[0], **one.params) for one in law(0.5)]
    facts = facts_of(study(*mirrored, metric=("accuracy",), direction=("maximize",)))
    assert [best.lr for best in facts.best_lrs] == pytest.approx([0.001 * b**0.5 for b in (16, 64, 256)])


def test_a_front_of_mixed_directions() -> None:
    made = study(
        trial((0.5, 0.80)), trial((0.6, 0.79)), trial((0.1, 0.2)), trial(None), trial((0.7, 0.9)), trial((0.7, 0.1)),
        metric=("validation_loss", "accuracy"), direction=("minimize", "maximize"),
    )  # fmt: skip
    facts = facts_of(made)
    assert facts.best == (2, 0, 4)
    assert [one.number for one in facts.trials] == [2, 0, 4, 1, 5, 3]
    assert answer(facts, "searched").endswith(" is the lowest validation_loss and the highest accuracy.")
    assert answer(facts, "best?") == (
        "3 trials are not beaten in all of validation_loss and accuracy; trial 2 (lr 0.1, effective_batch 16) has "
        "the lowest validation_loss, 0.1; trial 4 (lr 0.1, effective_batch 16) has the highest accuracy, 0.9."
    )


@pytest.mark.parametrize(
    ("metric", "reported"),
    [("validation_loss", "validation_loss"), ("accuracy", "accuracy"), ("seconds", "validation_loss")],
)
def test_what_trials_report(metric: str, reported: str) -> None:
    assert facts_of(study(metric=(metric,))).reported == reported


def test_a_trial_that_a_callback_ended_is_stopped() -> None:
    facts = facts_of(
        study(
            trial(1.0, 0.1),
            trial(2.0, 0.01),
            trial(None, 0.5, stopped=True, reports={900: 0.1}),
            trial(None, 0.05, diverged=True),
            trial(None, 0.05),
        )
    )
    assert [(one.number, one.state) for one in facts.trials[2:]] == [(4, "pruned"), (3, "diverged"), (2, "stopped")]
    assert answer(facts, "end?") == (
        "5 trials: 2 came to the end, 1 pruned, 1 diverged, 1 stopped by a callback."
    )  # fmt: skip
    assert facts.state == "5 ended"
    (best,) = facts.best_lrs
    assert (best.lr, best.num_trials, best.is_edge) == (0.1, 5, False), "it was tried, at 0.5"


def test_what_was_noted_before_a_trial_went_on_is_not_its_end() -> None:
    facts = facts_of(study(trial(0.5, diverged=True), running(not_fitting={"micro_batch": 1})))
    assert [one.state for one in facts.trials] == ["complete", "running"]
    assert facts.best == (0,)


@pytest.mark.parametrize("lr", [0.0, -0.1, math.inf])
def test_an_lr_that_has_no_logarithm_has_no_place(lr: float) -> None:
    space: dict[str, Any] = {"lr": CategoricalDistribution([lr, 0.1, 0.2])}
    facts = facts_of(study(trial(0.1, lr, space=space), trial(0.3, 0.1, space=space), trial(0.2, 0.2, space=space)))
    assert [best.lr for best in facts.best_lrs] == [0.2]
    assert sum(one.place is not None for one in facts.trials) == 2


@pytest.mark.parametrize("trials", [(), (trial(0.5),), (trial(0.5), trial(0.4)), (trial(None),) * 3, (running(),)])
def test_a_study_that_has_only_begun(trials: tuple[Any, ...]) -> None:
    made = study(*trials)
    facts = facts_of(made)
    assert len(facts.trials) == len(trials)
    assert facts.growth is None
    assert answer(facts, "grow").startswith("It takes two effective batches")
    assert importances_of(made)[0] == {}
    if not any(one.values for one in facts.trials):
        assert answer(facts, "best?") == "No trial has come to the end yet."
    if not trials:
        assert answer(facts, "end?") == "There is none yet."
        assert (
            answer(facts, "searched") == "A trial has 1,000 samples, and what is sought is the lowest validation_loss."
        )


def test_a_schedule_has_no_place_among_batches() -> None:
    space: dict[str, Any] = {"effective_batch": CategoricalDistribution(["32, 20:64", 32])}
    chosen: list[Any] = ["32, 20:64", 32]
    facts = facts_of(study(*(trial(0.1, lr, batch, space=space) for batch in chosen for lr in (0.1, 0.2))))
    assert [best.effective_batch for best in facts.best_lrs] == [32]
    assert sum(one.place is not None for one in facts.trials) == 2


# Importance.


def test_importance_is_of_what_the_value_varies_by() -> None:
    pytest.importorskip("sklearn")
    by_lr = study(*(trial(lr, lr, batch) for lr in (0.1, 0.2, 0.4, 0.8) for batch in (16, 64)))
    importances, why_not = importances_of(by_lr)
    assert list(importances) == ["lr", "effective_batch"]
    assert importances["lr"] > 0.9
    assert sum(importances.values()) == pytest.approx(1)
    assert why_not == ""


def test_ranges_may_have_changed_between_calls() -> None:
    pytest.importorskip("sklearn")
    ranges: list[dict[str, Any]] = [{"lr": FloatDistribution(*ends, log=True)} for ends in ((0.1, 0.5), (0.2, 2.0))]
    tried = [(lr, batch) for lr in (0.2, 0.3, 0.4, 0.5) for batch in (16, 64)]
    changed = study(*(trial(lr, lr, batch, space=ranges[at % 2]) for at, (lr, batch) in enumerate(tried)))
    assert list(importances_of(changed)[0]) == ["lr", "effective_batch"]
    assert answer(facts_of(changed), "searched").startswith(
        "lr from 0.1 to 0.5 (logarithmic), then from 0.2 to 2 (logarithmic); "
    )
    many = [{"lr": FloatDistribution(0.1, high)} for high in (0.2, 0.3, 0.4, 0.5)]
    changed = study(*(trial(0.1, space=dict(space)) for space in many))
    assert answer(facts_of(changed), "searched").startswith("lr from 0.1 to 0.5, in 4 ranges; ")


def test_importance_that_cannot_be_told() -> None:
    assert importances_of(study(*(trial(lr, lr) for lr in (0.1, 0.2)))) == (
        {}, "Too few trials are complete to tell: it takes 8."
    )  # fmt: skip
    assert importances_of(study(*[trial(0.5)] * 9))[1] == "All complete trials are alike."
    assert importances_of(study(*(trial(0.5, lr / 10) for lr in range(1, 10))))[1] == "All complete trials are alike."


def test_importance_leaves_out_what_is_not_finite() -> None:
    pytest.importorskip("sklearn")
    tried = [(lr, batch) for lr in (0.1, 0.2, 0.4, 0.8) for batch in (16, 64)]
    made = study(*(trial(-lr, lr, batch) for lr, batch in tried), trial(-math.inf, 0.3), metric=("accuracy",))
    assert importances_of(made)[0]["lr"] > 0.9


def test_importance_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**options: Any) -> None:
        raise ImportError("Tried to import 'sklearn' but failed.")

    monkeypatch.setattr(optuna.importance, "FanovaImportanceEvaluator", missing)
    assert importances_of(study(*law(0.5))) == (
        {}, "Optuna takes scikit-learn to tell: python -m pip install scikit-learn."
    )  # fmt: skip


# Records of trials.


def test_only_the_records_of_this_study_are_taken(tmp_path: Path) -> None:
    made = study(trial(0.5, directory="here"), trial(0.4, directory="there"), trial(0.3, directory="here"))
    assert runs_of(made, tmp_path) == {}, "nobody knows whose directory it is"
    (tmp_path / "id").write_text("here")
    for number in (0, 1):
        write(tmp_path / f"trial-{number:04d}", report(1))
    assert list(runs_of(made, tmp_path)) == [0], "1 was run elsewhere, and 2 has not begun"


def test_the_seed_of_the_best_is_told() -> None:
    facts = facts_of(study(trial(0.5, seed=7), trial(0.25, seed=8)))
    assert answer(facts, "best?").startswith("Trial 1 (lr 0.1, effective_batch 16, seed 8) has the lowest ")
    assert [one.seed for one in facts.trials] == [8, 7]
