"""The first hypothesis that passes is held; of those that do not, the least wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import Term
from autoaccum.loss.terms import Reduction
from autoaccum.verification.decision import decide, in_order
from autoaccum.verification.draws import UnsettledError
from autoaccum.verification.findings import Decision
from tests.models import classes
from tests.verification.making import DOUBLE, measurement_of, pairs, plain, squared_mean, summed

INPUTS, _ = classes(6, DOUBLE)
HALF = (INPUTS, torch.tensor([0, 1, 2, 1, -100, -100]))
"""Two of six samples are ignored."""


def decided(loss: Any, likely: Hypothesis = "items", smallest: int = 1, **options: Any) -> Decision:
    with measurement_of(loss, **options) as measurement:
        return decide(measurement, smallest, likely)


def penalised(model: Any, batch: Any) -> torch.Tensor:
    return summed(model, batch) + sum(p.square().sum() for p in model.parameters())


def fixed(model: Any, batch: Any) -> torch.Tensor:
    """A sum, divided by a number that is none of the batch's."""
    return summed(model, batch) / 16


@pytest.mark.parametrize(
    ("loss", "options", "hypothesis"),
    [
        (plain, {}, "items"),
        (plain, {"batch": HALF}, "items"),
        (summed, {}, "sum"),
        (fixed, {}, "sum"),
        (penalised, {}, "sum and penalties"),
        (plain, {"num_items": lambda batch: int((batch[1] >= 0).sum()), "batch": HALF}, "num_items"),
        (plain, {"num_items": lambda batch: 1, "batch": HALF}, "items"),  # whose count is wrong
        (summed, {"num_items": lambda batch: len(batch[1])}, "sum"),
    ],
)
def test_the_first_that_passes_is_held(loss: Any, options: Any, hypothesis: str) -> None:
    decision = decided(loss, "num_items" if "num_items" in options else "items", **options)
    assert decision.passed
    assert decision.hypothesis == hypothesis
    assert decision.error < 1e-12
    assert len(decision.errors) == len(decision.cuts) == 3
    assert all(outcome.error > 1e-3 for outcome in decision.outcomes), "tried before it"


def test_what_is_likely_comes_first_and_may_be_all_that_is_measured() -> None:
    assert decided(plain, "items").outcomes == ()
    assert decided(plain, "samples").hypothesis == "samples"
    assert [outcome.hypothesis for outcome in decided(plain, "sum").outcomes] == ["sum"]


@pytest.mark.parametrize("loss", [squared_mean, pairs])
def test_where_none_passes_the_least_wrong_is_told(loss: Callable[..., Any]) -> None:
    decision = decided(loss)
    assert not decision.passed
    assert decision.rivals == frozenset()
    assert len(decision.outcomes) >= 2
    assert all(outcome.error >= decision.error > 1e-3 for outcome in decision.outcomes)
    assert {outcome.hypothesis for outcome in decision.outcomes} | {decision.hypothesis} >= {"items", "samples", "sum"}


def test_rivals_are_those_that_would_have_weighed_every_part_the_same() -> None:
    assert decided(plain).rivals == {"samples"}
    assert decided(plain, "samples").rivals == {"items"}
    assert decided(plain, batch=HALF).rivals == frozenset()
    assert decided(summed, "sum").rivals == frozenset(), "a sum weighs nothing"
    counted = decided(plain, "num_items", num_items=lambda batch: 5 * len(batch[1]))
    assert counted.rivals == {"items", "samples"}


def test_a_loss_that_takes_no_single_sample_is_measured_on_wider_parts() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        if len(batch[0]) == 1:
            raise ValueError("of one sample there is no spread")
        return plain(model, batch)

    decision = decided(loss)
    assert decision.passed
    assert decision.smallest == 2
    assert min(len(part) for cut in decision.cuts for part in cut) == 2

    def always(model: Any, batch: Any) -> torch.Tensor:
        if len(batch[0]) < 6:
            raise ValueError("mine")
        return plain(model, batch)

    with pytest.raises(ValueError, match="mine"):
        decided(always)
    with pytest.raises(ValueError, match="mine"):
        decided(always, smallest=2)


def test_what_is_drawn_without_rows_is_measured_under_constants() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        torch.randperm(len(outputs))
        return cross_entropy(F.dropout(outputs, 0.5), batch[1])

    assert decided(loss).passed

    def unsettled(model: Any, batch: Any) -> torch.Tensor:
        torch.randperm(len(batch[0]))
        return plain(model, batch) * F.rrelu(-torch.ones(len(batch[0])), training=True).mean()

    with pytest.raises(UnsettledError):
        decided(unsettled)


# The order in which hypotheses are measured.


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
