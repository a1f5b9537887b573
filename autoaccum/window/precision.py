"""The precisions that ``fit`` and ``probe`` compute in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from autoaccum._checks import one_of

Precision = Literal["fp32", "bf16", "fp16"]
Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context of one forward."""


def autocast(precision: Precision, device: torch.device) -> Autocast:
    """Autocast for bf16 and fp16; for fp32 a context that does nothing, so that the model computes as it is.

    Raises:
        ArgumentError: there is no such precision.
    """
    one_of("precision", precision, ("fp32", "bf16", "fp16"))
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)
