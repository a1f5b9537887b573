"""Checksums of the bits of tensors, wherever they lie."""

from __future__ import annotations

import zlib
from ctypes import c_char
from functools import cache

import numpy as np
import torch
from torch import nn

from autoaccum.memory.oom import is_out_of_memory

_SMALL_BYTES = 2**18
"""Bytes of a tensor of a device that is copied to the host for a checksum: of larger ones sums are, of all of it."""
_ROW, _SUMS = 2**13, 16
"""Bytes of a tensor of a device that are summed up, to so many sums of four bytes."""
_ROWS = 2**16
"""Rows that are summed up at a time, about; a GPU asks for 17 of them at least."""
_ALIGNED = 16
"""A GPU multiplies matrices that begin at a multiple of so many bytes."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor lie in a storage of its own."""
    is_known = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_nested
    return is_known and tensor.layout is torch.strided and not tensor.is_meta


def place_of(tensor: torch.Tensor) -> int | None:
    """Return what storage a tensor lies in; None for one that has none of its own."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else None


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of a tensor; of one that has none that can be read, of what is known of it.

    Those of equal tensors are equal where both lie on the host, or both on a device and alike.
    """
    if not is_plain(tensor):
        # The shape of a nested tensor may be a symbol, which is another one each time.
        return hash((f"{tensor.layout}", tensor.dtype, None if tensor.is_nested else tensor.shape))
    mark = hash((tensor.shape, tensor.dtype))
    if not tensor.numel():
        return mark
    # To the host, where there is room for it: the device is short of it.
    drawn = None if _is_to_be_copied(tensor) else _drawn(tensor.device)
    part = tensor if drawn is None else _summed_up(tensor.detach(), drawn)
    lies = part if _lies_at_once(part) else part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # By their address, for each way through an operator takes longer than the checksum of a small tensor.
    address = lies.data_ptr()
    return hash((mark, zlib.crc32((c_char * lies.nbytes).from_address(address)))) if address else mark


def _is_to_be_copied(tensor: torch.Tensor) -> bool:
    is_small = tensor.device.type == "cpu" or tensor.nbytes <= _SMALL_BYTES
    return is_small or tensor.is_conj() or tensor.is_neg() or not _as_it_lies(tensor).is_contiguous()


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its dimensions in the order of its memory, as those of images may not be."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _summed_up(tensor: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor's bytes, row by row, each byte times numbers that were drawn for its place.

    Copied to the host it would take a hundred times as long as the operation that has made it. Sums of integers are the
    same in any order. Other bytes come to the same sum by chance in one case of 256, for of the numbers that may have
    been drawn for a byte that differs one makes up for the rest, and to the same 16 sums in one of 2^128 (Carter and
    Wegman, "Universal classes of hash functions", Journal of Computer and System Sciences 18, 1979).
    """
    bits = _as_it_lies(tensor)
    bits = (torch.view_as_real(bits) if bits.is_complex() else bits).view(-1).view(torch.int8)
    bits = bits.clone() if bits.data_ptr() % _ALIGNED else bits
    while bits.nbytes > _SMALL_BYTES:
        whole = bits[: len(bits) // _ROW * _ROW].view(-1, _ROW)
        parts = torch.tensor_split(whole, -(-len(whole) // _ROWS))
        sums = [torch._int_mm(rows, drawn).view(torch.int8).view(-1) for rows in parts]
        bits = torch.cat([*sums, bits[whole.numel() :]])
    return bits


@cache
def _drawn(device: torch.device) -> torch.Tensor | None:
    """Return the numbers that were drawn; None for a device that does not multiply matrices of bytes rightly."""
    # By NumPy: where PyTorch's functions are transformed, as by vmap, its own may refuse to draw.
    drawn = torch.from_numpy(np.random.default_rng(0).integers(-128, 128, (_ROW, _SUMS), dtype=np.int8))
    some = torch.from_numpy(np.random.default_rng(1).integers(-128, 128, (32, _ROW), dtype=np.int8))
    there = drawn.t().contiguous().to(device).t()  # column by column: as the libraries of all devices have it
    try:
        found = torch._int_mm(some.to(device), there).cpu()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return there if torch.equal(found.long(), some.long() @ drawn.long()) else None


def _lies_at_once(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor lie on the host one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
