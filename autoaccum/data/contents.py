"""Tells data from other data of the same shapes: a digest of a few megabytes of them, evenly spread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

MOST_BYTES = 4 * 2**20
"""Bytes of all tensors together that are read for a digest: 10 ms."""
_FEWEST_ROWS = 64
"""Read parts of at least so many rows, however large they are."""


def digest_of(leaves: Sequence[Any]) -> str | None:
    """Return a digest of tensors, of smaller ones all of their bytes; None where none of the leaves is a tensor.

    What is read of larger ones is a function of their shapes, so that it is the same in each process.
    """
    # Of a tensor that lies in memory otherwise, a sparse one say, the bytes are not its numbers.
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    if not tensors:
        return None
    digest = hashlib.sha256()
    for tensor in tensors:
        for part in _parts(tensor.detach().as_subclass(torch.Tensor), MOST_BYTES // len(tensors)):
            # As bytes, for NumPy has no bfloat16.
            plain = part.resolve_conj().resolve_neg().cpu().contiguous()
            digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _parts(tensor: torch.Tensor, most_bytes: int) -> list[torch.Tensor]:
    """Return parts of a tensor that hold about so many bytes."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= most_bytes or not tensor.ndim:
        return [tensor]
    num_rows = len(tensor)
    row_bytes = num_bytes // num_rows
    count = min(num_rows, max(most_bytes // row_bytes, _FEWEST_ROWS))
    rows = torch.arange(count, device="cpu") * (num_rows - 1) // max(count - 1, 1)  # they may be millions
    if count * row_bytes <= most_bytes:
        return [tensor.index_select(0, rows.to(tensor.device))]
    # Every so manieth number of each row: an odd step, for the rows of an image often have an even length.
    step = -(-count * row_bytes // most_bytes) | 1
    return [tensor[row].reshape(-1)[::step] for row in rows]
