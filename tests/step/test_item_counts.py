"""Items are counted as the user counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.distributed.gradients import make_own
from autoaccum.errors import ArgumentError
from autoaccum.step.item_counts import Tally, count_items
from autoaccum.step.terms import NONE
from autoaccum.testing import oom_at
from tests.devices import DEVICE

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


def test_gradients_that_share_a_place_get_one_each() -> None:
    first, second, alone = (nn.Parameter(torch.randn(shape)) for shape in (6, (2, 3), 4))
    ((first.view(2, 3) + second.view(2, 3)).square().sum() + alone.square().sum()).backward()
    assert first.grad is not None
    assert second.grad is not None
    assert alone.grad is not None
    before = [p.grad.clone() for p in (first, second, alone) if p.grad is not None]
    assert first.grad.data_ptr() == second.grad.data_ptr(), "else this shows nothing"
    place = alone.grad.data_ptr()
    make_own([first, second, alone])
    assert first.grad.data_ptr() != second.grad.data_ptr()
    assert alone.grad.data_ptr() == place, "what is a parameter's own is not copied"
    for p, value in zip((first, second, alone), before, strict=True):
        assert torch.equal(p.grad, value)  # type: ignore[arg-type]


def test_gradients_of_other_layouts_and_none_are_left() -> None:
    sparse, none = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3))
    torch.nn.functional.embedding(torch.tensor([1, 1]), sparse, sparse=True).sum().backward()
    gradient = sparse.grad
    make_own([sparse, none])
    assert sparse.grad is gradient
    assert none.grad is None


class Positions(nn.Module):
    """Adds two parameters to each sample, as models do that are given time and place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.time = (nn.Parameter(torch.randn(3, 4).double()) for _ in range(2))
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + (self.place[None] + self.time[None])
        return self.head(hidden.tanh()).mean(dim=(1, 2))


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_window_has_its_gradient_where_parameters_share_theirs(micro_batch: int, clip_norm: float | None) -> None:
    data = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(4).double()
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss
    whole, model = Positions(), Positions()
    parameters = [p for name, p in sorted(whole.named_parameters())]
    for p, gradient in zip(parameters, torch.autograd.grad(loss_fn(whole(data[0]), data[1]), parameters), strict=True):
        p.grad = gradient.clone()
    if clip_norm:
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    accumulator = autoaccum.Accumulator(
        model, optimizer, loss_fn=loss_fn, micro_batch=micro_batch, clip_norm=clip_norm, verify=False
    )
    accumulator.step(data)
    for (name, p), expected in zip(sorted(model.named_parameters()), parameters, strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(before[name] - p, expected.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sum_that_counts_none_is_weighed_by_one(dtype: torch.dtype) -> None:
    """And not by what stands for its count, by which numbers of 16 bits would be infinite."""
    for deferred in (False, True):
        tally = Tally(8, deferred=deferred, total=64.0)
        counts = [torch.tensor(count, device=DEVICE) if deferred else count for count in (3.0, NONE, 5.0)]
        weights = [tally.weight(2, count, dtype, is_stated=True) for count in counts]
        assert [float(weight) for weight in weights if weight is not None] == [3 / 64, 1 / 64, 5 / 64]
        losses = [torch.tensor(value, dtype=dtype, device=DEVICE) for value in (2.0, 1000.0, 4.0)]
        assert float(tally.loss(losses, is_sum=False)) == pytest.approx((6 + 1000 + 20) / 8, rel=1e-6)
        assert tally.guess / tally.total(is_sum=False) == 8.0
    # Of a share of a window in which none counts more it is not known yet whether others do.
    tally = Tally(8, deferred=False, total=64.0)
    tally.weight(4, NONE)
    assert (tally.read(), tally.read_apart()) == ([0.0], [NONE])
