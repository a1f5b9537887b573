"""Whether joined windows are exact, as far as a few samples tell."""

from __future__ import annotations

import pytest

from autoaccum.step.joined_measurement import JoinedVerdict, sizes_of
from autoaccum.step.split_calls import Layout
from tests.models import mlp

pytestmark = pytest.mark.measured


@pytest.mark.parametrize("count", range(2, 40))
def test_samples_are_split_unevenly(count: int) -> None:
    sizes = sizes_of(count)
    assert sum(sizes) == count
    assert min(sizes) > 0
    assert len(sizes) > 1
    assert count == 2 or len(set(sizes)) > 1


def test_nothing_that_was_not_measured_has_passed() -> None:
    assert not JoinedVerdict(unmeasured="why").passed
    assert JoinedVerdict(layout=Layout([mlp()]), error=1e-9, tolerance=1e-6).passed
    assert not JoinedVerdict(layout=Layout([mlp()]), error=1e-3, tolerance=1e-6).passed
