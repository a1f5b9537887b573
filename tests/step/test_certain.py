"""Which weights that were measured to be right are one certain count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.step.gradient import is_kept_from_none
from autoaccum.step.infer_reduction import conclude
from autoaccum.step.job import Job
from autoaccum.step.loss_graph import read_reduction
from autoaccum.step.terms import Factor, Reduction, Term
from autoaccum.step.verification import CLAMPED, HIDDEN, ONLY_PENALTIES, SEVERAL, why_uncertain

pytestmark = pytest.mark.measured

SIZES = (4, 2)
OUTPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
TARGETS = torch.tensor([0, 1, -100, -100, 2, 1])
PARAMETER = torch.nn.Parameter(torch.ones(3))
MASK = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])

Loss = Callable[[slice], torch.Tensor]


def mean(part: slice) -> torch.Tensor:
    return OUTPUTS[part].square().mean()


def ignoring(part: slice) -> torch.Tensor:
    return cross_entropy(OUTPUTS[part], TARGETS[part])


def masked(part: slice) -> torch.Tensor:
    return (OUTPUTS[part, 0].square() * MASK[part]).sum() / MASK[part].sum().clamp(min=1)


def clamped(part: slice) -> torch.Tensor:
    counts = MASK[part] > 0
    return OUTPUTS[part, 0][counts].square().sum() / max(int(counts.sum()), 1)


def twice(part: slice) -> torch.Tensor:
    squares = OUTPUTS[part].logsumexp(1).square() * (TARGETS[part] != -100)
    return ignoring(part) + 0.1 * squares.sum() / (TARGETS[part] != -100).sum()


def in_some(part: slice) -> torch.Tensor:
    return twice(part) + (mean(part) if part.start else 0)


def in_a_root(part: slice) -> torch.Tensor:
    return mean(part).sqrt()


def summed(part: slice) -> torch.Tensor:
    return OUTPUTS[part].sum()


def with_penalty(part: slice) -> torch.Tensor:
    return summed(part) + PARAMETER.square().sum()


PARTS = (slice(0, 4), slice(4, 6))


def read_of(loss: Loss) -> tuple[list[float], list[Reduction]]:
    reductions = [read_reduction(loss(part), size) for part, size in zip(PARTS, SIZES, strict=True)]
    return [float(reduction.items) for reduction in reductions], reductions


def job_of(num_items: Any = None, reduction: Any = None) -> Job:
    return cast(Job, type("Stated", (), {"num_items": num_items, "reduction": reduction}))


def found(loss: Loss, job: Job | None = None, *, is_sum: bool = False, counts_samples: bool = False) -> str | None:
    counts, reductions = read_of(loss)
    return why_uncertain(
        job or job_of(), SIZES, counts, reductions, is_sum=is_sum, counts_samples=counts_samples
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (mean, None),
        (ignoring, None),
        (twice, None),
        (in_some, SEVERAL),
        (lambda part: mean(part) + 0.1 * OUTPUTS[part].abs().mean(), None),
        (lambda part: ignoring(part) + mean(part), SEVERAL),
        (clamped, CLAMPED),
        (in_a_root, HIDDEN),
        (lambda part: ignoring(part) + in_a_root(part), HIDDEN),
    ],
)
def test_one_count_is_certain(loss: Loss, why: str | None) -> None:
    assert found(loss) == why


def test_a_sum_is_certain_unless_it_adds_means_over_different_counts() -> None:
    assert found(summed, is_sum=True) is None
    assert found(lambda part: ignoring(part) + mean(part), is_sum=True) == SEVERAL


def test_a_graph_that_tells_nothing_is_uncertain_but_for_compiled_code_of_samples_that_count_alike() -> None:
    assert found(in_a_root, counts_samples=True) == HIDDEN

    def compiled(counts_samples: bool, *counts: float) -> str | None:
        term = Term(operation="CompiledFunctionBackward")
        reductions = [Reduction(count, (term,)) for count in counts]
        return why_uncertain(
            job_of(), SIZES, counts, reductions, is_sum=False, counts_samples=counts_samples
        )  # fmt: skip

    assert compiled(False, 4.0, 2.0) == HIDDEN
    assert compiled(True, 4.0, 2.0) is None


@pytest.mark.parametrize("stated", [(len, None), (None, "mean"), (None, "sum")])
def test_what_is_stated_is_certain(stated: Sequence[Any]) -> None:
    assert found(clamped) == CLAMPED
    assert found(clamped, job_of(*stated)) is None


def test_a_window_in_which_nothing_counts_says_nothing() -> None:
    _, reductions = read_of(masked)
    assert why_uncertain(job_of(), SIZES, [0.0, 0.0], reductions, is_sum=False, counts_samples=False) is None


@pytest.mark.parametrize(
    ("loss", "why"),
    [(mean, None), (ignoring, None), (summed, None), (twice, None), (masked, CLAMPED), (with_penalty, ONLY_PENALTIES),
     (lambda part: ignoring(part) + mean(part), SEVERAL), (in_a_root, HIDDEN)],
)  # fmt: skip
def test_some_graphs_show_before_any_measurement_that_no_weight_is_certain(loss: Loss, why: str | None) -> None:
    is_sum = conclude(SIZES, read_of(loss)[1]).is_sum
    assert found(loss, is_sum=is_sum, counts_samples=True) == why
    for stated in (job_of(num_items=len), job_of(reduction="mean")):
        assert found(loss, stated, is_sum=is_sum, counts_samples=True) is None


def test_a_division_by_one_is_of_no_matter_where_samples_count_alike() -> None:
    counts = [1.0, 2.0]
    terms = [Term(factor=Factor().times("Div", count, False), numbers=4) for count in counts]
    reductions = [Reduction(count, (term,), (0.1,)) for count, term in zip(counts, terms, strict=True)]
    for sizes, why in (([1, 2], None), ([2, 2], CLAMPED)):
        assert why_uncertain(job_of(), sizes, counts, reductions, is_sum=False, counts_samples=False) == why


@pytest.mark.parametrize(
    ("counts", "losses", "is_kept"),
    [
        ((3.0, 1.0), (0.5, 0.0), True),
        ((3.0, 1.0), (0.5, 0.25), False),
        ((3.0, 0.0), (0.5, None), False),  # it is known to count nothing
        ((3.0, 0.0), (0.5, 0.0), False),
        ((4.0, 2.0), (0.5, 0.0), False),  # as the samples do
    ],
)
def test_a_loss_of_0_beside_a_count_may_be_one_that_was_kept_from_0(
    counts: Sequence[float], losses: Sequence[float | None], is_kept: bool
) -> None:
    tensors = [None if loss is None else torch.tensor(loss) for loss in losses]
    assert is_kept_from_none(SIZES, counts, read_of(masked)[1], tensors) is is_kept
    assert not is_kept_from_none(SIZES, counts, [Reduction(count) for count in counts], tensors), "counted by the user"
