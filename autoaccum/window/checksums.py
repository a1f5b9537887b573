"""Checksums of the bits of tensors, wherever they lie."""

from __future__ import annotations

import zlib
from ctypes import c_char
from functools import cache

import torch
from torch import nn

_SMALL_BYTES = 2**16
"""Bytes of a tensor of a device that is copied to the host for a checksum."""
_ROW = 2**15
"""Numbers of a tensor of a device that are summed up to one."""
_PARTS = 16
"""A tensor of many rows is summed up in so many parts, for eight bytes are taken for each number of one."""
# By the bytes of an element; larger ones are several numbers.
_NUMBERS = {1: torch.int8, 2: torch.int16}


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
    part = tensor if _is_to_be_copied(tensor) else _summed_up(tensor.detach())
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


def _summed_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's bits, row by row, each number times one that was drawn for its place.

    Copied to the host it would take a hundred times as long as the operation that has made it. Sums of integers are the
    same in any order; that two sums are equal by chance is as likely as of checksums (multilinear hashing: Lemire and
    Kaser, "Strongly universal string hashing is fast", The Computer Journal 57, 2014).
    """
    bits = _as_it_lies(tensor)
    bits = (torch.view_as_real(bits) if bits.is_complex() else bits).view(-1)
    bits = bits.view(_NUMBERS.get(bits.element_size(), torch.int32))
    drawn = _drawn(tensor.device)
    whole = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = bits[whole.numel() :].long()
    sums = [rows.long().mul_(drawn).sum(1) for rows in torch.split(whole, max(1, len(whole) // _PARTS))]
    return torch.cat([*sums, (rest * drawn[: len(rest)]).sum(0, keepdim=True)])


@cache
def _drawn(device: torch.device) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator, dtype=torch.int64, device="cpu")
    return numbers.to(device)


def _lies_at_once(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor lie on the host one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
