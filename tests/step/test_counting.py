"""Items are counted as users do: of one loss, or of each of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.step.item_counts import count_each, count_items, never_zero
from autoaccum.step.terms import NONE, without_none
from autoaccum.testing import oom_at
from tests.devices import there

BATCH = torch.tensor([1, -100, 3])


def labelled(batch: torch.Tensor) -> torch.Tensor:
    return (batch != -100).sum()


def test_of_one_loss() -> None:
    assert count_items(labelled, BATCH) == 2.0
    assert count_each(labelled, BATCH) == {}


@pytest.mark.parametrize(
    "num_items", [{"a": labelled, "b": len}, lambda batch: {"a": labelled(batch), "b": len(batch)}]
)
def test_of_several_by_name(num_items: Any) -> None:
    assert count_items(num_items, BATCH) == {"a": 2.0, "b": 3.0}
    assert count_each(num_items, BATCH) == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("num_items", [[labelled, len], lambda batch: (labelled(batch), len(batch))])
def test_of_several_by_place(num_items: Any) -> None:
    assert count_items(num_items, BATCH) == {"0": 2.0, "1": 3.0}


def test_a_count_that_is_none_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^num_items\(micro-batch\)\['b'\]=-1"):
        count_items({"a": labelled, "b": lambda batch: -1}, BATCH)
    with pytest.raises(ArgumentTypeError, match=r"^num_items\(micro-batch\)='many'"):
        count_items(lambda batch: "many", BATCH)


@pytest.mark.parametrize(
    "none",
    [0, 0.0, *(pytest.param(none, marks=pytest.mark.device) for none in (torch.tensor(0), torch.zeros(1)))],
)
def test_a_count_of_0_may_be_next_to_nothing(none: Any) -> None:
    """In whatever a user's function returns it; other counts are as they were, and mistakes are told as ever."""
    none = there(none) if isinstance(none, torch.Tensor) else none
    for num_items in (lambda batch: {"a": none, "b": 3}, {"a": lambda batch: none, "b": len}):
        found = count_items(never_zero(num_items), BATCH)
        assert isinstance(found, dict)
        assert {name: float(count) for name, count in found.items()} == {"a": NONE, "b": 3.0}
        assert [float(without_none(count)) for count in found.values()] == [0.0, 3.0]
    assert count_items(never_zero([lambda batch: none, len]), BATCH).keys() == {"0", "1"}
    with pytest.raises(ArgumentTypeError, match=r"^num_items\(micro-batch\)='many'"):
        count_items(never_zero(lambda batch: "many"), BATCH)


def test_memory_that_runs_out_while_a_count_is_read_is_no_count() -> None:
    with oom_at(1), pytest.raises(torch.OutOfMemoryError):
        never_zero(lambda batch: batch)(torch.zeros(()))
