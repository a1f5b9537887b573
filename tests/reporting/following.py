"""What tests of callbacks that write a run elsewhere share: a run that fails and goes on, and no way to the network."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import StopTraining
from autoaccum.events import StepReport


class Broken(Exception):
    """What ends a run in its midst."""


def train(run_dir: Path | None, *callbacks: Any, ends: int | None = None, how: type[Exception] = Broken) -> Any:
    """Six windows of 4 samples, validated after each 8; it ends after that step, and keeps checkpoints of even ones."""
    torch.manual_seed(0)
    data = torch.randn(24, 3), torch.randn(24, 1)

    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == ends:
            raise how

    kept = {} if run_dir is None else {"run_dir": run_dir, "checkpoint_every": 2}
    return autoaccum.fit(
        nn.Linear(3, 1), data, effective_batch=4, micro_batch=3, clip_norm=1.0, validation_data=data, validate_every=8,
        loss_fn=lambda outputs, targets: (nn.functional.mse_loss(outputs, targets), {"half": 0.5}),
        metrics={"near": lambda outputs, targets: (outputs - targets).abs() < 1}, device="cpu", progress=False,
        callbacks=[*callbacks, end], **kept,
    )  # fmt: skip


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Refuse connections to other machines, and return those that were asked for."""
    asked: list[Any] = []
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            asked.append(address)
            raise OSError(f"no way to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    return asked


__all__ = ["Broken", "StopTraining", "no_network", "train"]
