"""Which weights that were measured to be right are one certain count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import read
from autoaccum.verification.certain import CLAMPED, PENALTIES, SEVERAL, why_uncertain
from autoaccum.window.job import Job

SIZES = (4, 2)
OUTPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
TARGETS = torch.tensor([0, 1, -100, -100, 2, 1])
MASK = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])

Loss = Callable[[slice], torch.Tensor]


def mean(part: slice) -> torch.Tensor:
    return OUTPUTS[part].square().mean()


def ignoring(part: slice) -> torch.Tensor:
    return cross_entropy(OUTPUTS[part], TARGETS[part])


def masked(part: slice) -> torch.Tensor:
    return (OUTPUTS[part, 0].square() * MASK[part]).sum() / MASK[part].sum().clamp(min=1)


def twice(part: slice) -> torch.Tensor:
    squares = OUTPUTS[part].logsumexp(1).square() * (TARGETS[part] != -100)
    return ignoring(part) + 0.1 * squares.sum() / (TARGETS[part] != -100).sum()


def in_some(part: slice) -> torch.Tensor:
    return twice(part) + (mean(part) if part.start else 0)


def found(loss: Loss, hypothesis: Hypothesis | None, stated: Sequence[Any] = (None, None)) -> str | None:
    job: Any = type("Stated", (), {"num_items": stated[0], "reduction": stated[1]})
    reductions = [read(loss(slice(0, 4)), 4), read(loss(slice(4, 6)), 2)]
    counts = [float(reduction.items) for reduction in reductions]
    return why_uncertain(cast(Job, job), hypothesis, SIZES, counts, reductions)


@pytest.mark.parametrize(
    ("loss", "hypothesis", "why"),
    [
        (mean, "items", None),
        (mean, "samples", None),
        (ignoring, "items", None),
        (lambda part: OUTPUTS[part].sum(), "sum", None),
        (twice, "items", None),
        (in_some, "items", SEVERAL),
        (lambda part: mean(part) + 0.1 * OUTPUTS[part].abs().mean(), "items", None),
        (lambda part: ignoring(part) + mean(part), "items", SEVERAL),
        (lambda part: ignoring(part) + mean(part), "samples", SEVERAL),
        (lambda part: OUTPUTS[part].sum(), "sum and penalties", PENALTIES),
        (masked, "items", CLAMPED),
    ],
)
def test_one_count_is_certain(loss: Loss, hypothesis: Hypothesis, why: str | None) -> None:
    assert found(loss, hypothesis) == why


@pytest.mark.parametrize("stated", [(len, None), (None, "mean"), (None, "sum")])
def test_what_is_stated_is_certain(stated: Sequence[Any]) -> None:
    assert found(masked, "items", stated) is None


def test_a_window_in_which_nothing_counts_says_nothing() -> None:
    assert found(lambda part: OUTPUTS[part].sum() * 0.0, "items") is None
