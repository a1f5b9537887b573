"""Tensors that lie in parts on several ranks: each rank writes those that it has. ``parted`` reads them.

::

    checkpoint/
        model/shard-00001-model-00001-of-00001.safetensors      the first rank's parts of the weights
        moments/shard-00001-model-00001-of-00001.safetensors    and those of the optimizer's state

A file says of each tensor where in the whole it begins. Names and header are those of ``HuggingFaceStorageWriter`` of
``torch.distributed.checkpoint``, whose reader reads them too; there is no pickle among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autoaccum.runs import tensor_files
from autoaccum.runs.tensor_files import CODES, Tensors

MODEL, MOMENTS = "model", "moments"
"""Folders of a checkpoint: of the weights, and of what else lies in parts."""
FOLDERS = (MODEL, MOMENTS)
Parts = dict[str, torch.Tensor]
"""Distributed tensors by their names in the files."""
_FILE = re.compile(r"(model|moments)/shard-\d{5}-model-00001-of-00001\.safetensors")
SHARDING = "DCP_SHARDING_INFO"
"""Entry of a file's header that says where its parts begin."""


def file_of(folder: str, rank: int) -> str:
    """Return the name of a rank's file, within a checkpoint."""
    return f"{folder}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def is_file(name: str) -> bool:
    """Return whether that is the name of a rank's file."""
    return _FILE.fullmatch(name) is not None


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether a distributed tensor lies in parts that can be told: cut along its dimensions, or copied."""
    # A partial sum is a value of no rank, and parts that are cut in turns (tensor parallelism) begin at no one offset.
    # Both have classes of their own, so that it is asked by name for the plain one.
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    return tensor.dtype in CODES and all(
        placement.is_replicate() or type(placement).__name__ == "Shard" for placement in placements
    )


def write(path: Path, parts: Parts, whole_ones: Tensors | None = None) -> tuple[int, str] | None:
    """Write this rank's parts of some tensors; return the file's bytes and their SHA-256, or None where it has none.

    Args:
        path: of a file that is not there yet.
        parts: the tensors.
        whole_ones: further tensors, that are there as a whole.

    Raises:
        OSError: it cannot be written.
    """
    own: Tensors = dict(whole_ones or {})
    offsets = {name: [0] * tensor.dim() for name, tensor in own.items()}
    for name, tensor in parts.items():
        local = tensor.to_local()  # type: ignore[attr-defined]
        # Of what is copied to several ranks the first copy is written.
        if local.numel() and _is_first_copy(tensor):
            own[name], offsets[name] = local.detach(), place_of(tensor)[1]
    if not own:
        return None
    # PyTorch's reader wants an entry for each tensor, those too that begin at 0. Sorted, so that the same state makes
    # the same bytes.
    sharding = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    return tensor_files.write(path, own, {"DCP_VERSION": "1.0", SHARDING: json.dumps(sharding, sort_keys=True)})


def _is_first_copy(tensor: Any) -> bool:
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


def place_of(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's part, and where in the whole it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # whose import takes seconds

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(shape), list(offset)
