"""Each hypothesis has words."""

from __future__ import annotations

from autoaccum.events import HYPOTHESES


def test_each_has_words() -> None:
    assert set(HYPOTHESES) == {"num_items", "items", "sum"}
