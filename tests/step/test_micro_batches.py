"""Two of the largest micro-batches of a window are compared, joined and apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.step.gradient import Gradient
from autoaccum.step.job import Job
from autoaccum.step.terms import NONE, Hypothesis
from autoaccum.step.verdict import measure
from autoaccum.step.verification import pair_of
from tests.step.measuring import DOUBLE, job_of, plain, summed, window_of

pytestmark = pytest.mark.measured


def error_of(job: Job, window: Any, hypothesis: Hypothesis, *sizes: int) -> float | None:
    """Return the error of two micro-batches of these sizes, 0 if they have passed; None if nothing was measured."""
    pair = range(sizes[0]), range(sizes[0], sum(sizes))
    decision = measure(job, window, hypothesis, most=sum(sizes), forward_only=True, pair=pair).decision
    return None if decision is None else decision.error * (not decision.passed)


def gradient(*micro_batches: tuple[int, float]) -> Gradient:
    """Return that of a window of micro-batches, of each (samples, what it counts)."""
    sizes, counts = [size for size, _ in micro_batches], tuple(count for _, count in micro_batches)
    return Gradient(
        sizes=tuple(sizes), loss=torch.zeros(()), grad_norm=None, items=sum(counts), counts=counts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("micro_batches", "number", "pair"),
    [
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 0, (range(4), range(4, 8))),
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 1, (range(4, 8), range(8, 12))),  # others each time
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 2, (range(8, 12), range(4))),
        ([(4, 4.0), (2, 2.0), (3, 1.0)], 0, (range(4), range(6, 9))),  # none of half the size
        ([(4, 4.0), (4, 0.0), (4, NONE), (3, 1.0)], 0, (range(4), range(12, 15))),  # that count
        ([(4, 4.0), (4, 0.0)], 0, None),
        ([(5, 5.0), (4, 4.0)], 0, None),  # no room for two of five
        ([], 0, None),
    ],
)
def test_two_of_the_largest_that_count_are_chosen(
    micro_batches: list[tuple[int, float]], number: int, pair: tuple[range, range] | None
) -> None:
    assert pair_of(gradient(*micro_batches), number, 8) == pair


@pytest.mark.device
def test_two_micro_batches_are_weighed_by_the_hypothesis() -> None:
    assert error_of(job_of(), window_of(12), "items", 6, 6) == 0
    assert error_of(job_of(summed), window_of(12), "sum", 4, 8) == 0
    for loss, hypothesis in ((plain, "sum"), (summed, "items")):
        error = error_of(job_of(loss), window_of(12), hypothesis, 4, 8)
        assert error is not None
        assert error > 0.1


@pytest.mark.device
@pytest.mark.parametrize(("wrong", "is_right"), [(0.0, True), (1e-3, False)])
def test_rounding_of_32_bits_is_no_error(wrong: float, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch is the mean of large numbers of both signs."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 1), torch.randn(3, 8).repeat(4, 1)
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None].repeat(2, 1) * 1e5 + torch.randn(12, 1)

    def cancelling(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * batch[1]).mean() * (1 + wrong * len(batch[0]))

    def error() -> float | None:
        return error_of(job_of(cancelling, model), window_of(12, (x, signs)), "items", 6, 6)

    assert (error() == 0) is is_right
    monkeypatch.setattr("autoaccum.step.verdict.is_right_in_64_bits", lambda *_: False)
    assert error(), "or the test shows nothing"


@pytest.mark.device
def test_where_one_of_several_losses_counts_nothing_nothing_is_wrong() -> None:
    counts: Any = {"first": len, "second": lambda batch: 0}
    job = job_of(lambda model, batch: plain(model, batch) / 0, num_items=counts)
    assert not error_of(job, window_of(12), "num_items", 6, 6)


@pytest.mark.device
def test_what_cannot_be_joined_is_not_measured() -> None:
    narrow = job_of(lambda model, batch: plain(model, batch) if len(batch[0]) < 9 else 1 / 0)
    assert error_of(narrow, window_of(12), "items", 6, 6) is None


@pytest.mark.device
def test_noise_without_rows_is_measured_by_constants() -> None:
    """Of two copies of a batch the rows of one sample are not where they seem to be."""

    def doubled(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(torch.nn.functional.dropout(torch.cat([batch[0], batch[0]]), 0.3))
        return cross_entropy(outputs, torch.cat([batch[1], batch[1]]))

    assert error_of(job_of(doubled), window_of(12), "items", 6, 6) == 0


@pytest.mark.device
def test_counts_that_are_drawn_are_drawn_alike() -> None:
    def masked(model: Any, batch: Any) -> torch.Tensor:
        mask = torch.rand(len(batch[0]), dtype=DOUBLE, device=batch[0].device) < 0.5
        return (cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()

    assert error_of(job_of(masked), window_of(12), "items", 6, 6) == 0
