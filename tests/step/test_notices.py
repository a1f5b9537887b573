"""The words that a step has for its user."""

from __future__ import annotations

from autoaccum.step import notices


def test_they_name_what_they_are_about() -> None:
    assert "window 7 counts" in notices.nothing_counts(7).cause
    assert notices.above_limit(1024, 2048).cause == (
        "The limit is 1.00 KiB now, and the smallest micro-batch needs 2.00 KiB"
    )
    assert notices.killed_at_the_smallest(2).cause.endswith("in a micro-batch of 2")
    assert notices.not_finite(4, float("nan")).cause == "The loss of window 4 is nan"


def test_what_is_said_once_is_told_by_the_consequence() -> None:
    assert notices.not_finite(4, 1.0).consequence == notices.not_finite(5, 2.0).consequence
    assert notices.above_limit(1, 2).consequence == notices.above_limit(3, 4).consequence
