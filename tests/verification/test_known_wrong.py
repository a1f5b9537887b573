"""What was once wrong without a word, or an error for no reason: exact now, or said with its measured error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.verification.known.losses import MISREAD, NEGATED, NEITHER, ZERO_ITEMS, Case
from tests.verification.others.harness import Outcome, check, run


def each(cases: dict[str, Case]) -> Any:
    """Parametrize a test over all cases of a table, each with all of its cuts."""
    found = [
        pytest.param(case, micro_batch, id=f"{name}-{micro_batch}")
        for name, case in cases.items()
        for micro_batch in case.cuts
    ]
    return pytest.mark.parametrize(("case", "micro_batch"), found)


def outcome_of(case: Case, micro_batch: Any) -> Outcome:
    outcome = run(case.loop(), micro_batch, max_micro_batch=case.max_micro_batch if micro_batch == "auto" else None)
    assert len(outcome.cuts) == 3, "a window was not stepped on"
    assert all(map(math.isfinite, outcome.errors)), "stepped on NaN"
    return outcome


@each(ZERO_ITEMS)
def test_a_micro_batch_with_nothing_to_count_neither_raises_nor_makes_nan(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch), case.words)


@each(NEGATED)
def test_a_negated_masked_mean(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch), case.words)


@each(MISREAD)
def test_what_is_easily_misread_is_exact_and_not_announced(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch), case.words)


@each(NEITHER)
def test_what_no_count_makes_exact_is_said(case: Case, micro_batch: Any) -> None:
    check(outcome_of(case, micro_batch), case.words)
