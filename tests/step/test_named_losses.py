"""Losses that are returned by name, weighed one by one as the user counts their items."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError
from autoaccum.step.named_losses import Named, counted_beforehand
from autoaccum.step.readback import Numbers
from autoaccum.step.terms import NONE, Computed

A, B = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)


def computed(**losses: Any) -> Computed:
    losses = {name: loss * 1.0 for name, loss in losses.items()}
    return Computed(sum(losses.values()), losses)  # type: ignore[arg-type]


def test_each_adds_its_share_of_the_items_of_the_window() -> None:
    named = Named(8, {"a": 4.0})
    weighed, divisions = named.weigh(0, computed(a=A, b=B), {"a": 1.0}, 2)
    assert weighed is not None
    assert (weighed.item(), divisions) == (3 / 4 + 5 * 2 / 8, ())  # b is not counted, and a mean over samples
    assert torch.autograd.grad(weighed, [A, B]) == (torch.tensor(0.25), torch.tensor(0.25))
    assert named.losses([1.0]) == {"loss/a": torch.tensor(0.75), "loss/b": torch.tensor(1.25)}


def test_what_holds_no_items_adds_nothing() -> None:
    named = Named(8, {"a": 4.0, "b": 0.0})
    nothing = computed(a=A * float("nan"), b=B)
    assert named.weigh(0, nothing, {"a": 0.0, "b": NONE}, 2) == (None, ())
    weighed, _ = named.weigh(1, computed(a=A, b=B), {"a": 4.0, "b": 0.0}, 6)
    assert weighed is not None
    assert weighed.item() == 3.0
    assert named.counting([2, 6]) == [0.0, 6.0]
    assert named.losses([1.0, 1.0]) == {"loss/a": torch.tensor(3.0)}


def test_a_loss_that_is_counted_in_other_micro_batches_alone_holds_no_items() -> None:
    weighed, _ = Named(8, {"a": 4.0}).weigh(0, computed(a=A, b=B), {"b": 8.0}, 2)
    assert weighed is not None
    assert weighed.item() == 5.0


def test_a_sum_beside_a_count_of_none_belongs_to_the_window_all_the_same() -> None:
    named = Named(8, {"a": 4.0})
    weighed, _ = named.weigh(0, computed(a=A), {"a": NONE}, 2)
    assert weighed is not None
    assert weighed.item() == 3 / 4
    assert named.other_totals(is_wide=True) == {"a": 0.0} or named.other_totals(is_wide=True) is None


@pytest.mark.parametrize(("shown", "wanted"), [(4.0, None), (5.0, {"a": 5.0})])
def test_the_items_of_the_window_are_compared_with_those_beforehand(shown: float, wanted: Any) -> None:
    named = Named(8, {"a": 4.0})
    named.weigh(0, computed(a=A, b=B), {"a": 1.0}, 2)
    named.weigh(1, computed(a=A, b=B), {"a": shown - 1}, 6)
    assert named.other_totals(is_wide=True) == wanted


def test_numbers_in_the_place_of_losses_are_added_and_weigh_nothing() -> None:
    given = computed(a=A)
    weighed, _ = Named(8, {"a": 4.0}).weigh(0, given._replace(loss=given.loss + 8, rest=8.0), {"a": 1.0}, 2)
    assert weighed is not None
    assert weighed.item() == 3 / 4 + 8 * 2 / 8


def test_losses_with_one_weight_are_reported_by_shares() -> None:
    named = Named(8, {})
    named.keep(1, computed(a=A, b=B).terms)
    assert named.losses([0.25, 0.75]) == {"loss/a": torch.tensor(2.25), "loss/b": torch.tensor(3.75)}
    assert named.losses([1.0, 0.0]) == {}, "a micro-batch that counts nothing"


def test_the_micro_batches_of_another_rank_come_after_those_that_are_there() -> None:
    first, other = Named(8, {"a": 4.0}), Named(8, {"a": 4.0})
    first.weigh(0, computed(a=A), {"a": 1.0}, 2)
    other.weigh(0, computed(a=B), {"a": 3.0}, 6)
    joined = first.without_micro_batches()
    joined.absorb(first, 0)
    joined.absorb(other, 1)
    assert joined.losses([1.0, 1.0]) == {"loss/a": torch.tensor(3 / 4 + 15 / 4)}
    assert joined.counting([2, 6]) == [2.0, 6.0]


def test_counts_that_are_read_at_the_end_may_be_zero() -> None:
    named = Named(8, {"a": 4.0})
    weighed, _ = named.weigh(0, computed(a=A), {"a": torch.tensor(0)}, 2)
    assert weighed is not None
    assert weighed.item() == 0.0
    numbers = Numbers()
    named.want(numbers)
    numbers.read()
    named.take_read(numbers)
    assert named.has_late_zero()


def test_counts_of_other_losses_are_refused() -> None:
    with pytest.raises(ArgumentError, match="names of the losses"):
        Named(8, {}).weigh(0, computed(a=A), {"c": 1.0}, 2)


class Counted(Window):
    num_samples = 150

    def samples(self, positions: Any) -> Any:
        return list(positions)


def test_a_window_is_counted_piece_by_piece() -> None:
    pieces: list[int] = []

    def count(batch: Any) -> dict[str, Any]:
        pieces.append(len(batch))
        return {"all": len(batch), "late": torch.tensor(len(batch) // 50), "none": NONE}

    window: Any = object.__new__(Counted)
    assert counted_beforehand(window, count) == {"all": 150.0, "late": 2.0, "none": 0.0}
    assert pieces == [64, 64, 22]
