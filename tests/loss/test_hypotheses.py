"""Each hypothesis has words."""

from __future__ import annotations

from autoaccum.loss.hypotheses import WORDS


def test_each_has_words() -> None:
    assert set(WORDS) == {"num_items", "items", "sum"}
