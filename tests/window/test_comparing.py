"""Bits are compared operation by operation; what a kernel adds in any order is no fault, and hides none."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.window.comparing import Comparison, First, NotRepeatableError, Second, _Operation

NOISE = torch.Generator()
not_there = pytest.mark.skipif("STANDIN_LIBRARY" in os.environ, reason="whose memory holds the same bits each time")


@torch.library.custom_op("autoaccum_tests::trembling", mutates_args=(), schema="(Tensor x) -> Tensor")
def trembling(x):  # type: ignore[no-untyped-def]
    """Stand for a kernel that adds in any order: its results differ in their last bits."""
    return x * (1 + 1e-6 * torch.rand(x.shape, generator=NOISE))


@torch.library.custom_op("autoaccum_tests::trembling_", mutates_args=("x",), schema="(Tensor(a!) x) -> ()")
def trembling_(x):  # type: ignore[no-untyped-def]
    """Write what ``trembling`` returns, as ``index_add_`` does."""
    x.mul_(1 + 1e-6 * torch.rand(x.shape, generator=NOISE))


def with_a_side_result(name: str, side: Callable[[torch.Tensor, float], torch.Tensor], **options: Any) -> Any:
    """Return an operation that doubles, with another result beside that nothing reads."""

    def run(x, number):  # type: ignore[no-untyped-def]
        return x * 2, side(x, number)

    schema = "(Tensor x, float number) -> (Tensor, Tensor)"
    return torch.library.custom_op(f"autoaccum_tests::{name}", run, mutates_args=(), schema=schema, **options)


def all_but_one(x: torch.Tensor, _: float) -> torch.Tensor:
    result = x.new_empty(9)
    result[:8] = x[:8]
    return result


SEEDS = itertools.count(1)
DRAWS = {"tags": (torch.Tag.nondeterministic_seeded,)}
written_in_part = with_a_side_result("written_in_part", all_but_one)
unwritten = with_a_side_result("unwritten", lambda x, _: x.new_empty((), dtype=torch.long))
masking = with_a_side_result("masking", lambda x, _: torch.rand(100, generator=NOISE) > 0.5)
drawing = with_a_side_result("drawing", lambda x, _: torch.rand(100, generator=NOISE))
trembling_beside = with_a_side_result("trembling_beside", lambda x, _: trembling(x))
trembling_draws = with_a_side_result("trembling_draws", lambda x, _: trembling(x), **DRAWS)
drawn_untold = with_a_side_result("drawn_untold", lambda x, _: torch.rand(3))
counting = with_a_side_result("counting", lambda x, _: torch.full((), next(SEEDS)))
counting_draws = with_a_side_result("counting_draws", lambda x, _: torch.full((), next(SEEDS)), **DRAWS)
drawn = with_a_side_result("drawn", lambda x, _: torch.rand(3), **DRAWS)
told = with_a_side_result("told", lambda x, number: torch.full((), number))

trembling.register_autograd(lambda ctx, gradient: gradient)
NAME = "autoaccum_tests.trembling.default"
Forward = Callable[[], torch.Tensor]


def twice(forward: Forward, known: Comparison, again: Forward | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a forward, and the same or another one again, has come to."""
    known.begin()
    marks: list[Any] = []
    with First(known, marks):
        first = forward()
    with Second(known, marks, nn.Identity()):
        return first, (again or forward)()


def test_the_same_bits_are_counted() -> None:
    known = Comparison()
    twice(lambda: torch.ones(3).exp().sum(), known)
    assert (known.operations, known.has_lost) == (3, False)


@pytest.mark.parametrize("again", [1.0 + 2**-23, -1.0, float("nan")])
def test_other_bits_are_refused_by_the_operation_that_comes_to_them(again: float) -> None:
    ones = torch.ones(3)
    with pytest.raises(NotRepeatableError, match=r"Identity: computed again, aten\.mul\.Tensor comes to other bits"):
        twice(lambda: ones.exp() * 1.0, Comparison(), lambda: ones.exp() * again)


