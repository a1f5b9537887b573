"""Samples on their way from a worker: in one piece.

Tensors that are sent on their own each take a file descriptor as long as they are kept, of which a process may have
some 1024; and a view takes all that it is a view of along.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (obj.numpy(),)  # ten times as fast as torch does it
        except (TypeError, RuntimeError):  # bfloat16, sparse
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def pack(items: Any) -> bytes:
    """Anything that can be pickled."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(items)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed."""
    return pickle.loads(packed)
