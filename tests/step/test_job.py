"""A job knows the context that its forwards run in, and stays as it was made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.step.job import Job, Precision
from autoaccum.step.loss_functions import loss_function

CPU = torch.device("cpu")


def job(precision: Precision) -> Job:
    model = nn.Linear(4, 3)
    return Job(
        model=model,
        modules=(model,),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_of=loss_function(cross_entropy, None),
        device=CPU,
        precision=precision,
    )


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forwards_compute_in_its_precision(precision: Precision, expected: torch.dtype) -> None:
    made = job(precision)
    with made.autocast():
        assert made.model(torch.ones(2, 4)).dtype is expected
    assert made.model(torch.ones(2, 4)).dtype is torch.float32


def test_it_stays_as_it_was_made() -> None:
    made = job("fp32")
    with pytest.raises(FrozenInstanceError):
        made.precision = "bf16"  # type: ignore[misc]
