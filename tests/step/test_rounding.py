"""Two gradients are compared as one number: the larger of that of all tensors together and of the worst one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autoaccum.step.rounding import TOLERANCE, error_of, loss_tolerance_of, tolerance_of

pytestmark = pytest.mark.measured


def tensors(*rows: Any) -> list[torch.Tensor | None]:
    return [None if row is None else torch.tensor(row, dtype=torch.float64) for row in rows]


def test_what_is_the_same_is_off_by_nothing() -> None:
    error = error_of(tensors([1.0, 2.0], None), tensors([1.0, 2.0], None))
    assert error is not None
    assert (error.relative, error.tensor, error.of_tensors) == (0.0, None, (0.0, 0.0))


def test_the_worst_tensor_is_named_and_counts_by_its_own_norm() -> None:
    error = error_of(tensors([30.0, 40.0], [0.0, 2.0]), tensors([30.0, 40.0], [0.0, 1.0]))
    assert error is not None
    assert (error.relative, error.tensor) == (1.0, 1)
    assert error.of_tensors == (0.0, 1.0)


def test_all_tensors_together_may_be_worse_than_none_is() -> None:
    """Of those that are right to the digit one says nothing; and a tensor of rounding alone has no digits."""
    error = error_of(tensors([3.0], [1e-17]), tensors([4.0], [-1e-17]))
    assert error is not None
    assert error.relative == 0.25
    assert error.tensor == 0
    assert error.of_tensors[1] < 1e-15


def test_a_gradient_that_only_one_of_them_has_is_all_wrong() -> None:
    for found, wanted in ((tensors([1.0], None), tensors([1.0], [1.0])), (tensors([1.0], [1.0]), tensors([1.0], None))):
        error = error_of(found, wanted)
        assert error is not None
        assert error.tensor == 1
        assert error.relative >= 1


def test_by_a_gradient_of_zero_nothing_can_be_told() -> None:
    assert error_of(tensors([1.0]), tensors([0.0])) is None
    assert error_of(tensors(None), tensors(None)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_right(value: float) -> None:
    for found, wanted in (([value], [1.0]), ([1.0], [value])):
        error = error_of(tensors(found), tensors(wanted))
        assert error is not None
        assert not error.relative <= 1e9


def test_sparse_complex_and_half_gradients_are_compared_by_their_values() -> None:
    dense = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    error = error_of([dense.to_sparse()], [dense])
    assert error is not None
    assert error.relative == 0
    error = error_of([torch.tensor([3 + 4j])], [torch.tensor([0 + 4j])])
    assert error is not None
    assert error.relative == 0.75
    error = error_of([torch.tensor([1.5]).half()], [torch.tensor([1.0]).half()])
    assert error is not None
    assert error.relative == 0.5


def test_the_narrowest_type_says_up_to_where_they_are_the_same() -> None:
    double, single = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    for p in (double, single):
        p.requires_grad_()
    assert tolerance_of([double]) == 1e-6
    assert tolerance_of([double, single]) == TOLERANCE == 2e-5
    assert tolerance_of([double, torch.zeros(1)]) == 1e-6, "what is frozen has no gradient"
    assert tolerance_of([]) == TOLERANCE
    assert loss_tolerance_of([double]) < loss_tolerance_of([single]) < TOLERANCE
