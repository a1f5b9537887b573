"""The losses of a validation: kept unread, read together, and joined as those of one batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autoaccum.step.readback import Numbers
from autoaccum.step.terms import NONE, Reduction
from autoaccum.training import validation
from autoaccum.training.validation import Loss, Losses, read_losses
from tests.devices import DEVICE


def one(value: float, items: Any, size: int = 2) -> Loss:
    return Loss({"": torch.tensor(value, device=DEVICE)}, {"": Reduction(items)}, size)


def named(**losses: tuple[float, Any]) -> Loss:
    values = {name: torch.tensor(value) for name, (value, _) in losses.items()}
    return Loss(values, {name: Reduction(items) for name, (_, items) in losses.items()}, 2)


def joined(*losses: tuple[int, Any]) -> float:
    found = Losses()
    for size, loss in losses:
        found.add(size, loss)
    read_losses([found])
    return found.joined()[0]


def test_each_weighs_as_many_items_as_it_has() -> None:
    assert joined((2, one(1.0, 3.0)), (2, one(5.0, 1.0))) == 2.0


@pytest.mark.device
def test_one_that_counts_nothing_may_be_no_number() -> None:
    assert joined((2, one(1.0, 3.0)), (2, one(math.nan, torch.tensor(0.0, device=DEVICE)))) == 1.0
    assert math.isnan(joined((2, one(math.nan, 0.0))))


def test_a_sum_that_counts_none_is_added_and_nothing_where_all_do() -> None:
    assert joined((2, one(3.0, 2.0)), (2, one(4.0, NONE))) == 5.0
    assert math.isnan(joined((2, one(4.0, NONE)), (2, one(1.0, NONE))))


def test_by_their_names_each_over_its_own_items() -> None:
    first = named(a=(1.0, 1.0), b=(2.0, 3.0))
    second = named(a=(3.0, torch.tensor(3)))
    assert joined((2, first), (1, second)) == pytest.approx((1 + 9) / 4 + 2)


def test_each_that_has_a_name_is_told_by_itself_and_one_that_counts_nothing_is_not() -> None:
    found = Losses()
    found.add(2, named(a=(1.0, 1.0), b=(math.nan, 0.0)))
    found.add(1, named(a=(3.0, 3.0), b=(math.nan, 0.0)))
    read_losses([found])
    assert found.joined() == (2.5, {"loss/a": 2.5})


def test_many_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "AT_ONCE", 3)
    losses, kept = Losses(), []
    for index in range(7):
        losses.add(1, one(float(index), 1.0, 1))
        kept.append(len(losses._unread))
    assert kept == [1, 2, 0, 1, 2, 0, 1]
    read_losses([losses])
    assert losses.joined() == (3.0, {})


def test_a_reading_that_failed_half_way_is_done_again() -> None:
    class Failing(Loss):
        is_full = True

        def parts(self) -> list[validation.Part]:
            if self.is_full:
                self.is_full = False
                raise torch.OutOfMemoryError
            return super().parts()

    losses = Losses()
    losses.add(1, one(1.0, 1.0, 1))
    losses.add(1, Failing({"": torch.tensor(3.0)}, {"": Reduction(1.0)}, 1))
    with pytest.raises(torch.OutOfMemoryError):
        losses.take_read(Numbers())
    read_losses([losses])
    assert losses.joined() == (2.0, {})


def test_a_sum_is_added_up_and_a_mean_averaged_as_was_measured() -> None:
    found = Losses()
    for value in (3.0, 5.0):
        found.add(2, one(value, 2.0))
    read_losses([found])
    assert [found.joined(hypothesis)[0] for hypothesis in (None, "items", "sum")] == [4.0, 4.0, 8.0]
