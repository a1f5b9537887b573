"""What was once wrong without a word, or an error for no reason is exact, and nothing is said of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.step.known import later
from tests.step.known.losses import LATE, MISREAD, NEGATED, NEITHER, SILENCED, ZERO_ITEMS, Case
from tests.step.others.harness import TOLERANCE, Loop, Outcome, check, run

pytestmark = pytest.mark.measured


def each(cases: dict[str, Case]) -> Any:
    """Parametrize a test over all cases of a table, each with all of its cuts."""
    found = [
        pytest.param(case, micro_batch, id=f"{name}-{micro_batch}")
        for name, case in cases.items()
        for micro_batch in case.cuts
    ]
    return pytest.mark.parametrize(("case", "micro_batch"), found)


def outcome_of(case: Case, micro_batch: Any, **options: Any) -> Outcome:
    largest = case.max_micro_batch if micro_batch == "auto" else None
    outcome = run(case.loop(**options), micro_batch, max_micro_batch=largest)
    assert len(outcome.cuts) == 3, "a window was not stepped on"
    assert all(map(math.isfinite, outcome.errors)), "stepped on NaN"
    return outcome


@pytest.mark.every(2)
@each(ZERO_ITEMS)
def test_a_micro_batch_with_nothing_to_count_neither_raises_nor_makes_nan(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch))


@pytest.mark.every(2)
@each(ZERO_ITEMS)
def test_nor_does_one_in_a_later_window(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch, empties=LATE))


@pytest.mark.every(2)
@each(NEGATED)
def test_a_negated_masked_mean(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch))


@pytest.mark.every(2)
@each(MISREAD)
def test_what_is_easily_misread_is_exact_and_not_announced(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch))


@pytest.mark.parametrize("micro_batch", [1, 4, (1,) * 10 + (2,), "auto"], ids=str)
def test_a_regression_of_hugging_face_is_exact(micro_batch: Any) -> None:
    """It squeezes outputs and labels, so that of one sample alone nothing is left to average."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data = {"input_ids": torch.randint(0, 20, (36, 8)), "labels": torch.randn(36, dtype=torch.double)}
    loop = Loop(transformers.BertForSequenceClassification(config).double(), data, window=12, micro_batch=4)
    check(run(loop, micro_batch, max_micro_batch=4 if micro_batch == "auto" else None))


@pytest.mark.every(2)
@each(NEITHER)
def test_what_no_count_makes_exact_is_exact(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch))


@pytest.mark.every(2)
@each(SILENCED)
def test_a_count_of_the_users_hides_nothing(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch))


@pytest.mark.parametrize("micro_batch", [4, "auto"])
@pytest.mark.parametrize("through", ["fit", "Accumulator"])
@pytest.mark.parametrize("name", later.LATER)
def test_what_begins_later_is_exact_from_its_first_step(name: str, through: str, micro_batch: Any) -> None:
    loop = later.loop(name, through)
    outcome = run(loop, micro_batch, max_micro_batch=4 if micro_batch == "auto" else None)
    assert len(outcome.cuts) == 5
    check(outcome)


PADDED = [4, (5, 5, 2), "auto"]


@pytest.mark.weighted
@pytest.mark.parametrize("micro_batch", PADDED, ids=str)
@pytest.mark.parametrize("attends", [False, True], ids=["mean", "attention"])
def test_padding_that_the_model_sees_is_said(attends: bool, micro_batch: Any) -> None:
    outcome = run(later.texts(attends, masks=False), micro_batch, 4 if micro_batch == "auto" else None)
    assert max(outcome.errors) > TOLERANCE
    check(outcome, ("samples meet in the model",))


@pytest.mark.parametrize("micro_batch", PADDED, ids=str)
@pytest.mark.parametrize("attends", [False, True], ids=["mean", "attention"])
def test_padding_that_the_model_leaves_out_is_not(attends: bool, micro_batch: Any) -> None:
    check(run(later.texts(attends, masks=True), micro_batch, 4 if micro_batch == "auto" else None))
