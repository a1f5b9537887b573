"""What tests of checks share: a check of a small model, and all that it could leave a trace in."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.training.check import CheckReport
from tests.models import classes

DOUBLE = torch.float64


def check(model: nn.Module, batch: Any = None, **options: Any) -> CheckReport:
    batch = classes(12, DOUBLE) if batch is None else batch
    if "training_step" not in options:
        options = {"loss_fn": cross_entropy, **options}
    return autoaccum.check(model, batch, **{"device": "cpu", **options})


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 3, bias=bias, dtype=DOUBLE)


def cause(report: CheckReport) -> str:
    assert report.notice is not None
    return report.notice.cause


def everything(model: nn.Module) -> Any:
    """Whatever a check could leave a trace in, copied."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": list(model.buffers()),
            "training": [module.training for module in model.modules()],
            "torch": torch.get_rng_state(),
            "python": random.getstate()[1][:5],
            "numpy": np.random.get_state()[1],
        }
    )


def assert_same(now: Any, before: Any) -> None:
    torch.testing.assert_close(now, before, rtol=0, atol=0)
