"""Whether tensors hold what they held is told by a few numbers; what optimizers do with closures: training/test_closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.window.closures import Closure, Mark
from autoaccum.window.gradient import Gradient

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("made_there")]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mark_is_of_the_values_and_not_of_the_tensors(dtype: torch.dtype) -> None:
    tensors: list[Any] = [torch.arange(6).to(dtype).reshape(2, 3), None, torch.ones((), dtype=dtype), torch.ones(0)]
    mark = Mark(tensors)
    assert mark.is_of(tensors)
    assert mark.is_of([None if tensor is None else tensor.clone() for tensor in tensors])
    assert not mark.is_of([tensors[0], tensors[2], None, tensors[3]])
    assert not mark.is_of([tensors[0].flip(0), *tensors[1:]])
    tensors[0].data[0, 1] = 0
    assert not mark.is_of(tensors)


@given(
    size=st.integers(2, 200_000),
    places=st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
    by=st.sampled_from([2**-20, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_changes_that_add_up_to_nothing_are_seen(size: int, places: tuple[int, int], by: float) -> None:
    """One up and another one down by as much, anywhere, of numbers that are all the same."""
    first, second = (place % size for place in places)
    values = torch.full((size,), 1.5)
    mark = Mark([values])
    values[first] += by
    values[second] -= by
    assert mark.is_of([values]) is (first == second)


def test_no_random_number_of_the_run_is_drawn() -> None:
    before = torch.get_rng_state()
    Mark([torch.ones(10)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_closure_runs_what_is_not_there() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    ran: list[str] = []

    def gradient(loss: float) -> Gradient:
        p.grad = torch.full_like(p, loss)
        return Gradient(sizes=(1,), loss=torch.tensor(loss), grad_norm=None, items=1.0)

    def run() -> Gradient:
        ran.append("run")
        return gradient(2.0)

    def closure() -> Closure:
        ran.clear()
        return Closure(gradient(1.0), optimizer, run, lambda: ran.append("rewind"))

    untouched = closure()
    assert (float(untouched()), ran) == (1.0, [])
    assert (float(untouched()), ran) == (2.0, ["run"])
    dropped = closure()
    p.grad = None
    assert (float(dropped()), ran) == (2.0, ["rewind", "run"])
    moved = closure()
    p.data.add_(1)
    assert (float(moved()), ran) == (2.0, ["run"])
