"""What each precision computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.step.job import autocast, scaler_of
from tests.devices import DEVICE

HERE = torch.device(DEVICE)
pytestmark = pytest.mark.usefixtures("made_there")


@pytest.mark.device
@pytest.mark.parametrize(
    ("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_are_computed_in_it_and_parameters_keep_theirs(precision: Any, expected: torch.dtype) -> None:
    model = nn.Linear(4, 3)
    with autocast(precision, HERE)():
        outputs = model(torch.ones(2, 4))
        assert torch.is_autocast_enabled(torch.device(DEVICE).type) is (precision != "fp32")
    assert outputs.dtype is expected
    assert not torch.is_autocast_enabled(torch.device(DEVICE).type)
    outputs.float().sum().backward()
    assert model.weight.dtype is torch.float32
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0] * 4] * 3


@pytest.mark.device
def test_fp32_means_as_the_model_is() -> None:
    model = nn.Linear(4, 3, dtype=torch.float64)
    with autocast("fp32", HERE)():
        assert model(torch.ones(2, 4, dtype=torch.float64)).dtype is torch.float64


def test_each_forward_has_a_context_of_its_own() -> None:
    make = autocast("bf16", HERE)
    for _ in range(2):
        with make(), make():
            assert torch.is_autocast_enabled(torch.device(DEVICE).type)
        assert not torch.is_autocast_enabled(torch.device(DEVICE).type)


@pytest.mark.gpu
def test_on_an_accelerator_it_leaves_the_cpu_alone() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with autocast("bf16", device)():
        assert (nn.Linear(4, 3, device=device)(torch.ones(2, 4, device=device))).dtype is torch.bfloat16
        assert nn.Linear(4, 3, device="cpu")(torch.ones(2, 4, device="cpu")).dtype is torch.float32


@pytest.mark.parametrize(
    ("precision", "meant"),
    [
        ("fp8", ""),
        (None, ""),
        ("FP32", "fp32"),
        ("float32", "fp32"),
        (torch.bfloat16, "bf16"),
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        (16, "fp16"),
    ],
)
def test_no_other(precision: Any, meant: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        autocast(precision, HERE)
    cure = f" Did you mean {meant!r}?" if meant else ""
    assert str(caught.value) == f"precision={precision!r}: expected one of 'fp32', 'bf16', 'fp16'.{cure}"


def test_gradients_that_no_scaler_takes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3).half().requires_grad_(False), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert scaler_of("fp32", HERE, optimizer) is None
    assert isinstance(scaler_of("fp16", HERE, optimizer), torch.amp.GradScaler), "what is frozen has no gradient"
    model.half()
    with pytest.raises(ArgumentError, match=r"precision='fp16': expected trained parameters in float32.*model.float"):
        scaler_of("fp16", HERE, optimizer)
