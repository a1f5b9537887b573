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
"""Tensors of one file, by their names in it."""
Tree = Any
"""JSON, in which every dict is ``{kind: content}``."""

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
"""Names of dtypes in the safetensors format."""
_AS_BYTES = (torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Dtypes without a code, or with one that older readers do not know: they are written as bytes."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_CODES, *_AS_BYTES)}
# Types are told by identity, so that a subclass, which may hold more than its entries, is refused and not flattened.
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {"dict": dict, "list": list, "set": set, "int": int, "float": float}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_KEYS = (type(None), bool, int, float, str, bytes, tuple)
"""Types that a dict's keys may have."""
_CHUNK_BYTES = 1 << 22
"""Digest and write so many bytes at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A state taken apart: what the files hold."""

    tree: Tree
    """The trees of the weights and of the state; they name the tensors."""
    weights: Tensors
    """Tensors of the model by their names in it, as other readers expect them; of tied ones the first."""
    others: Tensors
    """Tensors of the state by numbers, and weights that other readers could not take."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
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
    # A cycle is not looked for: it runs into Python's limit, and so does what nobody nests so deep.
    try:
        tree = {"weights": packer.weights_tree(weights), "state": packer.tree(state, "")}
    except RecursionError:
        raise CheckpointStateError("state", "nested without end, or nearly so") from None
    return Packed(tree=tree, weights=packer.weights, others=packer.others)


def unpack(packed: Packed) -> tuple[Any, Any]:
    """Return the weights and the state that were packed, in memory of their own.

    Raises:
        Exception: of many kinds, where the tree is not one that ``pack`` made.
    """
    unpacker = _Unpacker(packed)
    return unpacker.value(packed.tree["weights"]), unpacker.value(packed.tree["state"])


class _Packer:
    """The state of one ``pack``."""

    def __init__(self, *, copy: bool) -> None:
        self.weights: Tensors = {}
        self.others: Tensors = {}
        self._copy = copy
        # By the id of a tensor the tree that stands for it: one that is met twice is kept once, and comes back as one.
        self._known: dict[int, Tree] = {}

    def weights_tree(self, weights: Mapping[str, Any]) -> Tree:
        """Return the tree of a state_dict, whose tensors keep their names."""
        places: dict[Any, Tree] = {}
        items = []
        for name, value in weights.items():
            path = f"weights[{name!r}]"
            if isinstance(value, torch.Tensor):
                self._check(value, path)
                # Each state_dict() makes new tensors: tied ones are known by the memory that they share. Those without
                # an element share none, whatever their pointers say.
                place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
                if not value.numel() or place not in places:
                    places[place] = self._weight(name, value, path)
                items.append([name, places[place]])
            else:
                items.append([name, self.tree(value, path)])
        return {"OrderedDict": [items, self.tree(getattr(weights, "_metadata", None), "weights._metadata")]}

    def _weight(self, name: str, value: torch.Tensor, path: str) -> Tree:
        # "__metadata__" is the format's own key. Such a weight, or one of an odd type, goes to the other file.
        if value.dtype not in _CODES or not name.isprintable() or name == "__metadata__":
            return self.tree(value, path)
        self.weights[name] = self._taken(value)
        return {"weight": name}

    def tree(self, value: Any, path: str) -> Tree:
        """Return the tree of any value; ``path`` says in an error where in the state it is."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        # Readers of JSON take larger integers for floats, and have no word for NaN and the infinities.
        if kind is int:
            return value if abs(value) < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        # What follows is a dict with one entry, so that nothing of the user's can be taken for it: their dicts are too.
        if kind is complex:
            return {"complex": [self.tree(value.real, path), self.tree(value.imag, path)]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is list:
            return self._list(value, path)
        if kind in _SEQUENCES.values():
            return {kind.__name__: self._list(value, path)}
        if kind in _MAPPINGS.values():
            # A state_dict keeps the versions of its modules in an attribute, by which they read old ones.
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
        # b, i, u, f, c: numbers. An array of objects could be told only by a pickle.
        if kind is np.ndarray and value.dtype.kind in "biufc":
            flat = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {"array": [self._stored(flat), value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        raise CheckpointStateError(path or "state", f"of type {kind.__module__}.{kind.__qualname__}")

    def _list(self, values: Any, path: str) -> list[Tree]:
        return [self.tree(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def _items(self, values: dict[Any, Any], path: str) -> list[list[Tree]]:
        # A list of pairs: JSON's own dicts have only texts for keys, and their order is nobody's promise.
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
        """Return the tree of a tensor whose elements lie in order."""
        if value.dtype in _CODES:
            return {"tensor": self._stored(value)}
        flat = _bytes(value)  # to be viewed as its dtype again when it is read
        return {"bits": [self._stored(flat), str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def _stored(self, value: torch.Tensor) -> str:
        """Put a tensor among the others and return its name."""
        name = str(len(self.others))
        self.others[name] = self._taken(value)
        return name

    def _taken(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a copy of it in the host's memory."""
        value = value.detach()
        return torch.empty(value.shape, dtype=value.dtype).copy_(value) if self._copy else value

    def _check(self, value: torch.Tensor, path: str) -> None:
        # A subclass may mean something else by the same elements: a quantised tensor, a shard of one.
        kind = type(value)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointStateError(path, f"a tensor of type {kind.__module__}.{kind.__qualname__}")
        if value.layout != torch.strided:
            raise CheckpointStateError(path, f"a tensor of layout {value.layout}", "Keep its to_dense().")
        if value.is_meta or value.dtype not in _DTYPES.values():
            raise CheckpointStateError(path, f"a tensor of {value.dtype} on {value.device}")


class _Unpacker:
    """The state of one ``unpack``; nothing in a tree can name code but the few kinds that have a method here."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._known: dict[str, torch.Tensor] = {}

    def value(self, tree: Tree) -> Any:
        """Return what a tree stands for."""
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()  # one entry, else pack has not made it
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in content)
        if kind in _MAPPINGS:
            items, extra = content  # extra: the attribute _metadata of a state_dict
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
        """Return one object for each name, so that what was shared is shared again."""
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
    """Write a new safetensors file, to the disk; return its number of bytes and their SHA-256.

    ``safetensors.torch.save_file`` does not do: it wants all tensors on the host and contiguous at once, and hides the
    number of an OSError. One tensor at a time is in memory here.

    Raises:
        OSError: it cannot be written.
    """
    # Aligned, as long as wider elements come first and the header's length is a multiple of 8.
    # The name decides among equals, so that the same state makes the same bytes.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)
    return write_durably(path, _parts(head, [tensor for _, tensor in ordered]))


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, to the disk; return its number of bytes and their SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    # "x" follows no link and writes over nothing.
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def read(path: Path) -> Tensors:
    """Return the tensors of a safetensors file, mapped into memory.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is not such a file.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _parts(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the file piece by piece: the header with its length before it, and each tensor in chunks."""
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors:
        data = memoryview(_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, its elements one after the other, with nothing left to be conjugated or negated."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may count as contiguous with any stride, which a view as bytes would refuse.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
