"""Terms of a loss are told to be means or sums, by the extents reduced and the numbers divided by."""

from __future__ import annotations

import math

import pytest
import torch

from autoaccum.loss.terms import Factor, divide, is_multiple, kind_of


def test_a_factor_is_the_product_of_its_constants_and_remembers_the_numbers() -> None:
    factor = Factor().times("Mul", 3.0, True).times("Div", 4.0, True)
    assert (factor.value, factor.multipliers, factor.divisors, factor.tensors) == (0.75, (3.0,), (4.0,), "")


@pytest.mark.parametrize(("operations", "tensors"), [("Div", "Div"), ("Mul", "Mul"), ("Mul Div", "Mul")])
def test_constants_of_tensors_are_no_numbers_of_the_program(operations: str, tensors: str) -> None:
    factor = Factor()
    for operation in operations.split():
        factor = factor.times(operation, 2.0, False)
    assert (factor.multipliers, factor.divisors, factor.tensors) == ((), (), tensors)


def test_a_number_of_zero_leaves_the_factor_as_it_is() -> None:
    assert Factor().times("Div", 0.0, True) == Factor()


def test_nothing_divided_by_nothing_is_infinite() -> None:
    assert divide(6.0, 4.0) == 1.5
    assert divide(0.0, 0.0) == math.inf
    counted = divide(torch.tensor(6.0), 4.0)
    assert isinstance(counted, torch.Tensor)
    assert counted.item() == 1.5


SIX = Factor().times("Div", 6.0, True)


@pytest.mark.parametrize(
    ("averaged", "summed", "factor", "expected"),
    [
        ([6], [4], Factor(), ("mean", True)),
        ([24], [], Factor(), ("mean", True)),  # samples and times in one dimension
        ([4], [], Factor(), ("mean", False)),
        ([6], [6], Factor(), ("mean", False)),  # either may be the samples
        ([], [6, 4], Factor(), ("sum", True)),
        ([], [4], Factor(), ("sum", False)),
        ([], [6, 4], SIX, ("mean", True)),  # over samples by hand
        ([], [6, 4], Factor().times("Mul", 1 / 24, True), ("mean", True)),
        ([], [6, 4], Factor().times("Mul", 0.5, True), ("sum", True)),
        ([], [6, 4], Factor().times("Div", 600.0, True), ("sum", False)),
        ([6], [4], SIX, ("mean", False)),  # divided once more
        ([], [6, 4], Factor().times("Div", 12.0, False), ("mean", True)),
        ([], [6, 4], Factor().times("Div", 5.0, False), ("mean", False)),
    ],
)
def test_kinds_of_six_samples(
    averaged: list[int], summed: list[int], factor: Factor, expected: tuple[str, bool]
) -> None:
    assert kind_of(6, averaged, summed, [(6, 4)], factor, counts_items=False) == expected


def test_a_loss_that_counts_its_targets_is_a_mean() -> None:
    assert kind_of(6, [5], [], [(5,)], Factor(), counts_items=True) == ("mean", True)


@pytest.mark.parametrize(
    ("number", "expected"), [(6.0, True), (-12.0, True), (3.0, False), (0.0, False), (7.5, False), (math.inf, False)]
)
def test_whole_multiples_of_six(number: float, expected: bool) -> None:
    assert is_multiple(number, 6) is expected
