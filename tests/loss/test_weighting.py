"""Items are counted as the user counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import ArgumentError
from autoaccum.loss.counting import count_items
from autoaccum.testing import oom_at

BATCH = {"labels": torch.tensor([[1, -100], [2, 3]])}


@pytest.mark.parametrize(
    "make", [int, float, lambda count: count, lambda count: count.double(), lambda c: c.reshape(1)]
)
def test_items_as_the_user_counts_them(make: Any) -> None:
    found = count_items(lambda batch: make((batch["labels"] != -100).sum()), BATCH)
    assert found == 3.0
    assert type(found) is float


@pytest.mark.parametrize("value", [0, 0.0, False, torch.tensor(0)])
def test_no_item_at_all_is_a_count(value: Any) -> None:
    assert count_items(lambda batch: value, BATCH) == 0.0


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), torch.tensor(-2)])
def test_what_is_no_count(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^num_items\(micro-batch\)=-?[\w.]+: expected a count of at least 0\.$"):
        count_items(lambda batch: value, BATCH)


@pytest.mark.parametrize("value", [None, "many", torch.ones(3)])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"num_items\(micro-batch\)="):
        count_items(lambda batch: value, BATCH)


def test_an_oom_while_it_is_read_is_no_matter_of_the_argument() -> None:
    """Tell torch.OutOfMemoryError from the other RuntimeErrors, such as that of a tensor of many elements."""
    counted = torch.tensor(3)
    with oom_at(1), pytest.raises(torch.OutOfMemoryError):
        count_items(lambda batch: counted, BATCH)
