"""Hypotheses come in the order in which they are likely, each once, and all of them."""

from __future__ import annotations

from typing import get_args

import pytest

from autoaccum.loss.hypotheses import WORDS, Hypothesis, in_order, is_sum
from autoaccum.loss.reductions import Reduction, Term


def mean(items: int, *constants: object) -> Reduction:
    return Reduction(items, (Term("mean", divisor=items, numbers=100, is_items=True),), constants)  # type: ignore[arg-type]


def total(size: int, *constants: object) -> Reduction:
    return Reduction(1.0, (Term("sum", numbers=size),), constants)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reductions", "counts_items", "order"),
    [
        ([mean(3), mean(1)], False, ["items", "samples", "sum"]),
        ([mean(3), mean(1)], True, ["num_items", "items", "samples", "sum"]),
        ([total(3), total(1)], False, ["sum", "items", "samples"]),
        ([total(3), total(1)], True, ["num_items", "sum", "items", "samples"]),
        ([], False, ["items", "samples", "sum"]),
    ],
)
def test_what_the_graph_proposes_comes_first(reductions: list[Reduction], counts_items: bool, order: list[str]) -> None:
    assert in_order([3, 1][: len(reductions)], reductions, counts_items=counts_items) == order


def test_penalties_are_looked_for_where_the_graph_has_some() -> None:
    for make, first in ((mean, "items"), (total, "sum and penalties")):
        order = in_order([3, 1], [make(3, object()), make(1)], counts_items=False)
        assert order[0] == first
        assert order.index("sum and penalties") == order.index("sum") - 1
        assert len(order) == len(set(order)) == 4


def test_each_has_words_and_sums_are_told_from_means() -> None:
    assert set(WORDS) == set(get_args(Hypothesis))
    assert {hypothesis for hypothesis in WORDS if is_sum(hypothesis)} == {"sum", "sum and penalties"}
