"""What stands between a call and its micro-batches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.step.split_calls import (
    Known,
    Layout,
    NotRowsError,
    SplitCalls,
    UnknownCallError,
    _told,
    called_children,
    joined_rows,
    rows_of,
)

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def inputs() -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((8, 3), (0, 1)), ((16, 3), (0, 2)), ((3, 8, 2), (1, 1)), ((3, 2), None), ((), None), ((0, 3), None)],
)
def test_rows_are_found_in_dim_0_and_then_in_dim_1(shape: tuple[int, ...], rows: Any) -> None:
    assert rows_of(shape, 8) == rows


@pytest.mark.parametrize(
    ("shapes", "sizes", "rows"),
    [
        ([(3, 5), (2, 5)], (3, 2), (0, 1)),
        ([(5, 3), (5, 2)], (3, 2), (1, 1)),
        ([(6, 5), (4, 5)], (3, 2), (0, 2)),
        ([(2, 5), (2, 5)], (2, 2), (0, 1)),
        ([(3, 5), (3, 5)], (3, 2), None),
        ([(), ()], (3, 2), None),
    ],
)
def test_rows_of_outputs_grow_with_the_sizes(shapes: Any, sizes: tuple[int, ...], rows: Any) -> None:
    assert joined_rows([torch.zeros(shape) for shape in shapes], sizes, None) == rows


def test_a_call_is_split_and_its_gradient_is_the_whole_ones() -> None:
    model, x = net(), inputs()
    seen: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    model(x).square().mean().log().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    seen.clear()
    with SplitCalls(Layout([model]), (3, 3, 2), CPU) as split:
        model(x).square().mean().log().backward()
    assert split.num_calls == 1
    assert seen == [3, 3, 2, 3, 3]  # forward; then again, the last one's graph being there still
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-13, atol=1e-15)


def test_nothing_is_left_on_modules() -> None:
    model = net()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with SplitCalls(Layout([model]), (4, 4), CPU):
        model(inputs())
    with contextlib.suppress(ZeroDivisionError), SplitCalls(Layout([model]), (4, 4), CPU):
        model(inputs())
        raise ZeroDivisionError
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before


def test_an_opened_module_runs_on_everything_and_its_children_are_split() -> None:
    model = net()
    layout = Layout([model])
    layout.open(model)
    assert layout.split() != [model]
    with SplitCalls(layout, (4, 4), CPU) as split:
        model(inputs()).sum().backward()
    assert split.num_calls == 3


def test_lists_of_modules_are_no_children_but_what_they_hold_is() -> None:
    inside = nn.Linear(2, 2)
    holder = nn.Module()
    holder.layers = nn.ModuleList([nn.ModuleDict({"a": inside})])
    assert list(called_children(holder)) == [inside]


def test_a_module_that_fails_on_a_micro_batch_is_named() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(8, 1, dtype=x.dtype)

    model = Fixed()
    with pytest.raises(NotRowsError, match="it fails on a micro-batch"), SplitCalls(Layout([model]), (3, 5), CPU):
        model(inputs().requires_grad_())


def test_a_module_whose_outputs_are_no_rows_is_named() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    model = Mean()
    with pytest.raises(NotRowsError, match="no row for each sample"), SplitCalls(Layout([model]), (3, 5), CPU):
        model(inputs().requires_grad_())


def test_a_buffer_that_changes_before_backward_is_noticed_and_its_module_opened() -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2, dtype=torch.float64)
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale.clone()

    model, x, layout = Scaled(), inputs(), None

    def gradient(layout: Layout | None) -> torch.Tensor:
        model.zero_grad()
        model.scale.fill_(1)
        with SplitCalls(layout or Layout([]), (3, 5), CPU):
            outputs = model(x)
            model.scale.mul_(3)
            outputs.square().mean().backward()
        assert model.scale == 3
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad.clone()

    wanted = gradient(None)
    layout = Layout([model])
    with pytest.raises(NotRowsError, match="changed after the call") as refused:
        gradient(layout)
    layout.heed(refused.value)
    assert layout.opened() == [model]
    torch.testing.assert_close(gradient(layout), wanted, rtol=1e-13, atol=1e-15)


def test_a_gradient_of_a_gradient_opens_all_modules() -> None:
    model, x = net(), inputs().requires_grad_()
    layout = Layout([model])

    def penalty() -> torch.Tensor:
        with SplitCalls(layout, (3, 5), CPU):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope

    with pytest.raises(NotRowsError, match="gradient of a gradient") as refused:
        penalty()
    layout.heed(refused.value)
    assert not layout.split()
    assert penalty().requires_grad


def test_what_was_measured_is_split_and_nothing_else() -> None:
    model = net()
    layout = Layout([model])
    layout.rows["something else"] = [Known(((0, 1),), ((0, 1),))]
    with pytest.raises(UnknownCallError), SplitCalls(layout, (3, 5), CPU):
        model(inputs())


def test_an_argument_that_has_lost_its_rows_is_no_constant() -> None:
    """Measured to have two rows for each sample, and then of a number that does not fit the samples."""

    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
            return x + others.mean(0)

    model = Pooled()
    layout = Layout([model])
    x = inputs().requires_grad_()
    layout.rows["something else"] = [Known(((0, 1),), ((0, 1),))]
    others = torch.randn(15, 4, dtype=torch.float64)
    with pytest.raises(UnknownCallError) as unknown, SplitCalls(layout, (3, 5), CPU):
        model(x, others)
    layout.rows = {unknown.value.signature: [Known(((0, 1), (0, 2)), ((0, 1),))]}
    with pytest.raises(NotRowsError, match="no longer a row"), SplitCalls(layout, (3, 5), CPU):
        model(x, others)


def test_a_layout_outlives_its_process() -> None:
    model, other = net(), net()
    layout, again = Layout([model]), Layout([other])
    layout.open(model)
    layout.rows["a call"] = [Known(((0, 1), None), ((1, 2),)), Known((None, None), (None,))]
    again.load_state_dict(layout.state_dict())
    assert again.state_dict() == layout.state_dict()
    assert again.is_opened(other)


def test_a_module_within_another_one_is_no_root() -> None:
    model = net()
    assert Layout([model[0], model]).roots == [model]


def test_nothing_is_split_where_there_is_one_micro_batch() -> None:
    model = net()
    with SplitCalls(Layout([model]), (8,), CPU) as split:
        assert model(inputs()).grad_fn is not None
    assert split.num_calls == 0


def test_what_has_an_address_is_told_by_its_type() -> None:
    assert _told(torch.Generator()) == _told(torch.Generator()) == "Generator"
    assert _told(torch.sin) != _told(torch.cos)
