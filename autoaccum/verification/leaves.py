"""Reads the numbers of what a batch is made of, whatever it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def numbers_of(leaf: Any) -> torch.Tensor | None:
    """Return the numbers of a tensor or array, with a row for each of its rows, where they lie, in 64 bits.

    Complex ones become pairs. The numbers are a copy. None for what has no rows of numbers: texts, dates, sparse,
    nested and quantised tensors, and scalars.
    """
    if isinstance(leaf, np.ndarray):
        # As PyTorch takes them: in the machine's order of bytes, not backwards, and none of more than 64 bits.
        if leaf.dtype.kind not in "biufc" or leaf.dtype.itemsize > (16 if leaf.dtype.kind == "c" else 8):
            return None
        leaf = torch.as_tensor(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")))
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_quantized or leaf.layout is not torch.strided:
        return None
    if not leaf.ndim:
        return None
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    widest = torch.float64 if leaf.device.type != "mps" else torch.float32
    numbers: torch.Tensor = leaf.detach().to(widest, copy=True)
    return numbers
