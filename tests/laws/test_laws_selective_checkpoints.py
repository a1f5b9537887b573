"""A model that keeps some of its tensors and computes the rest again trains as any other, and without warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoaccum
from autoaccum.step.offloading import Offloading

CPU = torch.device("cpu")


class Selective(nn.Module):
    """Keeps the outputs of its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept: Any = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(self.block, inputs, use_reentrant=False, context_fn=kept)  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def contrast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(model(batch), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def fit(model: nn.Module, data: torch.Tensor, step: Any) -> object:
    return autoaccum.fit(
        model, data, training_step=step, effective_batch=16, micro_batch=4, epochs=2, device="cpu", progress=False
    )


def offload(model: nn.Module, data: torch.Tensor) -> None:
    with Offloading([model], CPU).taking(data):
        loss = squares(model, data)
    loss.backward()


HOOKED: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "fit, weighted": partial(fit, step=squares),
    "fit, joined": partial(fit, step=contrast),
    "check": lambda model, data: autoaccum.check(model, data, training_step=contrast, device="cpu"),
    "offloading": offload,
}


@pytest.mark.parametrize("name", HOOKED)
def test_pytorch_does_not_warn_about_hooks_that_the_user_has_not_set(name: str) -> None:
    """PyTorch 2.14 has a warning about hooks around such models. As an error it could end a measurement in silence."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        HOOKED[name](Selective(), torch.randn(32, 4))
    assert not [str(one.message) for one in heard]
