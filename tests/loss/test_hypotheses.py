"""Each hypothesis has words, and users may say which of them they mean."""

from __future__ import annotations

import pytest

from autoaccum.loss.hypotheses import SUMS, WORDS, is_stated


def test_each_has_words_and_sums_are_told_from_means() -> None:
    assert set(WORDS) == {"num_items", "items", "samples", "sum", "sum and penalties"}
    assert set(SUMS) == {"sum", "sum and penalties"}


@pytest.mark.parametrize(
    ("hypothesis", "reduction", "stated"),
    [
        ("items", None, True),
        ("items", "mean", True),
        ("sum", "mean", False),
        ("sum and penalties", "sum", True),
        ("samples", "sum", False),
    ],
)
def test_what_a_user_states_leaves_some(hypothesis: str, reduction: object, stated: bool) -> None:
    assert is_stated(hypothesis, reduction) is stated  # type: ignore[arg-type]
