"""Tensors in parts on several ranks: each writes its own parts, and reads what it needs, however they were cut."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autoaccum.distributed.fsdp import is_distributed
from autoaccum.errors import CheckpointCorruptError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.runs.files import write_durably

Parts = dict[str, torch.Tensor]
"""Distributed tensors by their places in a state."""
_FILE = re.compile(r"shard-\d{5}\.pt")


def file_of(rank: int) -> str:
    """Return the name of a rank's file, within a checkpoint."""
    return f"shard-{rank + 1:05d}.pt"


def is_file(name: str) -> bool:
    """Return whether that is the name of a rank's file."""
    return _FILE.fullmatch(name) is not None


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether a distributed tensor lies in parts that can be told: cut along its dimensions, or copied."""
    # A partial sum is a value of no rank, and parts that are cut in turns (tensor parallelism) begin at no one offset.
    # Both have classes of their own, so that it is asked by name for the plain one.
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    return all(placement.is_replicate() or type(placement).__name__ == "Shard" for placement in placements)


def write(path: Path, parts: Parts) -> tuple[int, str] | None:
    """Write this rank's parts of some tensors; return the file's bytes and their SHA-256, or None where it has none.

    Raises:
        OSError: it cannot be written.
    """
    own = {}
    for name, tensor in parts.items():
        local = tensor.to_local()  # type: ignore[attr-defined]
        # Of what is copied to several ranks the first copy is written.
        if local.numel() and _is_first_copy(tensor):
            own[name] = (place_of(tensor)[1], local.detach())
    if not own:
        return None
    return write_durably(path, lambda file: torch.save(own, file))


def _is_first_copy(tensor: Any) -> bool:
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


def place_of(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's part, and where in the whole it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # whose import takes seconds

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(shape), list(offset)


class _Chunk(NamedTuple):
    """A part in a file, of which nothing is read before it is looked at."""

    path: Path
    offsets: list[int]
    values: torch.Tensor


class Files:
    """The files of a checkpoint's parts, looked into when a part is asked for."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Set up for the files of these names in a checkpoint."""
        self._paths = [folder / name for name in sorted(names)]
        self._found: dict[str, list[_Chunk]] | None = None

    def chunks(self, name: str) -> list[_Chunk]:
        """Return where the parts of a tensor lie.

        Raises:
            CheckpointCorruptError: a file is none that ``write`` has written.
        """
        if self._found is None:
            self._found = {}
            for path in self._paths:
                for key, chunk in _chunks_in(path):
                    self._found.setdefault(key, []).append(chunk)
        return self._found.get(name, [])


def _chunks_in(path: Path) -> list[tuple[str, _Chunk]]:
    found = []
    # A file may be a stranger's: whatever stands in it is believed after it was looked at, and runs nothing.
    try:
        for name, (offsets, values) in torch.load(path, map_location="cpu", weights_only=True, mmap=True).items():
            if len(offsets) != values.dim():
                raise ValueError(name)
            found.append((name, _Chunk(path, offsets, values)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointCorruptError(path, f"does not say where its parts begin ({repr(error)[:200]})") from None
    return found


class Parted:
    """A tensor whose parts lie in files, none of which was read."""

    def __init__(self, files: Files, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Set up.

        Args:
            files: those of the checkpoint.
            name: of the tensor there.
            dtype: of its elements.
            shape: of the whole.

        Raises:
            ValueError: that is no shape.
        """
        self._files, self.name, self.dtype, self.shape = files, name, dtype, torch.Size(shape)
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
        for chunk in self._files.chunks(self.name) if found.numel() else ():
            # Where what is wanted and what lies there meet; in most files they do not.
            there_shape = list(chunk.values.shape)
            begins = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=False)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, chunk.offsets, there_shape, strict=False)]
            if len(there_shape) != len(shape) or any(a >= b for a, b in zip(begins, ends, strict=True)):
                continue
            value = chunk.values[
                tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, chunk.offsets, strict=True))
            ]
            if value.dtype != self.dtype:
                raise CheckpointCorruptError(chunk.path, f"is of {value.dtype}, not of {self.dtype}", entry=self.name)
            found[tuple(slice(a - o, b - o) for a, b, o in zip(begins, ends, offsets, strict=True))] = value
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


def placed(
    model: nn.Module, others: Sequence[nn.Module], optimizer: torch.optim.Optimizer, weights: Any, state: Any
) -> tuple[Any, Any]:
    """Return the weights and the state of a run with this rank's parts of what is distributed there.

    Raises:
        CheckpointCorruptError: a part is missing, or nothing is known of where it belongs.
    """
    found = of_module(model, weights)
    if not isinstance(state, dict):
        return found, state
    state = dict(state)
    modules = state.get("modules")
    if isinstance(modules, list) and len(modules) == len(others):
        state["modules"] = [
            {**saved, "state": of_module(module, saved.get("state"))} if isinstance(saved, dict) else saved
            for module, saved in zip(others, modules, strict=True)
        ]
    if "optimizer" in state:
        state["optimizer"] = _of_optimizer(optimizer, state["optimizer"])
    return found, state


def of_module(module: nn.Module, weights: Any) -> Any:
    """Return a module's weights with this rank's parts of what is distributed there.

    Raises:
        CheckpointCorruptError: a part is missing.
    """
    if not isinstance(weights, dict):
        return weights
    present, found = module.state_dict(), copy.copy(weights)
    made: dict[int, Any] = {}  # what is one tensor stays one
    for name, value in weights.items():
        if id(value) not in made:
            made[id(value)] = put(value, present.get(name))
        found[name] = made[id(value)]
    return found


def _of_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    kept = state.get("state") if isinstance(state, dict) else None
    if not isinstance(kept, dict):
        return state
    # As a state_dict numbers them; a form of its own has other keys, and is left as it is.
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    found: dict[Any, Any] = dict(kept)
    for key, values in kept.items():
        p = parameters.get(key) if type(key) is int else None
        if p is None or not isinstance(values, dict):
            continue
        there = optimizer.state.get(p, {})
        found[key] = {}
        for name, value in values.items():
            # As the one that is there lies; before the first step there may be none, and most lie as the parameter.
            moment = put(value, p if there.get(name) is None else there[name])
            # Of a form of its own, of which no check knows that it is none of PyTorch's tensors.
            if isinstance(moment, Parted):
                problem = f"has the shape {tuple(moment.shape)}, not {tuple(p.shape)}"
                raise CheckpointCorruptError("", problem, entry=f"optimizer.state[{key}].{name}")
            found[key][name] = moment
    return {**state, "state": found}
