"""Windows with a loss over all of them, fitted once, whose gradients are compared with others."""

from __future__ import annotations

from typing import Any

import torch

import autoaccum

WINDOW = 12
F64 = torch.float64


class Recorder(torch.optim.SGD):
    """Remembers the gradients of its last step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.found = gradient_of(self.param_groups[0]["params"])
        super().step(closure)


def gradient_of(parameters: Any) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def fitted(model: Any, data: Any, arguments: Any, micro_batch: Any, **options: Any) -> tuple[torch.Tensor, float]:
    """The gradient and the loss of a window."""
    result = autoaccum.fit(
        model, data, effective_batch=WINDOW, micro_batch=micro_batch, optimizer=Recorder, steps=1, shuffle=False,
        device="cpu", progress=False, **{"strict": "verify" not in options} | arguments | options,
    )  # fmt: skip
    assert len(result.history[0].micro_batches) > 1 or micro_batch == WINDOW
    return result.optimizer.found, result.history[0].loss  # type: ignore[attr-defined]
