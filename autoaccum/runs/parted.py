"""Tensors that were written in parts by several ranks: each rank reads what it needs of them, however they were cut."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from autoaccum.errors import CheckpointCorruptError
from autoaccum.ranks.units import is_distributed
from autoaccum.runs.parts import SHARDING, place_of
from autoaccum.runs.tensor_files import CODES

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class _Chunk(NamedTuple):
    """A part as it lies in a file."""

    path: Path
    offsets: list[int]
    shape: list[int]


class Files:
    """The files of a checkpoint's parts, looked into when a part is asked for."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Set up for the files of these names in a checkpoint."""
        self._folder = folder
        self._names = sorted(names)
        self._found: dict[tuple[str, str], list[_Chunk]] | None = None

    def chunks(self, folder: str, name: str) -> list[_Chunk]:
        """Return where the parts of a tensor lie.

        Raises:
            CheckpointCorruptError: a file does not say where its parts begin.
        """
        # Headers alone, once: a state has some hundreds of tensors, and each rank has a file.
        if self._found is None:
            self._found = {}
            for file in self._names:
                for key, chunk in _chunks_in(self._folder / file):
                    self._found.setdefault((file.partition("/")[0], key), []).append(chunk)
        return self._found.get((folder, name), [])


def _chunks_in(path: Path) -> list[tuple[str, _Chunk]]:
    found = []
    # A file may be a stranger's: whatever stands in its header is believed after it was looked at, and runs nothing.
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {}).get(SHARDING, ""))
            for name in file.keys():  # noqa: SIM118
                offsets, shape = told[name]["saved_offsets"], file.get_slice(name).get_shape()
                if len(offsets) != len(shape):
                    raise ValueError(name)
                found.append((name, _Chunk(path, offsets, shape)))
    except SafetensorError as error:
        raise CheckpointCorruptError(path, f"is not a safetensors file ({error})") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CheckpointCorruptError(path, "does not say where its parts begin") from None
    return found


class Parted:
    """A tensor whose parts lie in files, none of which was read."""

    def __init__(self, files: Files, folder: str, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Set up.

        Args:
            files: those of the checkpoint.
            folder: of these the one that it lies in.
            name: of the tensor there.
            dtype: as safetensors calls it.
            shape: of the whole.

        Raises:
            LookupError: there is no such dtype.
            ValueError: that is no shape.
        """
        self._files, self._folder, self.name = files, folder, name
        self.dtype, self.shape = _DTYPES[dtype], torch.Size(shape)
        # What is not as large as what is there is read by nobody, so that a stranger's shape takes no memory.
        if any(size < 0 for size in self.shape):
            raise ValueError(f"the shape {tuple(shape)}")

    def like(self, present: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, distributed as a tensor is that is there, or all of it, on the host.

        Raises:
            CheckpointCorruptError: some of it lies in no file.
        """
        if not is_distributed(present):
            return self._read([0] * len(self.shape), list(self.shape))
        shape, offsets = place_of(present)
        return as_part(self._read(offsets, shape), present)

    def _read(self, offsets: list[int], shape: list[int]) -> torch.Tensor:
        """Return so much of it, from there on, on the host."""
        # By places in the whole, and not by ranks: those that wrote it may have been more or fewer.
        found = torch.empty(shape, dtype=self.dtype)
        num_found = 0
        for chunk in self._files.chunks(self._folder, self.name) if found.numel() else ():
            # Where what is wanted and what lies there meet; in most files they do not.
            begins = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=False)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, chunk.offsets, chunk.shape, strict=False)]
            if len(chunk.shape) != len(shape) or any(a >= b for a, b in zip(begins, ends, strict=True)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, chunk.offsets, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, offsets, strict=True))
            with safe_open(chunk.path, framework="pt") as file:
                # Of a number without dimensions there is no slice.
                value = file.get_slice(self.name)[there] if there else file.get_tensor(self.name)
            if value.dtype != self.dtype:
                raise CheckpointCorruptError(chunk.path, f"is of {value.dtype}, not of {self.dtype}", entry=self.name)
            found[here] = value
            num_found += math.prod(value.shape)
        # Memory that was not written to would be whatever was there before.
        if num_found != found.numel():
            raise CheckpointCorruptError("", "is not there as a whole", entry=self.name)
        return found


def as_part(local: torch.Tensor, present: Any) -> torch.Tensor:
    """Return a distributed tensor like one that is there, of which this rank's part is given."""
    from torch.distributed.tensor import DTensor

    # Whether the others have theirs of the same shape is not asked of them: each has read a part of the same whole.
    own, how = local.to(present.to_local().device), {"shape": present.shape, "stride": present.stride()}
    return DTensor.from_local(own, present.device_mesh, present.placements, run_check=False, **how)


def put(value: Any, present: Any) -> Any:
    """Return what was saved as what is there lies, a part or a whole; as it is where it cannot take its place."""
    if not isinstance(value, Parted | torch.Tensor) or not isinstance(present, torch.Tensor):
        return value
    if value.shape != present.shape:
        return value
    if isinstance(value, Parted):
        return value.like(present)
    if not is_distributed(present) or is_distributed(value):
        return value
    # It was written by a process that has all of the model, and every rank has read all of it.
    shape, offsets = place_of(present)
    own = value[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]
    return as_part(own.contiguous(), present)
