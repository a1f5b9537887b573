"""The memory of an Apple GPU, on a Metal that says what it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from autoaccum.memory.mps import MpsMemory

MIB = 2**20


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    held = SimpleNamespace(driver=0, available=900 * MIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: held.driver)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 600 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=held.available))
    return held


def test_the_limit_is_metal_s_or_the_host_s_whichever_is_less(held: SimpleNamespace) -> None:
    memory = MpsMemory()
    held.driver = 100 * MIB
    assert memory.limit() == 600 * MIB
    held.available = 300 * MIB
    assert memory.limit() == 400 * MIB


def test_the_peak_is_the_most_that_was_seen(held: SimpleNamespace) -> None:
    memory = MpsMemory()
    held.driver = 500 * MIB
    assert memory.peak() == 500 * MIB
    held.driver = 200 * MIB
    assert memory.peak() == 500 * MIB
    memory.reset_peak()
    assert memory.peak() == 200 * MIB


def test_it_knows_of_no_strain() -> None:
    memory = MpsMemory()
    assert [memory.strained(), memory.strained()] == [None, None]


def test_it_refuses_nothing_by_itself() -> None:
    """Metal gives more than it recommends."""
    assert (MpsMemory.enforced, MpsMemory.can_enforce) == (False, False)
