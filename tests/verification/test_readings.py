"""What the graphs of a window's losses say of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.loss.hypotheses import PLAIN_MEAN, PLAIN_SUM
from autoaccum.loss.reductions import Term
from autoaccum.loss.terms import Reduction
from autoaccum.verification import readings
from autoaccum.window.gradient import Gradient
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
