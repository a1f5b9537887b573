"""What is said of a gradient that may not be the whole window's: each case, and none where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoaccum.loss.reductions import Reduction, Term
from autoaccum.verification.notices import (
    batch_norm_notices,
    contradiction_notice,
    coupling_notice,
    doubt_notice,
    half_precision_notices,
    penalty_notice,
)


def test_the_notice_counts_the_layers_and_names_the_cure() -> None:
    for layers, cause in ((1, "1 BatchNorm layer in"), (3, "3 BatchNorm layers in")):
        (notice,) = batch_norm_notices([nn.BatchNorm1d(4) for _ in range(layers)])
        assert cause in notice.cause
        assert "GroupNorm" in notice.cure
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
        penalty_notice(),
    ]
    assert len({notice.consequence for notice in said}) == len(said) == 6
