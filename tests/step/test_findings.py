"""Values that a measurement hands on."""

from __future__ import annotations

import pytest

from autoaccum.step.findings import Decision, Outcome

pytestmark = pytest.mark.measured


def test_an_outcome_by_itself_is_a_decision() -> None:
    outcome = Outcome(hypothesis="sum", error=0.25, tensor="weight", errors=(0.1, 0.25))
    decision = Decision.of(outcome, passed=False)
    assert (decision.hypothesis, decision.passed, decision.error, decision.tensor) == ("sum", False, 0.25, "weight")
    assert (decision.errors, decision.cuts, decision.counts_samples) == ((0.1, 0.25), (), False)
