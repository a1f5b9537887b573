"""What the graphs of a window's losses say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoaccum.step import verification
from autoaccum.step.gradient import Gradient
from autoaccum.step.infer_reduction import conclude
from autoaccum.step.loss_graph import Term
from autoaccum.step.terms import PLAIN_MEAN, PLAIN_SUM, Reduction
from tests.step.measuring import job_of

pytestmark = pytest.mark.measured

UNKNOWN = Reduction(3.0, (Term(operation="Exp"),))
MEAN = Reduction(4.0, (Term(means=4.0, averages=True),))


def gradient(*reductions: Reduction, sizes: tuple[int, ...] = (2, 3), is_sum: bool = False) -> Gradient:
    return Gradient(
        sizes=sizes, loss=torch.zeros(()), grad_norm=None, items=1, counts=tuple(float(r.items) for r in reductions),
        reductions=reductions, conclusion=PLAIN_SUM if is_sum else PLAIN_MEAN,
    )  # fmt: skip


def test_what_is_likely() -> None:
    assert verification.likely_hypothesis(job_of(), gradient(MEAN, MEAN)) == "items"
    assert verification.likely_hypothesis(job_of(), gradient(MEAN, MEAN, is_sum=True)) == "sum"
    assert verification.likely_hypothesis(job_of(num_items=len), gradient(MEAN, MEAN, is_sum=True)) == "num_items"


@pytest.mark.parametrize(
    ("before", "after", "is_sum", "alike"),
    [
        (None, "items", False, True),
        (None, "items", True, False),
        (None, "sum", True, True),
        (None, "sum", False, False),
        (None, "num_items", False, True),
        ("items", "sum", False, False),
        ("sum", "items", True, False),
        ("sum", "sum", True, True),
    ],
)
def test_whether_another_hypothesis_weighs_alike(before: Any, after: Any, is_sum: bool, alike: bool) -> None:
    assert verification.is_weighed_alike(gradient(MEAN, MEAN, is_sum=is_sum), before, after) is alike


def test_compiled_code_hides_what_counts() -> None:
    compiled = Reduction(2.0, (Term(operation="CompiledFunctionBackward"),))
    assert verification.is_hidden(gradient(MEAN, compiled))
    assert not verification.is_hidden(gradient(MEAN, UNKNOWN))


def test_micro_batches_lie_one_behind_the_other() -> None:
    assert verification.pieces(gradient(MEAN, MEAN)) == [(0, 2), (2, 3)]


def test_what_speaks_against_weights_that_nothing_was_measured_of() -> None:
    def said(*shown: Reduction, **options: Any) -> list[str]:
        found = replace(gradient(*shown), conclusion=conclude((2, 3), shown))
        return [notice.cause for notice in verification.doubts(job_of(**options), found, shown)]

    penalised = Reduction(1.0, (Term(numbers=2),), (0.1,)), Reduction(1.0, (Term(numbers=3),), (0.1,))
    (unknown,) = said(UNKNOWN, UNKNOWN)
    assert unknown.endswith("its graph leads to Exp, which says nothing of it")
    for options in ({}, {"reduction": "sum"}):  # which does not say that there is a penalty
        (beside,) = said(*penalised, **options)
        assert beside.endswith("a term of parameters alone stands beside a sum over samples")
    assert said(UNKNOWN, UNKNOWN, reduction="sum") == []
    assert said(UNKNOWN, UNKNOWN, num_items=len) == []
    assert said(Reduction(2.0), Reduction(3.0)) == []
    normed = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3))
    assert said(Reduction(2.0), Reduction(3.0), model=normed) == ["The model holds 1 BatchNorm layer in training mode"]
