"""The precisions that ``fit`` and ``probe`` compute in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from autoaccum._checks import one_of
from autoaccum.events import Notice

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
    one_of("precision", precision, ("fp32", "bf16", "fp16"))
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    # Anew for each forward: autocast keeps copies of weights in 16 bits until its context is left, and weights change.
    return lambda: torch.autocast(device.type, dtype=dtype)


def half_precision_notices(parameters: Sequence[torch.Tensor]) -> list[Notice]:
    """Return what to say when windows of a model are cut whose parameters have 16 bits themselves."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters if p.dtype in (torch.bfloat16, torch.float16)}
    if not dtypes:
        return []
    notice = Notice(
        cause=f"The model's parameters are {' and '.join(sorted(dtypes))}",
        consequence="Gradients are summed over micro-batches in that type too, each addition rounding: the more "
        "micro-batches, the further from the gradient of the window",
        cure="Keep the parameters in float32 and pass precision='bf16' or 'fp16'",
    )
    return [notice]
