"""Numbers and durations as texts."""

from __future__ import annotations

import math

import pytest

from autoaccum.reporting.lines import format_rate, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0005, "0.5 ms"), (59.94, "59.9 s"), (60, "1 min"), (3600, "1 h"), (90_061, "1 d 1 h"), (math.inf, "unknown")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_numbers() -> None:
    assert format_rate(999.96) == "1000"
