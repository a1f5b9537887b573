"""Micro-batches of a run are measured themselves: beside others that count, and two of them joined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.verification.micro_batches import measure_joined, measure_part
from tests.models import classes
from tests.verification.making import DOUBLE, job_of, plain, window_of

pytestmark = pytest.mark.device


def of_some(model: Any, batch: Any) -> torch.Tensor:
    """A mean over the samples of two classes of three, which is no number where there are none."""
    taken = batch[1] > 0
    return cross_entropy(model(batch[0])[taken], batch[1][taken])


def beside(model: Any, batch: Any) -> torch.Tensor:
    return of_some(model, batch) + 0.5 * plain(model, batch)


def broken(model: Any, batch: Any) -> torch.Tensor:
    """No number, where there is an infinite one among those that it is of."""
    return plain(model, batch) + (batch[0] * 0).sum()


@pytest.mark.parametrize(
    ("loss", "count", "wanted"), [(of_some, 4, "0"), (beside, 4, "more"), (broken, 4, "inf"), (of_some, 0, "None")]
)
def test_a_micro_batch_whose_loss_is_no_number_is_measured_beside_others(loss: Any, count: int, wanted: str) -> None:
    """It counts nothing, or something; the whole is no number either; or none of the others counts, to tell by."""
    inputs, _ = classes(8, DOUBLE)
    inputs[5] = math.inf if loss is broken else inputs[5]
    labels = torch.tensor([1, 2, 1, 2, 0, 0, 0, 0])
    error = measure_part(job_of(loss), window_of(8, (inputs, labels)), "items", [4, 5, 6], [*range(count), 7])
    assert (str(error) if error is None or error in (0, math.inf) else "more") == wanted.replace("0", "0.0")


@pytest.mark.parametrize(("hypothesis", "counts", "is_right"), [
    ("items", (1.0, 3.0), False), ("items", (6.0, 6.0), True), ("samples", (1.0, 3.0), True), ("sum", (6.0, 6.0), False),
])  # fmt: skip
def test_two_micro_batches_are_weighed_by_what_they_count(
    hypothesis: Hypothesis, counts: tuple[float, float], is_right: bool
) -> None:
    error = measure_joined(job_of(), window_of(12), hypothesis, (range(6), range(6, 12)), counts)
    assert error is not None
    assert (error == 0) is is_right


def test_what_cannot_be_joined_is_not_measured() -> None:
    def penalised(model: Any, batch: Any) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    parts, counts = (range(6), range(6, 12)), (6.0, 6.0)
    assert measure_joined(job_of(penalised), window_of(12), "items", parts, counts) is None, "it needs a backward"
    narrow = job_of(lambda model, batch: plain(model, batch) if len(batch[0]) < 9 else 1 / 0)
    assert measure_joined(narrow, window_of(12), "items", parts, counts) is None


def test_noise_without_rows_is_measured_by_constants() -> None:
    """Of two copies of a batch the rows of one sample are not where they seem to be."""

    def doubled(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(torch.nn.functional.dropout(torch.cat([batch[0], batch[0]]), 0.3))
        return cross_entropy(outputs, torch.cat([batch[1], batch[1]]))

    parts, counts = (range(6), range(6, 12)), (6.0, 6.0)
    assert measure_joined(job_of(doubled), window_of(12), "items", parts, counts) == 0


def test_counts_that_were_drawn_say_nothing_of_another_draw() -> None:
    def masked(model: Any, batch: Any) -> torch.Tensor:
        mask = torch.rand(len(batch[0]), dtype=DOUBLE, device=batch[0].device) < 0.5
        return (cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()

    assert measure_joined(job_of(masked), window_of(12), "items", (range(6), range(6, 12)), (2.0, 4.0)) == 0
