"""Errors of parts of a batch that a model or a loss cannot compute with are PyTorch's own, with a note of the batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.step.loss_functions import loss_function

INPUTS, TARGETS = torch.ones(4, 3), torch.arange(4) % 2


def of(inputs: Any, targets: Any, model: nn.Module | None = None) -> Any:
    return loss_function(cross_entropy, None)(model or nn.Linear(3, 2), (inputs, targets))


@pytest.mark.parametrize(
    ("inputs", "targets", "told", "found"),
    [
        (INPUTS.double(), TARGETS, "dtype", r"\(\d, 3\) of float64, \(\d,\) with values 0 to"),
        (INPUTS > 0, TARGETS, "dtype", r"\(\d, 3\) of bool, "),
        (INPUTS, TARGETS.short(), "expected", r"\(\d, 3\), \(\d,\) of int16 with values 0 to"),
        (INPUTS, TARGETS[:, None], "multi-target", r"\(\d, 3\), \(\d, 1\) with values 0 to"),
    ],
)
def test_the_note_shows_shapes_and_types(inputs: torch.Tensor, targets: torch.Tensor, told: str, found: str) -> None:
    with pytest.raises(RuntimeError, match=told) as caught:
        autoaccum.fit(
            nn.Linear(3, 2), (inputs, targets), loss_fn=cross_entropy, effective_batch=4, device="cpu", progress=False
        )
    assert re.search(rf"^autoaccum .* of shapes {found}", "\n".join(caught.value.__notes__), re.MULTILINE)


def test_texts_are_one_argument() -> None:
    class Lengths(nn.Module):
        def forward(self, texts: list[str]) -> torch.Tensor:
            return torch.tensor([[float(len(text)), 0.0] for text in texts], requires_grad=True)

    assert of(["a", "bb", "ccc", "d"], TARGETS, Lengths()).ndim == 0
    assert of(("a", "bb", "ccc", "d"), TARGETS, Lengths()).ndim == 0


def test_errors_of_other_kinds_come_out_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        of(INPUTS[:, :2], TARGETS)
    with pytest.raises(TypeError, match="mine"):
        loss_function(None, lambda model, batch: (_ for _ in ()).throw(TypeError("mine")))(None, (INPUTS, ["a"]))
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        loss_function(None, lambda model, batch: model.missing)(nn.Linear(1, 1), (INPUTS, TARGETS))
