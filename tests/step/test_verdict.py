"""The first hypothesis that passes is held; where none does, the one that came first is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from autoaccum.step.findings import Decision
from autoaccum.step.rng_replay import UnsettledError
from autoaccum.step.terms import Hypothesis
from autoaccum.step.verdict import decide, hypotheses
from tests.models import classes
from tests.step.measuring import DOUBLE, job_of, measurement_of, pairs, plain, squared_mean, summed

pytestmark = pytest.mark.measured

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
        (plain, {"num_items": lambda batch: int((batch[1] >= 0).sum()), "batch": HALF}, "num_items"),
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
    assert decided(summed, "sum").outcomes == ()
    assert [outcome.hypothesis for outcome in decided(plain, "sum").outcomes] == ["sum"]


@pytest.mark.parametrize("likely", ["items", "sum"])
@pytest.mark.parametrize("loss", [squared_mean, pairs, penalised])
def test_where_none_passes_the_one_that_came_first_is_told(loss: Callable[..., Any], likely: Hypothesis) -> None:
    decision = decided(loss, likely)
    assert not decision.passed
    assert decision.hypothesis == likely
    assert {outcome.hypothesis for outcome in decision.outcomes} == {"items", "sum"} - {likely}
    assert min(decision.error, *(outcome.error for outcome in decision.outcomes)) > 1e-3


def test_samples_count_alike_where_the_graph_of_every_part_shows_it() -> None:
    assert decided(plain).counts_samples
    assert decided(lambda model, batch: plain(model, batch) / 2).counts_samples, "but for a factor"
    assert not decided(plain, batch=HALF).counts_samples
    assert not decided(summed, "sum").counts_samples, "a sum counts nothing"
    unknown = decided(lambda model, batch: plain(model, batch).square().sqrt())
    assert unknown.passed
    assert not unknown.counts_samples, "by chance, for all that its graph shows"


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


def test_what_the_user_says_leaves_one_to_be_measured() -> None:
    assert hypotheses(job_of(), "items") == ["items", "sum"]
    assert hypotheses(job_of(), "sum") == ["sum", "items"]
    assert hypotheses(job_of(num_items=len), "num_items") == ["num_items"]
    assert hypotheses(job_of(reduction="sum"), "sum") == ["sum"]
    assert hypotheses(job_of(reduction="mean"), "items") == ["items"]
    wrong = decided(plain, "num_items", num_items=lambda batch: 1, batch=HALF)
    assert (wrong.passed, wrong.hypothesis, wrong.outcomes) == (False, "num_items", ())
