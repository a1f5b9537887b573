"""Digests of data in memory, and of the samples that were trained on, by which a resumed run knows its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.errors import DataError

_BYTES = 4096
"""Read so many of a tensor, evenly spread."""
_ENTRIES = 64
"""Look at so many entries of a list or a dict."""
_DEEPEST = 8
"""Levels of a sample that are looked into."""
MOST_BYTES = 4 * 2**20
"""Bytes of all tensors together that are read for a digest: 10 ms."""
_FEWEST_ROWS = 64
"""Read parts of at least so many rows, however large they are."""
EACH = 64
"""Samples from the beginning of an epoch of which each is read; ``EVERY`` so manieth after them."""
EVERY = 16


class Rolling:
    """A digest of samples or batches, one after the other."""

    def __init__(self, value: str = "") -> None:
        """Continue with the ``value`` that another one has come to."""
        self.value = value

    def add(self, thing: Any) -> None:
        """Add a sample or a batch."""
        digest = blake2b(self.value.encode(), digest_size=8)
        # Nothing sees this: it is no operation of training, and a subclass of Tensor may know no rows of what is flat.
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
            _add(digest.update, thing, _DEEPEST)
        self.value = digest.hexdigest()


def is_read(position: int) -> bool:
    """Return whether the sample at a position of an epoch is part of its digest."""
    return position < EACH or not position % EVERY


_OF_NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_neg() or tensor.requires_grad)


def _add(update: Any, thing: Any, levels: int) -> None:
    """Add the bytes of a value, of large ones a part; of objects that nobody knows their types alone."""
    # What a process makes anew, an address or a handle, must not count: it would be another one in the next process.
    # NumPy takes the numbers of most tensors as they lie, without an operation; it has no bfloat16 and the like.
    if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.dtype in _OF_NUMPY and _is_plain(thing):
        thing = thing.numpy()
    if isinstance(thing, torch.Tensor):
        is_plain = thing.layout is torch.strided and not thing.is_meta and not thing.is_nested
        update(f"{tuple(thing.shape) if not thing.is_nested else ''}{thing.dtype}".encode())
        if is_plain:
            numbers = thing.detach().reshape(-1)
            step = -(-numbers.nbytes // _BYTES) | 1 if numbers.nbytes > _BYTES else 1
            update(_bytes_of(numbers[::step]))
    elif isinstance(thing, np.ndarray | np.generic):
        thing = np.asarray(thing)
        update(f"{thing.shape}{thing.dtype.str}".encode())
        if thing.dtype.kind not in "OV":
            numbers = thing.reshape(-1)
            step = -(-numbers.nbytes // _BYTES) | 1 if numbers.nbytes > _BYTES else 1
            update(numbers[::step].tobytes())
    elif isinstance(thing, str | bytes):
        update(repr((len(thing), thing[:_BYTES])).encode(errors="surrogatepass"))
    elif thing is None or isinstance(thing, bool | int | float | complex):
        update(f"{thing!r},".encode())
    else:
        update(f"{type(thing).__name__}(".encode())
        if not levels:
            return
        if isinstance(thing, Mapping):
            update(f"{len(thing)}".encode())
            for key, value in islice(thing.items(), _ENTRIES):
                _add(update, key, levels - 1)
                _add(update, value, levels - 1)
        elif isinstance(thing, list | tuple):
            update(f"{len(thing)}".encode())
            for value in thing[:_ENTRIES]:
                _add(update, value, levels - 1)
        elif is_dataclass(thing):
            for field in fields(thing):
                _add(update, getattr(thing, field.name, None), levels - 1)
        elif hasattr(thing, "__array_interface__"):  # an image of Pillow
            _add(update, np.asarray(thing), levels - 1)


def refuse_others(kind: str, epoch: int, position: int) -> None:
    """Raise the error for data that are others than those that were trained on.

    Raises:
        DataError: always.
    """
    raise DataError(
        f"data: the first {position} samples of epoch {epoch} differ from those that this run was trained on. The "
        f"order or the content of {kind} depends on something that the checkpoint lacks, such as a counter of epochs, "
        f"a generator in persistent workers, or files that have changed. Resuming would skip some samples and repeat "
        f"others. Give the data set_epoch(epoch), or state_dict() and load_state_dict(); or draw from the global "
        f"generators of torch, numpy or random, which autoaccum seeds each epoch. If you changed the data, undo that, "
        f"or pass resume=False to start over."
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, because NumPy has no bfloat16."""
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().data


def digest_of(leaves: Sequence[Any]) -> str | None:
    """Return a digest of tensors, of smaller ones all of their bytes; None where none of the leaves is a tensor.

    What is read of larger ones is a function of their shapes, so that it is the same in each process.
    """
    # Of a tensor that lies in memory otherwise, a sparse one say, the bytes are not its numbers.
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    if not tensors:
        return None
    digest = sha256()
    for tensor in tensors:
        for part in _parts(tensor.detach().as_subclass(torch.Tensor), MOST_BYTES // len(tensors)):
            digest.update(_bytes_of(part))
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
