"""A micro-batch that no window has the samples for is refused before training, with a fix that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.cli.app import main
from autoaccum.errors import ArgumentError

RECIPE = """
import torch
def recipe():
    return {
        "model": torch.nn.Linear(3, 1), "data": (torch.randn(16, 3), torch.randn(16, 1)),
        "loss_fn": torch.nn.functional.mse_loss, "effective_batch": 4,
    }
"""


def fit(**options: Any) -> autoaccum.FitResult:
    data = torch.randn(16, 3), torch.randn(16, 1)
    own: dict[str, Any] = {"effective_batch": 4, "device": "cpu", "progress": False, "cache": False} | options
    return autoaccum.fit(nn.Linear(3, 1), data, loss_fn=mse_loss, **own)


def test_more_than_a_step_has() -> None:
    with pytest.raises(ArgumentError) as caught:
        fit(micro_batch=8)
    assert str(caught.value) == (
        "micro_batch=8 is more than effective_batch=4: it is the samples of one forward and backward. Pass "
        "micro_batch=4, or effective_batch=8."
    )
    assert fit(micro_batch=4).plan.sizes == (4,)
    assert fit(micro_batch=8, effective_batch=8).plan.sizes == (8,)


def test_more_than_the_largest_step_of_a_schedule_has() -> None:
    with pytest.raises(ArgumentError) as caught:
        fit(micro_batch=16, effective_batch="2, 4:8")
    assert str(caught.value) == (
        "micro_batch=16 is more than the largest effective_batch, 8: it is the samples of one forward and backward. "
        "Pass micro_batch=8."
    )
    sizes = [report.micro_batches for report in fit(micro_batch=8, effective_batch="2, 4:8").history]
    assert sizes[0] == (2,)
    assert (8,) in sizes


def test_the_command_line_names_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    argv = ["fit", str(path), "--run-dir", "none", "--no-progress", "--no-cache"]
    assert main([*argv, "--effective-batch", "4", "--micro-batch", "8"]) == 2
    assert capsys.readouterr().err == (
        "error: --micro-batch 8 is more than --effective-batch 4: it is the samples of one forward and backward. Pass "
        "--micro-batch 4, or --effective-batch 8.\n"
    )
    assert main([*argv, "--micro-batch", "4"]) == 0
    assert main([*argv, "--micro-batch", "8", "--effective-batch", "8"]) == 0
