"""Sends samples from a worker to the main process as one string of bytes.

Tensors that are sent on their own each take a file descriptor as long as they are kept, of which a process may have
some 1024; and a view takes all that it is a view of along. (To join short samples into one long sequence, which is
called packing too, is up to the user's collate_fn.)
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors as arrays of NumPy's, without what they are views of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented  # as any other pickler would; subclasses of tensors may hold more than numbers
        try:
            return torch.from_numpy, (obj.numpy(),)  # ten times as fast as torch does it
        except (TypeError, RuntimeError):  # bfloat16, sparse
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def pack(items: Any) -> bytes:
    """Return anything that can be pickled as bytes."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(items)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Return what was packed; its tensors can be written to."""
    return pickle.loads(packed)
