"""Nested states as files of ``torch.save``, which ``torch.load(weights_only=True)`` reads, so that they run no code.

What a file could not give back is refused before it is written, with its place in the state. A tensor comes back on the
CPU and detached, with its strides, and shares its memory as it did.

Enums, named tuples and tensor subclasses are read if their class is imported already.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from pickle import Pickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils.serialization import config

from autoaccum.distributed.fsdp import is_distributed, own_part
from autoaccum.errors import CheckpointCorruptError, CheckpointStateError, CheckpointUnsafeError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.runs.parted import Files, Parted, Parts, is_cut

# Types are told by identity, so that a subclass, which may hold more than its entries, is refused and not flattened.
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, frozenset, deque, torch.Size)
_FACTORIES = (dict, list, set, int, float)
_PLAIN = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device)
_KEYS = (type(None), bool, int, float, str, bytes, tuple)
"""Types that a dict's keys may have."""
_MOST_BITS = 2000
"""Longer integers are more than ``torch.load`` reads with ``weights_only``."""
# The functions that make arrays and scalars, and the classes of their dtypes, whose modules differ among versions.
_NUMPY = {np.ndarray, np.dtype, np.zeros(()).__reduce__()[0], np.float64().__reduce__()[0]}
_NUMPY |= {type(np.dtype(code)) for code in np.typecodes["All"] if np.dtype(code).kind in "biufc"}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each container's type and each value of a state, with the place of each.

    Raises:
        CheckpointStateError: a file could not give one back.
    """
    kind, inner = type(value), []
    if kind in _MAPPINGS or (kind is defaultdict and value.default_factory in _FACTORIES):
        for key in value:
            if type(key) not in _KEYS:
                raise CheckpointStateError(path or "state", f"a dict with a key of type {type(key).__qualname__}")
            is_name = isinstance(key, str) and key.isidentifier()
            inner.append((f"{path}.{key}".lstrip(".") if is_name else f"{path}[{key!r}]", value[key]))
        # A state_dict keeps the versions of its modules in an attribute, by which they read old ones.
        inner += [(f"{path}._metadata", value._metadata)] if hasattr(value, "_metadata") else []
    elif kind in _SEQUENCES or (hasattr(kind, "_fields") and isinstance(value, tuple) and _is_found(kind)):
        inner += [(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
    elif _is_composed(value):
        inner += [(f"{path}.{name}", entry) for name, entry in vars(value).items()]
    elif isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        yield path, value
        return
    elif not (
        kind in _PLAIN
        or (kind is int and value.bit_length() <= _MOST_BITS)
        # b, i, u, f, c: numbers.
        or ((kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufc")
        or (isinstance(value, Enum) and _is_found(kind) and kind.__members__.get(value.name) is value)
    ):
        raise CheckpointStateError(path or "state", f"of type {kind.__module__}.{kind.__qualname__}")
    else:
        yield path, value
        return
    yield path, kind
    for place, entry in inner:
        yield from leaves(entry, place)


def _check_tensor(value: torch.Tensor, path: str) -> None:
    # A subclass may mean something else by the same elements: a quantised tensor, a shard of one.
    kind = type(value)
    if is_distributed(value) and is_cut(value):
        return
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointStateError(path, f"a tensor of type {kind.__module__}.{kind.__qualname__}")
    if value.layout != torch.strided:
        raise CheckpointStateError(path, f"a tensor of layout {value.layout}", "Keep its to_dense().")
    if value.is_meta:
        raise CheckpointStateError(path, f"a tensor of {value.dtype} on {value.device}")


def _is_composed(value: Any) -> bool:
    """Return whether it is a tensor of another class that says of which tensors it consists."""
    kind = type(value)
    return isinstance(value, torch.Tensor) and hasattr(kind, "__tensor_flatten__") and (
        kind is not torch.Tensor and not is_distributed(value) and _is_found(kind)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """A state that a file can hold."""

    value: Any
    num_bytes: int
    """Bytes of its tensors, without those that lie on several ranks."""
    parts: Parts
    """Tensors that lie on several ranks, by their places."""

    def save(self, file: Any) -> None:
        """Write it to what has ``write`` and ``flush``; tensors of a device are copied to the host one at a time."""
        names = {id(tensor): name for name, tensor in self.parts.items()}
        pickler = type("_OfThisState", (_Pickler,), {"names": names})
        # There are checksums of the files.
        with config.patch({"save.compute_crc32": False, "save.use_pinned_memory_for_d2h": True}):  # type: ignore[attr-defined]
            torch.save(self.value, file, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))


def examined(value: Any, path: str = "") -> State:
    """Return a state with what is known of it.

    Raises:
        CheckpointStateError: there is something in it that a file could not give back.
    """
    storages: dict[int, int] = {}
    parts: dict[int, tuple[str, torch.Tensor]] = {}
    # A cycle is not looked for: it runs into Python's limit, and so does what nobody nests so deep.
    try:
        for place, leaf in leaves(value, path):
            if isinstance(leaf, torch.Tensor):
                if is_distributed(leaf):
                    # By where it is first met, which is the same on all ranks.
                    parts.setdefault(id(leaf), (place, leaf))
                else:
                    storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    except RecursionError:
        raise CheckpointStateError("state", "nested without end, or nearly so") from None
    return State(value, sum(storages.values()), dict(parts.values()))


def of_weights(weights: Mapping[str, Any]) -> State:
    """Return a model's state_dict with what is known of it; what is tied in it is one tensor, and comes back as one.

    Raises:
        CheckpointStateError: there is something in it that a file could not give back.
    """
    found: Any = copy(weights)  # with the versions of its modules
    first: dict[Any, torch.Tensor] = {}
    for name, value in weights.items():
        # Each state_dict() makes new tensors. Those without an element share no memory, whatever their pointers say.
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if (is_plain or is_distributed(value)) and (own := own_part(value)).numel():
            place = (value.device, own.data_ptr(), value.dtype, value.shape, value.stride())
            found[name] = first.setdefault(place, value)
    return examined(found, "weights")


class _Pickler(Pickler):
    """What a state holds, in words that ``weights_only`` knows."""

    names: Mapping[int, str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dtypes: dict[int, torch.dtype] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is deque:
            return deque, (list(value), value.maxlen)
        if kind is defaultdict:
            return defaultdict, (value.default_factory, dict(value))
        if id(value) in self.names:
            return Parted, (self.names[id(value)], value.dtype, tuple(value.shape))
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        # Without what users have attached to it.
        plain = value.detach()
        # PyTorch refuses memory that is seen as two dtypes.
        if self._dtypes.setdefault(plain.untyped_storage().data_ptr(), plain.dtype) != plain.dtype:
            plain = plain.clone()
        return plain.__reduce_ex__(2)


def read(path: Path, files: Files) -> Any:
    """Return the state that a file holds, in memory of its own.

    Args:
        path: of the file.
        files: those of the parts of tensors that lie on several ranks.

    Raises:
        CheckpointUnsafeError: it could execute code.
        CheckpointCorruptError: it is none that was written here.
        OSError: it cannot be read.
    """
    safe: list[Any] = [bytes, frozenset, deque, defaultdict, *_FACTORIES, *_NUMPY]
    safe.append((partial(Parted, files), f"{Parted.__module__}.{Parted.__qualname__}"))
    try:
        with open(path, "rb") as file, safe_globals(safe):
            unknown = {name: _class_at(name) for name in get_unsafe_globals_in_checkpoint(file)}
            if None not in unknown.values():
                file.seek(0)
                with safe_globals(list(unknown.values())):
                    return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # Whatever else Python, PyTorch and NumPy refuse.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointCorruptError(path, f"makes no sense ({repr(error)[:200]})") from None
    names = ", ".join(sorted(name for name, kind in unknown.items() if kind is None))
    raise CheckpointUnsafeError(path, f"names {names}, which is no class of values that is imported")


def _is_found(kind: type) -> bool:
    """Return whether a class is found again by its name: one that a function or a class has made is not."""
    return _class_at(f"{kind.__module__}.{kind.__qualname__}") is kind


def _class_at(name: str) -> Any:
    """Return the enum, named tuple or tensor subclass of that name; None where no imported module has it."""
    module, _, own = name.rpartition(".")
    found = vars(sys.modules[module]).get(own) if module in sys.modules else None
    if not isinstance(found, type) or not issubclass(found, Enum | tuple | torch.Tensor):
        return None
    return None if issubclass(found, tuple) and not hasattr(found, "_fields") else found
