"""What is said of a gradient that may not be the whole window's: each case, and none where there is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice
from autoaccum.loss.reductions import Term
from autoaccum.loss.terms import Reduction
from autoaccum.verification.findings import Decision, Outcome, Verdict
from autoaccum.verification.notices import (
    backward_hook_notice,
    batch_norm_notices,
    contradiction_notice,
    coupling_notice,
    doubt_notice,
    doubt_of,
    failure_notice,
    half_precision_notices,
    has_backward_hooks,
    joined_notice,
    ones_notice,
    suspected,
    unmeasured_notice,
    unused_notice,
)
from tests.models import classes, mlp


def test_the_notice_counts_the_layers_and_names_the_cure() -> None:
    for layers, cause in ((1, "1 BatchNorm layer in"), (3, "3 BatchNorm layers in")):
        (notice,) = batch_norm_notices([nn.BatchNorm1d(4) for _ in range(layers)])
        assert cause in notice.cause
        assert "GroupNorm" in notice.cure
        assert "accumulate='joined', which is exact" in notice.cure
    assert batch_norm_notices([nn.LayerNorm(4)]) == []


@pytest.mark.parametrize(
    ("dtypes", "cause"),
    [
        ([torch.float32, torch.float64], None),
        ([torch.float32, torch.bfloat16], "The model's parameters are bfloat16"),
        ([torch.float16, torch.bfloat16, torch.float16], "The model's parameters are bfloat16 and float16"),
        ([torch.int16], None),
    ],
)
def test_parameters_of_sixteen_bits_are_named(dtypes: list[torch.dtype], cause: str | None) -> None:
    notices = half_precision_notices([torch.zeros(1, dtype=dtype) for dtype in dtypes])
    assert [notice.cause for notice in notices] == ([] if cause is None else [cause])


def means(*items: float) -> list[Reduction]:
    """Of losses that are means over so many targets each."""
    return [Reduction(count, (Term("mean", divisor=count, numbers=100, is_items=True),)) for count in items]


def sums(*sizes: int) -> list[Reduction]:
    return [Reduction(1.0, (Term("sum", numbers=size),)) for size in sizes]


def test_counts_that_the_loss_contradicts_are_set_side_by_side() -> None:
    notice = contradiction_notice([4, 3, 2, 1, 9], [4, 3, 2, 1, 9], means(7, 2, 5.5, 6, 8))
    assert notice is not None
    assert (
        notice.cause
        == "num_items says 4, 3, 2, 1 for the first micro-batches, but their loss is a mean over 7, 2, 5.5, 6"
    )
    notice = contradiction_notice([4, 3], [4, 3], sums(4, 3))
    assert notice is not None
    assert notice.cause == "num_items says 4, 3 for the first micro-batches, but their loss is a sum"


def test_counts_that_are_the_same_weights_contradict_nothing() -> None:
    assert contradiction_notice([14, 4], [4, 3], means(7, 2)) is None
    assert contradiction_notice([14, 5], [4, 3], means(7, 2)) is not None


def test_a_loss_that_cannot_be_told_contradicts_nothing() -> None:
    unknown = [Reduction(size, (Term("unknown", operation="Sqrt"),)) for size in (4, 3)]
    assert contradiction_notice([14, 5], [4, 3], unknown) is None


def test_a_doubt_is_said_with_its_reason_and_its_cure() -> None:
    notice = doubt_notice("the reason", "Do this")
    assert notice.cause == "How the loss averages over a micro-batch cannot be told: the reason"
    assert notice.cure == "Do this"


def test_each_case_has_a_consequence_of_its_own() -> None:
    """By which an announcer knows what it has said already."""
    contradiction = contradiction_notice([4, 3], [4, 3], sums(4, 3))
    assert contradiction is not None
    said = [
        *batch_norm_notices([nn.BatchNorm1d(4)]),
        *half_precision_notices([torch.zeros(1, dtype=torch.float16)]),
        coupling_notice(),
        doubt_notice("the reason", "Do this"),
        contradiction,
        unmeasured_notice("why"),
        ones_notice(0.1),
        backward_hook_notice(),
        failed(0.1),
    ]
    assert len({notice.consequence for notice in said}) == len(said) == 9


def failed(error: float, *, suspicion: Notice | None = None, layers: int = 0) -> Notice:
    decision = Decision.of(Outcome(hypothesis="items", error=error, tensor="net"), passed=False)
    return failure_notice(decision, 6, [nn.BatchNorm1d(3) for _ in range(layers)], suspicion)


@pytest.mark.parametrize(
    ("error", "words"),
    [(0.2731, "27 %"), (3.2e-5, "0.0032 %"), (5.214, "521 %"), (0.994, "99 %"), (math.nan, "infinitely far")],
)
def test_a_failure_says_how_far_off_the_gradient_is(error: float, words: str) -> None:
    notice = failed(error)
    assert f"windows that are cut get a gradient {words}" in notice.cause
    assert notice.cause.endswith("off the whole window's, measured on 6 samples")
    assert words not in notice.consequence, "by which it is known again"


def test_a_failure_names_its_causes_with_a_cure_for_each() -> None:
    notice = failed(0.1, suspicion=coupling_notice(), layers=1)
    assert notice.cause.startswith("The model holds 1 BatchNorm layer in training mode and The loss lets the samples")
    assert "GroupNorm" in notice.cure
    assert "lower effective_batch" in notice.cure


def test_how_samples_meet_is_told_as_it_was_measured() -> None:
    assert suspected(Verdict(), None) is None
    assert suspected(Verdict(), coupling_notice()) == coupling_notice()
    for verdict, cause in (
        (Verdict(mixes=True), "The collate_fn mixes"),
        (Verdict(broadcasts=True), "The loss sets each"),
    ):
        notice = suspected(verdict, coupling_notice())
        assert notice is not None
        assert notice.cause.startswith(cause)


def test_where_no_suspect_is_to_blame_the_graph_is_asked_and_then_the_loss() -> None:
    assert failed(0.1, suspicion=coupling_notice()).consequence == coupling_notice().consequence
    assert failed(0.1).cause.startswith(
        "The loss is neither a mean over samples or items, nor a sum over them, or samples meet in the model: "
    )


def test_where_items_are_counted_no_cure_is_to_count_them() -> None:
    decision = Decision.of(Outcome(hypothesis="items", error=0.5, tensor="net"), passed=False)
    found = failure_notice(decision, 6, [], None, counts_items=True)
    assert found.cause.startswith("The loss is neither a mean over what num_items counts, nor over samples, nor a sum")
    assert "pass num_items=" not in found.cure.lower()
    assert joined_notice(0.1, 6, None, counts_items=True).cure == found.cure


def test_what_was_not_measured_says_why() -> None:
    assert unmeasured_notice("the reason").cause.endswith("have the gradient of the full batch: the reason")
    assert "25 % off" in ones_notice(0.25).cause


def test_hooks_that_run_once_a_gradient_is_there_are_found() -> None:
    p = nn.Parameter(torch.ones(1))
    p.register_hook(lambda gradient: gradient)
    assert not has_backward_hooks([p])
    handle = p.register_post_accumulate_grad_hook(lambda parameter: None)
    assert has_backward_hooks([nn.Parameter(torch.ones(1)), p])
    handle.remove()
    assert not has_backward_hooks([p])


def test_a_doubt_of_the_graphs_is_worded_as_a_cause() -> None:
    unknown = [Reduction(size, (Term("unknown", operation="Sqrt"),)) for size in (4, 3)]
    notice = doubt_of([4, 3], unknown)
    assert notice is not None
    assert notice.cause.startswith("The loss does not average over samples or items alone, nor sum them: ")
    assert doubt_of([4, 3], means(4, 3)) is None
    assert doubt_of([4, 3], means(4)) is None
    assert doubt_of([], []) is None


@pytest.mark.parametrize(
    ("num_items", "is_told"),
    [
        (lambda batch: (batch[1] != -100).sum(), False),
        (lambda batch: len(batch[1]), True),
        ({"loss": lambda batch: len(batch[1])}, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_run_tells_once_that_what_is_counted_is_not_used(num_items: Any, is_told: bool) -> None:
    inputs, targets = classes(32)
    targets[::3] = -100
    named = isinstance(num_items, dict)

    def step(model: nn.Module, batch: Any) -> Any:
        loss = cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss} if named else loss

    result = autoaccum.fit(
        mlp(), (inputs, targets), training_step=step, num_items=num_items, effective_batch=16, micro_batch=4,
        device="cpu", progress=False, cache=False,
    )  # fmt: skip
    told = [event for event in result.events if isinstance(event, Notice)]
    assert [event.consequence.startswith("num_items is not used") for event in told] == [True] * is_told


def test_a_sum_beside_a_count_may_be_meant_to_be_divided_by_it() -> None:
    assert unused_notice(len, "num_items", counts_by_name=False) is None
    cures = []
    for hypothesis in ("sum", "items"):
        notice = unused_notice(len, hypothesis, counts_by_name=False)
        assert notice is not None
        cures.append(notice.cure)
    assert cures[0].startswith('Pass reduction="sum" beside it')
    assert cures[1].startswith("Leave num_items out")
