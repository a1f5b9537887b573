"""Reads the numbers of what a batch is made of, whatever it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def has_numbers(leaf: Any) -> bool:
    """Return whether a leaf has rows of numbers: no texts, dates, sparse, nested or quantised tensors, or scalars."""
    if isinstance(leaf, np.ndarray):
        # PyTorch takes none of more than 64 bits.
        return (
            leaf.ndim > 0 and leaf.dtype.kind in "biufc" and leaf.dtype.itemsize <= 8 * (1 + (leaf.dtype.kind == "c"))
        )
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.layout is torch.strided and leaf.ndim > 0


def numbers_of(leaf: Any) -> torch.Tensor | None:
    """Return the numbers of a tensor or array, with a row for each of its rows, where they lie, in 64 bits: a copy.

    Complex ones become pairs. None for what has no rows of numbers.
    """
    if not has_numbers(leaf):
        return None
    if isinstance(leaf, np.ndarray):
        # As PyTorch takes them: in the machine's order of bytes, and not backwards.
        leaf = torch.as_tensor(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")))
    leaf = leaf.as_subclass(torch.Tensor)  # a subclass may not bear what is computed with its numbers
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    widest = torch.float64 if leaf.device.type != "mps" else torch.float32
    numbers: torch.Tensor = leaf.detach().to(widest, copy=True)
    return numbers