def test_of_operations_that_call_functions_and_of_nested_tensors() -> None:
    x = torch.ones(3)
    twice(lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), known := Comparison())
    assert known.operations == 3
    weight = torch.ones(4, 4)
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    twice(lambda: F.linear(nested, weight), known := Comparison())
    assert known.operations > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch, as it imports its rules
def test_of_derivatives_within_a_forward_some_of_which_are_computed_on_the_meta_device() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    twice(lambda: torch.func.vmap(lambda row: torch.func.jvp(layer, (row,), (row,))[1])(x), known := Comparison())
    assert known.operations > 0


def test_more_operations_than_the_first_time_are_refused_and_fewer_are_not() -> None:
    ones = torch.ones(3)
    with pytest.raises(NotRepeatableError, match=r"aten\.sin"):
        twice(ones.exp, Comparison(), lambda: ones.exp().sin())
    twice(lambda: ones.exp().sin(), Comparison(), ones.exp)


def test_what_autocast_has_cast_before_is_cast_anew() -> None:
    weight, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, weight)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, weight)  # it is kept from here on, until this ends
        marks: list[Any] = []
        with First(known := Comparison(), marks):
            forward()
    with Second(known, marks, nn.Identity()):
        forward()
    assert known.operations == len(marks) > 0


class TestTrembling:
    def test_is_found_out_and_then_kept_so_that_all_is_compared(self) -> None:
        known, x = Comparison(), torch.ones(100)

        def forward() -> torch.Tensor:
            return trembling(x.exp()).sin() * 3

        first, second = twice(forward, known)
        assert not torch.equal(first, second)
        assert (known.operations, known.has_lost, known.trembling) == (1, True, {NAME: {0}})
        first, second = twice(forward, known)
        assert torch.equal(first, second)
        assert (known.operations, known.has_lost) == (4, False)

    def test_of_what_is_written_in_place(self) -> None:
        known, x = Comparison(), torch.ones(100)

        def forward() -> torch.Tensor:
            y = x.exp()
            trembling_(y)
            return y.sin()

        first, second = twice(forward, known)
        assert known.trembling == {"autoaccum_tests.trembling_.default": {0}}
        assert not torch.equal(first, second)
        first, second = twice(forward, known)
        assert torch.equal(first, second)
        assert (known.operations, known.has_lost) == (3, False)

    def test_hides_nothing_that_follows_it(self) -> None:
        known, x, numbers = Comparison(), torch.ones(100), itertools.count(1)

        def forward() -> torch.Tensor:
            return trembling(x) * next(numbers)

        twice(forward, known)
        assert known.has_lost, "this window says nothing"
        with pytest.raises(NotRepeatableError, match=r"aten\.mul\.Tensor"):
            twice(forward, known)

    def test_hides_nothing_that_comes_before_it(self) -> None:
        x, numbers = torch.ones(100), itertools.count(1)
        known = Comparison()
        with pytest.raises(NotRepeatableError, match=r"aten\.mul\.Tensor"):
            twice(lambda: trembling(x * next(numbers)), known)

    def test_what_draws_from_elsewhere_is_no_kernel_that_trembles(self) -> None:
        generator = torch.Generator()
        known = Comparison()
        with pytest.raises(NotRepeatableError, match=r"aten\.rand\.generator"):
            twice(lambda: torch.rand(100, generator=generator), known)
        assert known.trembling == {}

    @pytest.mark.parametrize("operation", [trembling_beside, trembling_draws])
    def test_of_a_result_beside_the_first_that_is_another_each_time(self, operation: Any) -> None:
        known, x = Comparison(), torch.ones(100)

        def forward() -> torch.Tensor:
            return operation(x.exp(), 0.0)[0].sin()  # type: ignore[no-any-return]

        twice(forward, known)
        assert (known.has_lost, [*known.trembling.values()]) == (True, [{1}])
        twice(forward, known)
        assert (known.operations, known.has_lost) == (3, False)

    @pytest.mark.parametrize("operation", [counting, counting_draws, masking, drawing])
    def test_what_differs_in_more_than_its_last_bits_is_no_kernel_that_trembles(self, operation: Any) -> None:
        known, x = Comparison(), torch.ones(100)
        with pytest.raises(NotRepeatableError, match=f"autoaccum_tests.{operation._name.partition('::')[2]}"):
            twice(lambda: operation(x, 0.0)[1], known)
        assert known.trembling == {}

    def test_it_is_of_one_operation_and_shape(self) -> None:
        known, x = Comparison(), torch.ones(100)
        twice(lambda: trembling(x), known)
        for again in (x.exp, x.sum, lambda: trembling(x[:1])):
            with pytest.raises(NotRepeatableError):
                twice(lambda: trembling(x), known, again)

    def test_a_nan_that_is_computed_is_no_memory_that_is_not_written_to(self) -> None:
        one, other = (torch.tensor([[torch.nan, 1.0], [x, x]]) for x in (2.0, 5.0))
        with pytest.raises(NotRepeatableError, match="var_mean"):
            twice(lambda: torch.var_mean(one, 1)[1], Comparison(), lambda: torch.var_mean(other, 1)[1])

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, not_there])])
    def test_of_a_result_that_is_not_written_to_whatever_memory_held(self, device: str) -> None:
        """As attention's seed on a GPU, where there is no dropout: it shows where PyTorch fills memory first."""
        x = torch.ones(100, device=device)
        operation = _Operation(torch.ops.autoaccum_tests.unwritten.default, "unwritten", (x, 0.0), {})
        assert operation.varying(operation.come_to(operation.run()), None) == {1}
        assert not torch.are_deterministic_algorithms_enabled()

    @pytest.mark.parametrize("dtype", [torch.long, torch.uint64, torch.float16, torch.float64, torch.complex64])
    def test_of_a_result_that_is_written_to_in_part(self, dtype: torch.dtype) -> None:
        x = torch.ones(100).to(dtype)
        operation = _Operation(torch.ops.autoaccum_tests.written_in_part.default, "in part", (x, 0.0), {})
        found = operation.come_to(operation.run())
        assert operation.varying(found, None) == {1}
        operation = _Operation(torch.ops.autoaccum_tests.told.default, "told", (x, 0.0), {})
        assert operation.varying(operation.come_to(operation.run()), None) == set()

    @pytest.mark.parametrize("operation", [drawn, drawn_untold])
    def test_what_a_result_is_by_the_random_state_is_put_back_before_it_is_asked(self, operation: Any) -> None:
        known, x = Comparison(), torch.ones(100)
        torch.manual_seed(1)
        marks: list[Any] = []
        with First(known, marks):
            operation(x, 0.0)
        with Second(known, marks, nn.Identity()), pytest.raises(NotRepeatableError, match="drawn"):
            operation(x, 0.0)
        assert known.trembling == {}

    def test_no_result_beside_the_first_that_the_operation_repeats(self) -> None:
        known, x = Comparison(), torch.ones(100)
        with pytest.raises(NotRepeatableError, match="told"):
            twice(lambda: told(x, 1.0)[0], known, lambda: told(x, 2.0)[0])
        assert known.trembling == {}

    def test_it_may_come_to_the_same_bits_by_chance(self) -> None:
        known, x = Comparison(), torch.ones(1)
        NOISE.manual_seed(0)
        state = NOISE.get_state()
        marks: list[Any] = []
        with First(known, marks):
            trembling(x)
        NOISE.set_state(state)
        with Second(known, marks, nn.Identity()):
            trembling(x)
        assert (known.operations, known.trembling) == (1, {})
