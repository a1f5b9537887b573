"""Each hypothesis has words, and is a sum or a mean."""

from __future__ import annotations

from typing import get_args

from autoaccum.loss.hypotheses import SUMS, WORDS, Hypothesis


def test_each_has_words_and_sums_are_told_from_means() -> None:
    assert set(WORDS) == set(get_args(Hypothesis))
    assert set(SUMS) == {"sum", "sum and penalties"}
