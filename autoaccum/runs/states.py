"""Weights and a nested state as one JSON tree and tensors, in safetensors files: nothing in them can execute code.

In the tree, ``null``, booleans, strings, lists, finite floats and ints below 2**63 stand for themselves, and everything
else is ``{kind: content}``, a dict too. Types are restored exactly, or refused when the state is packed. A tensor comes
back on the CPU and detached, one object for each that went in, its dimensions in the same order in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from autoaccum.errors import CheckpointStateError

Tensors = dict[str, torch.Tensor]
Tree = Any

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Of the safetensors format."""
_AS_BYTES = (torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Without a code, or with one that older readers do not know."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_CODES, *_AS_BYTES)}
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {"dict": dict, "list": list, "set": set, "int": int, "float": float}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_KEYS = (type(None), bool, int, float, str, bytes, tuple)
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What the files hold."""

    tree: Tree
    """The weights' and the state's trees; they name the tensors."""
    weights: Tensors
    """By their names in the model; the first of those that are tied."""
    others: Tensors
    """Of the state, and weights that have no place among the others."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.weights.values(), *self.others.values()))


def pack(weights: Mapping[str, Any], state: Any, *, copy: bool) -> Packed:
    """Take states apart.

    Args:
        weights: a model's state_dict.
        state: nested in any way.
        copy: whether tensors are copied, to the host, so that the originals may change afterwards.

    Raises:
        CheckpointStateError: there is something in them that cannot be kept.
    """
    packer = _Packer(copy=copy)
    try:
        tree = {"weights": packer.weights_tree(weights), "state": packer.tree(state, "")}
    except RecursionError:
        raise CheckpointStateError("state", "nested without end, or nearly so") from None
    return Packed(tree=tree, weights=packer.weights, others=packer.others)


def unpack(packed: Packed) -> tuple[Any, Any]:
    """The weights and the state that were packed, in memory of their own.

    Raises:
        Exception: of many kinds, where the tree is not one that ``pack`` made.
    """
    unpacker = _Unpacker(packed)
    return unpacker.value(packed.tree["weights"]), unpacker.value(packed.tree["state"])


class _Packer:
    def __init__(self, *, copy: bool) -> None:
        self.weights: Tensors = {}
        self.others: Tensors = {}
        self._copy = copy
        self._known: dict[int, Tree] = {}

    def weights_tree(self, weights: Mapping[str, Any]) -> Tree:
        places: dict[Any, Tree] = {}
        items = []
        for name, value in weights.items():
            path = f"weights[{name!r}]"
            if isinstance(value, torch.Tensor):
                self._check(value, path)
                # Each state_dict() makes new tensors: tied ones are known by the memory that they share.
                place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
                if not value.numel() or place not in places:
                    places[place] = self._weight(name, value, path)
                items.append([name, places[place]])
            else:
                items.append([name, self.tree(value, path)])
        return {"OrderedDict": [items, self.tree(getattr(weights, "_metadata", None), "weights._metadata")]}

    def _weight(self, name: str, value: torch.Tensor, path: str) -> Tree:
        if value.dtype not in _CODES or not name.isprintable() or name == "__metadata__":
            return self.tree(value, path)
        self.weights[name] = self._taken(value)
        return {"weight": name}

    def tree(self, value: Any, path: str) -> Tree:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is complex:
            return {"complex": [self.tree(value.real, path), self.tree(value.imag, path)]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is list:
            return self._list(value, path)
        if kind in _SEQUENCES.values():
            return {kind.__name__: self._list(value, path)}
        if kind in _MAPPINGS.values():
            # A state_dict keeps the versions of its modules in an attribute.
            extra = self.tree(getattr(value, "_metadata", None), f"{path}._metadata")
            return {kind.__name__: [self._items(value, path), extra]}
        if kind is defaultdict and value.default_factory in _FACTORY_NAMES:
            return {"defaultdict": [_FACTORY_NAMES[value.default_factory], self._items(value, path)]}
        if kind is torch.dtype and value in _DTYPES.values():
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray and value.dtype.kind in "biufc":
            flat = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {"array": [self._stored(flat), value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        raise CheckpointStateError(path or "state", f"of type {kind.__module__}.{kind.__qualname__}")

    def _list(self, values: Any, path: str) -> list[Tree]:
        return [self.tree(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def _items(self, values: dict[Any, Any], path: str) -> list[list[Tree]]:
        items = []
        for key, value in values.items():
            is_name = isinstance(key, str) and key.isidentifier()
            below = f"{path}.{key}".lstrip(".") if is_name else f"{path}[{key!r}]"
            if type(key) not in _KEYS:
                raise CheckpointStateError(path or "state", f"a dict with a key of type {type(key).__qualname__}")
            items.append([self.tree(key, below), self.tree(value, below)])
        return items

    def _tensor(self, value: torch.Tensor, path: str) -> Tree:
        if id(value) not in self._known:
            self._check(value, path)
            # As it lies in memory: kernels may round otherwise where the strides of a moment and its gradient differ.
            order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
            lying = value.permute(order)
            if value.is_contiguous() or not lying.is_contiguous():
                self._known[id(value)] = self._typed(value)
            else:
                self._known[id(value)] = {"permuted": [self._typed(lying), order]}
        return self._known[id(value)]

    def _typed(self, value: torch.Tensor) -> Tree:
        if value.dtype in _CODES:
            return {"tensor": self._stored(value)}
        flat = _bytes(value)
        return {"bits": [self._stored(flat), str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def _stored(self, value: torch.Tensor) -> str:
        name = str(len(self.others))
        self.others[name] = self._taken(value)
        return name

    def _taken(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        return torch.empty(value.shape, dtype=value.dtype).copy_(value) if self._copy else value

    def _check(self, value: torch.Tensor, path: str) -> None:
        kind = type(value)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointStateError(path, f"a tensor of type {kind.__module__}.{kind.__qualname__}")
        if value.layout != torch.strided:
            raise CheckpointStateError(path, f"a tensor of layout {value.layout}", "Keep its to_dense().")
        if value.is_meta or value.dtype not in _DTYPES.values():
            raise CheckpointStateError(path, f"a tensor of {value.dtype} on {value.device}")


class _Unpacker:
    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._known: dict[str, torch.Tensor] = {}

    def value(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in content)
        if kind in _MAPPINGS:
            items, extra = content
            values = _MAPPINGS[kind](self._items(items))
            if extra is not None:
                values._metadata = self.value(extra)
            return values
        return getattr(self, f"_{kind}_value")(content)

    def _items(self, items: list[list[Tree]]) -> dict[Any, Any]:
        return {self.value(key): self.value(value) for key, value in items}

    def _int_value(self, content: str) -> int:
        return int(content, 16)

    def _float_value(self, content: str) -> float:
        return float(content)

    def _complex_value(self, content: list[Tree]) -> complex:
        real, imag = content
        return complex(self.value(real), self.value(imag))

    def _bytes_value(self, content: str) -> bytes:
        return base64.b64decode(content)

    def _defaultdict_value(self, content: list[Tree]) -> defaultdict[Any, Any]:
        factory, items = content
        return defaultdict(_FACTORIES[factory], self._items(items))

    def _dtype_value(self, content: str) -> torch.dtype:
        return _DTYPES[content]

    def _device_value(self, content: str) -> torch.device:
        return torch.device(content)

    def _weight_value(self, content: str) -> torch.Tensor:
        return self._once(f"weight {content}", lambda: self._packed.weights[content].clone())

    def _tensor_value(self, content: str) -> torch.Tensor:
        return self._once(content, lambda: self._packed.others[content].clone())

    def _bits_value(self, content: list[Any]) -> torch.Tensor:
        name, dtype, shape = content
        return self._once(name, lambda: self._packed.others[name].clone().view(_DTYPES[dtype]).reshape(shape))

    def _permuted_value(self, content: list[Any]) -> torch.Tensor:
        stored, order = content
        return self._once(str(content), lambda: self.value(stored).permute(*np.argsort(order).tolist()))

    def _once(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def _array_value(self, content: list[Any]) -> np.ndarray[Any, Any]:
        name, dtype, shape = content
        # NumPy itself refuses to make Python objects of bytes.
        return np.frombuffer(self._packed.others[name].numpy().tobytes(), dtype).reshape(shape).copy()

    def _scalar_value(self, content: list[Any]) -> Any:
        dtype, encoded = content
        return np.frombuffer(base64.b64decode(encoded), dtype)[0]


def write(path: Path, tensors: Tensors) -> tuple[int, str]:
    """Write a new safetensors file, to the disk; returns its bytes and their SHA-256.

    Not with ``safetensors.torch.save_file``: that wants all of it on the host and contiguous at once, and hides the
    number of an OSError. One tensor at a time is in memory here.

    Raises:
        OSError: it cannot be written.
    """
    # Aligned, as long as wider elements come first and the header's length is a multiple of 8.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)
    return write_durably(path, _parts(head, [tensor for _, tensor in ordered]))


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, to the disk; returns its bytes and their SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def read(path: Path) -> Tensors:
    """What a safetensors file holds, mapped into memory.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is not such a file.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _parts(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors:
        data = memoryview(_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements one after the other, and nothing left to be conjugated or negated."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may count as contiguous with any stride, which a view as bytes would refuse.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
