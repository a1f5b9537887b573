"""Two of the largest micro-batches of a window are compared, joined and apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.terms import NONE
from autoaccum.verification.micro_batches import measure_pair, pair_of
from autoaccum.window.gradient import Gradient
from tests.verification.making import DOUBLE, job_of, plain, summed, window_of


def gradient(*micro_batches: tuple[int, float], is_by_name: bool = False) -> Gradient:
    """Return that of a window of micro-batches, of each (samples, what it counts)."""
    sizes, counts = [size for size, _ in micro_batches], tuple(count for _, count in micro_batches)
    return Gradient(
        sizes=tuple(sizes), loss=torch.zeros(()), grad_norm=None, items=sum(counts), counts=counts,
        is_by_name=is_by_name,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("micro_batches", "number", "pair"),
    [
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 0, [(range(4), 4.0), (range(4, 8), 3.0)]),
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 1, [(range(4, 8), 3.0), (range(8, 12), 2.0)]),  # others each time
        ([(4, 4.0), (4, 3.0), (4, 2.0)], 2, [(range(8, 12), 2.0), (range(4), 4.0)]),
        ([(4, 4.0), (2, 2.0), (3, 1.0)], 0, [(range(4), 4.0), (range(6, 9), 1.0)]),  # none of half the size
        ([(4, 4.0), (4, 0.0), (4, NONE), (3, 1.0)], 0, [(range(4), 4.0), (range(12, 15), 1.0)]),  # that count
        ([(4, 4.0), (4, 0.0)], 0, None),
        ([(5, 5.0), (4, 4.0)], 0, None),  # no room for two of five
        ([], 0, None),
    ],
)
def test_two_of_the_largest_that_count_are_chosen(
    micro_batches: list[tuple[int, float]], number: int, pair: list[tuple[range, float]] | None
) -> None:
    assert pair_of(gradient(*micro_batches), number, 8) == pair
    assert pair_of(gradient(*micro_batches, is_by_name=True), number, 8) is None, "each loss has its own counts"


@pytest.mark.device
@pytest.mark.parametrize(("hypothesis", "counts", "is_right"), [
    ("items", (1.0, 3.0), False), ("items", (6.0, 6.0), True), ("sum", (6.0, 6.0), False),
])  # fmt: skip
def test_two_micro_batches_are_weighed_by_what_they_count(
    hypothesis: Hypothesis, counts: tuple[float, float], is_right: bool
) -> None:
    error = measure_pair(job_of(), window_of(12), hypothesis, (range(6), range(6, 12)), counts)
    assert error is not None
    assert (error == 0) is is_right


@pytest.mark.device
def test_sums_of_two_micro_batches_are_added() -> None:
    assert measure_pair(job_of(summed), window_of(12), "sum", (range(4), range(4, 12)), (1.0, 1.0)) == 0
    error = measure_pair(job_of(summed), window_of(12), "items", (range(4), range(4, 12)), (4.0, 8.0))
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
        parts = range(6), range(6, 12)
        return measure_pair(job_of(cancelling, model), window_of(12, (x, signs)), "items", parts, (6.0, 6.0))

    assert (error() == 0) is is_right
    monkeypatch.setattr("autoaccum.verification.micro_batches.is_right_in_64_bits", lambda *_: False)
    assert error(), "or the test shows nothing"


@pytest.mark.device
def test_where_one_of_several_losses_counts_nothing_nothing_is_wrong() -> None:
    counts: Any = {"first": len, "second": lambda batch: 0}
    job = job_of(lambda model, batch: plain(model, batch) / 0, num_items=counts)
    assert measure_pair(job, window_of(12), "num_items", (range(6), range(6, 12)), (6.0, 6.0)) == 0


@pytest.mark.device
def test_what_cannot_be_joined_is_not_measured() -> None:
    def penalised(model: Any, batch: Any) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    parts, counts = (range(6), range(6, 12)), (6.0, 6.0)
    assert measure_pair(job_of(penalised), window_of(12), "items", parts, counts) is None, "it needs a backward"
    narrow = job_of(lambda model, batch: plain(model, batch) if len(batch[0]) < 9 else 1 / 0)
    assert measure_pair(narrow, window_of(12), "items", parts, counts) is None


@pytest.mark.device
def test_noise_without_rows_is_measured_by_constants() -> None:
    """Of two copies of a batch the rows of one sample are not where they seem to be."""

    def doubled(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(torch.nn.functional.dropout(torch.cat([batch[0], batch[0]]), 0.3))
        return cross_entropy(outputs, torch.cat([batch[1], batch[1]]))

    parts, counts = (range(6), range(6, 12)), (6.0, 6.0)
    assert measure_pair(job_of(doubled), window_of(12), "items", parts, counts) == 0


@pytest.mark.device
def test_counts_that_were_drawn_say_nothing_of_another_draw() -> None:
    def masked(model: Any, batch: Any) -> torch.Tensor:
        mask = torch.rand(len(batch[0]), dtype=DOUBLE, device=batch[0].device) < 0.5
        return (cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()

    assert measure_pair(job_of(masked), window_of(12), "items", (range(6), range(6, 12)), (2.0, 4.0)) == 0
