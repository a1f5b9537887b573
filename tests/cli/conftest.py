"""What tests of the command line share: a small recipe, and runs whose JSON is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum.cli.app import main

QUIET = ("--no-progress", "--run-dir", "none", "--device", "cpu")
TINY = """
import torch
from torch import nn

def recipe():
    torch.manual_seed(0)
    return {{
        "model": nn.Linear(4, 1),
        "data": (torch.randn(24, 4), torch.randn(24, 1)),
        "loss_fn": nn.functional.mse_loss,
        "micro_batch": 8,
        {more}
    }}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe of a linear model and 24 samples, with further lines of its dict and of its module."""

    def write(more: str = "", top: str = "") -> str:
        path = tmp_path / "tiny.py"
        path.write_text(top + TINY.format(more=more))
        return str(path)

    return write


@pytest.fixture
def fit_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*argv: str) -> dict[str, Any]:
        assert main(["fit", *argv, *QUIET, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run
