"""The precisions that ``fit`` and ``probe`` compute in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from autoaccum.errors import ArgumentError
from autoaccum.loss.weighting import type_of_gradient

Precision = Literal["fp32", "bf16", "fp16"]
"""The type that forwards compute in: float32, or 16 bits where autocast deems them safe."""
Autocast = Callable[[], AbstractContextManager[Any]]
"""() -> the context of one forward."""


def autocast(precision: Precision, device: torch.device) -> Autocast:
    """Return what makes the context of a forward: autocast for bf16 and fp16, and for fp32 one that does nothing.

    So with fp32 the model computes in whatever types its parameters have.

    Raises:
        ArgumentError: there is no such precision.
    """
    # Only a text can be one, and nothing else is compared: an array has an == of its own.
    if not isinstance(precision, str) or precision not in ("fp32", "bf16", "fp16"):
        # Lightning has "bf16-mixed", others torch.bfloat16, or 16.
        said = {"bf": "bf16", "16": "fp16", "32": "fp32"}
        meant = next((ours for theirs, ours in said.items() if theirs in str(precision).lower()), None)
        cure = f"Did you mean {meant!r}?" if meant else ""
        raise ArgumentError("precision", precision, "one of 'fp32', 'bf16', 'fp16'", cure)
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    # Anew for each forward: autocast keeps copies of weights in 16 bits until its context is left, and weights change.
    return lambda: torch.autocast(device.type, dtype=dtype)


def scaler_of(precision: Precision, device: torch.device, optimizer: torch.optim.Optimizer) -> Any:
    """Return what scales losses of a precision, so that their gradients do not vanish; None where nothing has to.

    Raises:
        ArgumentError: it cannot, for gradients that the optimizer steps on are of float16 themselves.
    """
    if precision != "fp16":
        return None
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if any(type_of_gradient(p) is torch.float16 for p in trained):
        cure = "Parameters and their gradients are float16. Call model.float() before you make the optimizer."
        raise ArgumentError("precision", precision, "trained parameters in float32", cure)
    return torch.amp.GradScaler(device.type)


def fresh_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """Return a scaler of the same state, which has not unscaled anything."""
    # The scale changes only after a step, but "already unscaled" must be forgotten: a new one has not heard of it.
    fresh = torch.amp.GradScaler(device.type)
    fresh.load_state_dict(scaler.state_dict())
    return fresh
