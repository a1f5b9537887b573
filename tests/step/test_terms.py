"""Terms of a loss: what each was divided by, and what it looks like."""

from __future__ import annotations

import math

import pytest
import torch

from autoaccum.step.terms import Factor, Term, divide


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
    ("term", "kind", "divisor"),
    [
        (Term(means=6.0, averages=True), "mean", 6.0),
        (Term(factor=SIX, averages=True), "mean", 6.0),  # over samples by hand
        (Term(means=4.0, factor=SIX), "sum", 24.0),
        (Term(factor=Factor().times("Div", 12.0, False)), "mean", 12.0),  # by what tensors counted
        (Term(means=5.0, counts_items=True), "mean", 5.0),
        (Term(operation="Sqrt"), "unknown", 1.0),
        (Term(weights=((torch.tensor([1.0, 0.1, 0.4]), 4),)), "unknown", 1.0),
        (Term(weights=((torch.tensor([1.0, 0.25, 0.25]), 4),)), "sum", 1.0),  # all alike
        (Term(weights=((torch.tensor([2.0, 0.1, 0.4]), 4),)), "sum", 1.0),
    ],
)
def test_what_a_term_looks_like(term: Term, kind: str, divisor: float) -> None:
    assert (term.kind, term.divisor) == (kind, divisor)


@pytest.mark.parametrize(
    ("term", "is_one"),
    [
        (Term(factor=SIX), False),
        (Term(factor=Factor().times("Mul", -1.0, True)), True),
        (Term(factor=SIX.times("Div", 1.0, False)), True),  # a count of tensors
        (Term(factor=SIX.times("Div", 2.0, False)), False),
        (Term(ones=(0.5, 1.0)), True),
        (Term(ones=(0.5,)), False),
    ],
)
def test_what_is_divided_by_one(term: Term, is_one: bool) -> None:
    assert term.is_one is is_one


def test_words_for_what_says_nothing() -> None:
    words = {Term(operation=name).in_words() for name in ("Sqrt", "CompiledFunctionBackward", "")}
    assert words == {"Sqrt", "code that torch.compile made", "weights that sum to one"}
