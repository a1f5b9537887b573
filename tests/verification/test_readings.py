"""What the graphs of a window's losses say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoaccum.loss.hypotheses import PLAIN_MEAN, PLAIN_SUM
from autoaccum.loss.reductions import Term
from autoaccum.loss.terms import Reduction
from autoaccum.verification import readings
from autoaccum.window.gradient import Gradient
from autoaccum.window.kept import InDoubt
from tests.verification.making import job_of

ONE = Reduction(1.0, (Term("mean", is_one=True),))
UNKNOWN = Reduction(3.0, (Term("unknown", operation="Exp"),))
MEAN = Reduction(4.0, (Term("mean", divisor=4.0),))


def gradient(*reductions: Reduction, sizes: tuple[int, ...] = (2, 3), is_sum: bool = False) -> Gradient:
    return Gradient(
        sizes=sizes, loss=torch.zeros(()), grad_norm=None, items=1, counts=tuple(float(r.items) for r in reductions),
        reductions=reductions, conclusion=PLAIN_SUM if is_sum else PLAIN_MEAN,
    )  # fmt: skip


def job() -> Any:
    return job_of()


def test_what_is_likely() -> None:
    assert readings.likely(job(), gradient(MEAN, MEAN)) == "items"
    assert readings.likely(job(), gradient(MEAN, MEAN, is_sum=True)) == "sum"
    constants = Reduction(1.0, constants=(1.0,))
    assert readings.likely(job(), gradient(MEAN, constants, is_sum=True)) == "sum and penalties"


@pytest.mark.parametrize(
    ("before", "after", "is_sum", "alike"),
    [
        (None, "items", False, True),
        (None, "items", True, False),
        (None, "sum", True, True),
        (None, "sum", False, False),
        (None, "samples", False, False),  # 4 and 4 items of 2 and 3 samples
        ("items", "samples", False, False),
        ("sum", "sum", True, True),
    ],
)
def test_whether_another_hypothesis_weighs_alike(before: Any, after: Any, is_sum: bool, alike: bool) -> None:
    found = gradient(MEAN, MEAN, is_sum=is_sum)
    assert readings.is_weighed_alike(job(), found, before, after) is alike


def test_graphs_of_which_some_tell() -> None:
    assert readings.is_guessed(gradient(MEAN, UNKNOWN), ())
    assert not readings.is_guessed(gradient(MEAN, MEAN), ())
    assert not readings.is_guessed(gradient(Reduction(2.0, MEAN.terms), UNKNOWN), ())  # all count like samples
    assert readings.is_guessed(gradient(UNKNOWN, UNKNOWN), {"num_items"})
    assert not readings.is_guessed(gradient(UNKNOWN, UNKNOWN), {"samples"})


def test_where_something_was_divided_by_one() -> None:
    assert readings.ones(gradient(MEAN, ONE)) == [(2, 3)]
    assert readings.ones(gradient(MEAN, MEAN)) == []


def test_micro_batches_of_which_a_term_counts_the_most_come_first() -> None:
    terms = [(Term("mean", divisor=1.0), Term("mean", divisor=count)) for count in (4.0, -6.0, 0.0, 5.0)]
    window = gradient(*(Reduction(1.0, pair) for pair in terms), MEAN, sizes=(4, 3, 2, 1, 2))
    assert list(readings.densest(window, 1).items()) == [((9, 1), 5.0), ((4, 3), -6.0), ((0, 4), 4.0)]


def test_what_was_measured_to_count_something_else_than_it_was_taken_to() -> None:
    doubts = (InDoubt(1, "a", 1.0, 0.0), InDoubt(1, "b", 1.0, 1.0))
    window = replace(gradient(MEAN, MEAN), doubts=doubts)
    assert not readings.is_counted_otherwise(window, {})
    assert not readings.is_counted_otherwise(window, {(2, 3, "a"): 0.0, (2, 3, "b"): 1.0, (0, 2, "b"): 0.5})
    assert readings.is_counted_otherwise(window, {(2, 3, "b"): 0.5})
