"""What is said of a gradient that may not be the whole window's: each case, and none where there is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoaccum.events import Notice
from autoaccum.step.exactness_notices import (
    backward_hook_notice,
    batch_norm_notices,
    compiled_notice,
    doubt_notice,
    doubt_of,
    drawn_once_notice,
    failure_notice,
    half_precision_notices,
    has_backward_hooks,
    joined_notice,
    suspected,
    uncertain_notice,
    unmeasured_notice,
)
from autoaccum.step.findings import Decision, Outcome, Verdict
from autoaccum.step.loss_graph import Term
from autoaccum.step.terms import Reduction

pytestmark = pytest.mark.measured


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
    return [Reduction(count, (Term(means=count, numbers=100, counts_items=True),)) for count in items]


def test_a_doubt_is_said_with_its_reason_and_its_cure() -> None:
    notice = doubt_notice("the reason", "Do this")
    assert notice.cause == "How the loss averages over a micro-batch cannot be told: the reason"
    assert notice.cure == "Do this"


def test_each_case_has_a_consequence_of_its_own() -> None:
    """By which an announcer knows what it has said already."""
    said = [
        *batch_norm_notices([nn.BatchNorm1d(4)]),
        *half_precision_notices([torch.zeros(1, dtype=torch.float16)]),
        doubt_notice("the reason", "Do this"),
        unmeasured_notice("why"),
        uncertain_notice("why"),
        drawn_once_notice(),
        compiled_notice(),
        backward_hook_notice(),
        failed(0.1),
    ]
    assert len({notice.consequence for notice in said}) == len(said) == 9


SUSPICION = doubt_notice("the reason", "Do this")


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
    notice = failed(0.1, suspicion=SUSPICION, layers=1)
    assert notice.cause.startswith("The model holds 1 BatchNorm layer in training mode and How the loss averages over")
    assert "GroupNorm" in notice.cure
    assert "Do this" in notice.cure


def test_how_samples_meet_is_told_as_it_was_measured() -> None:
    assert suspected(Verdict(), None) is None
    assert suspected(Verdict(), SUSPICION) == SUSPICION
    notice = suspected(Verdict(mixes=True), SUSPICION)
    assert notice is not None
    assert notice.cause.startswith("The collate_fn mixes")


def test_where_no_suspect_is_to_blame_the_graph_is_asked_and_then_the_loss() -> None:
    assert failed(0.1, suspicion=SUSPICION).consequence == SUSPICION.consequence
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


def test_hooks_that_run_once_a_gradient_is_there_are_found() -> None:
    p = nn.Parameter(torch.ones(1))
    p.register_hook(lambda gradient: gradient)
    assert not has_backward_hooks([p])
    handle = p.register_post_accumulate_grad_hook(lambda parameter: None)
    assert has_backward_hooks([nn.Parameter(torch.ones(1)), p])
    handle.remove()
    assert not has_backward_hooks([p])


def test_a_doubt_of_the_graphs_is_worded_as_a_cause() -> None:
    unknown = [Reduction(size, (Term(operation="Sqrt"),)) for size in (4, 3)]
    notice = doubt_of([4, 3], unknown)
    assert notice is not None
    assert notice.cause.startswith("The loss does not average over samples or items alone, nor sum them: ")
    assert doubt_of([4, 3], means(4, 3)) is None
    assert doubt_of([4, 3], means(4)) is None
    assert doubt_of([], []) is None
