"""Weights and a nested state as one JSON tree and tensors, which ``tensor_files`` keeps: no code can be in them.

In the tree, ``null``, booleans, strings, lists, finite floats and ints below 2**63 stand for themselves, and everything
else is ``{kind: content}``, a dict too. Types are restored exactly, or refused when the state is packed. A tensor comes
back on the CPU and detached, one object for each that went in, its dimensions in the same order in memory.

Three kinds name a class: a member of an enum, a named tuple, and a tensor that PyTorch can take apart by
``__tensor_flatten__``. The class has to be there already: nothing is imported, and no constructor is called.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from autoaccum.errors import CheckpointCorruptError, CheckpointStateError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.ranks.units import is_distributed, own_part
from autoaccum.runs import parted, parts
from autoaccum.runs.tensor_files import CODES, Tensors, as_bytes

T = TypeVar("T")
Tree = Any
"""JSON, in which every dict is ``{kind: content}``."""

_AS_BYTES = (torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Dtypes without a code, or with one that older readers do not know: they are written as bytes."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, *_AS_BYTES)}
# Types are told by identity, so that a subclass, which may hold more than its entries, is refused and not flattened.
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {"dict": dict, "list": list, "set": set, "int": int, "float": float}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_KEYS = (type(None), bool, int, float, str, bytes, tuple)
"""Types that a dict's keys may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A state taken apart: what the files hold."""

    tree: Tree
    """The trees of the weights and of the state; they name the tensors."""
    weights: Tensors
    """Tensors of the model by their names in it, as other readers expect them; of tied ones the first."""
    others: Tensors
    """Tensors of the state by numbers, and weights that other readers could not take."""
    arrivals: tuple[torch.Event, ...] = ()
    """Of copies that are under way, one for each device."""
    distributed: dict[str, parts.Parts] = field(default_factory=dict)
    """Tensors that lie on several ranks, by the folders that they are written to."""
    files: parted.Files | None = None
    """Where those lie that were written."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.weights.values(), *self.others.values()))

    def copied(self) -> Packed:
        """Return the same with every tensor copied to the host: the originals may change at once.

        What is on devices arrives later: ``wait`` for it before anything is read.
        """
        weights, others = ({name: _copied(t) for name, t in tensors.items()} for tensors in (self.weights, self.others))
        sources = (*self.weights.values(), *self.others.values())
        # One wait for all: on its stream a device copies behind what it computes now, and before what it computes next.
        streams = [torch.accelerator.current_stream(device) for device in {t.device for t in sources if _is_late(t)}]
        arrivals = tuple(stream.record_event() for stream in streams)
        return Packed(tree=self.tree, weights=weights, others=others, arrivals=arrivals)

    def wait(self) -> None:
        """Wait until the tensors that were copied have arrived."""
        for arrival in self.arrivals:
            arrival.synchronize()


def _is_late(tensor: torch.Tensor) -> bool:
    """Return whether copies of a tensor to the host are made while others go on; MPS waits for each."""
    return tensor.device.type not in ("cpu", "mps")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, pinned where the device can write to it by itself."""
    is_late = _is_late(tensor)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_late)
    return copy.copy_(tensor, non_blocking=is_late)


def pack(weights: Mapping[str, Any], state: Any) -> Packed:
    """Take states apart; their tensors stay where they are.

    Args:
        weights: a model's state_dict.
        state: nested in any way.

    Raises:
        CheckpointStateError: there is something in them that cannot be kept.
    """
    packer = _Packer()
    # A cycle is not looked for: it runs into Python's limit, and so does what nobody nests so deep.
    try:
        tree = {"weights": packer.weights_tree(weights), "state": packer.tree(state, "")}
    except RecursionError:
        raise CheckpointStateError("state", "nested without end, or nearly so") from None
    return Packed(tree=tree, weights=packer.weights, others=packer.others, distributed=packer.parts)


def unpack(packed: Packed) -> tuple[Any, Any]:
    """Return the weights and the state that were packed, in memory of their own.

    Raises:
        CheckpointCorruptError: the tree is not one that ``pack`` made.
    """
    unpacker = _Unpacker(packed)
    try:
        return unpacker.value(packed.tree["weights"]), unpacker.value(packed.tree["state"])
    except CheckpointCorruptError:
        raise
    # Whatever else Python, PyTorch and NumPy refuse: a name of no tensor or of no class that is imported.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        found = repr(error)[:200]
    raise CheckpointCorruptError("", f"makes no sense ({found})", entry="the tree of its state")


class _Packer:
    """The state of one ``pack``."""

    def __init__(self) -> None:
        self.weights: Tensors = {}
        self.others: Tensors = {}
        self.parts: dict[str, parts.Parts] = {}
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
                own = own_part(value)
                place = (value.device, own.data_ptr(), value.dtype, value.shape, value.stride())
                if not own.numel() or place not in places:
                    places[place] = self._weight(name, value, path)
                items.append([name, places[place]])
            else:
                items.append([name, self.tree(value, path)])
        return {"OrderedDict": [items, self.tree(getattr(weights, "_metadata", None), "weights._metadata")]}

    def _weight(self, name: str, value: torch.Tensor, path: str) -> Tree:
        # "__metadata__" is the format's own key. Such a weight, or one of an odd type, goes to the other file.
        is_plain = name.isprintable() and name != "__metadata__"
        if is_distributed(value):
            return self._parted(value, parts.MODEL, name) if is_plain else self.tree(value, path)
        if value.dtype not in CODES or not is_plain or _is_composed(value):
            return self.tree(value, path)
        self.weights[name] = value.detach()
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
        if kind is deque:
            return {"deque": [value.maxlen, self._list(value, path)]}
        if isinstance(value, Enum) and _is_found(kind) and kind.__members__.get(value.name) is value:
            return {"enum": [*_name_of(kind), value.name]}
        if isinstance(value, tuple) and hasattr(kind, "_fields") and _is_found(kind):
            return {"named": [*_name_of(kind), self._list(value, path)]}
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
            inside = f"{path}.{key}".lstrip(".") if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"
            if type(key) not in _KEYS:
                raise CheckpointStateError(path or "state", f"a dict with a key of type {type(key).__qualname__}")
            items.append([self.tree(key, inside), self.tree(value, inside)])
        return items

    def _tensor(self, value: torch.Tensor, path: str) -> Tree:
        if id(value) not in self._known:
            self._check(value, path)
            if is_distributed(value):
                # By where it is first met, which is the same on all ranks.
                self._known[id(value)] = self._parted(value, parts.MOMENTS, path)
                return self._known[id(value)]
            if _is_composed(value):
                self._known[id(value)] = self._composed(value, path)
                return self._known[id(value)]
            # As it lies in memory: kernels may round otherwise where the strides of a moment and its gradient differ.
            order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
            lying = value.permute(order)
            if value.is_contiguous() or not lying.is_contiguous():
                self._known[id(value)] = self._typed(value)
            else:
                self._known[id(value)] = {"permuted": [self._typed(lying), order]}
        return self._known[id(value)]

    def _parted(self, value: torch.Tensor, folder: str, name: str) -> Tree:
        """Return the tree of a tensor that lies on several ranks."""
        self.parts.setdefault(folder, {})[name] = value
        return {"parted": [folder, name, CODES[value.dtype], list(value.shape)]}

    def _composed(self, value: Any, path: str) -> Tree:
        """Return the tree of a tensor that consists of others, such as a quantised one."""
        names, context = value.__tensor_flatten__()
        inner = [[name, self.tree(getattr(value, name), f"{path}.{name}")] for name in names]
        described = [self.tree(context, path), list(value.shape), list(value.stride())]
        # Numbered, so that two tensors of the same values are not taken for one.
        return {"composed": [len(self._known), *_name_of(type(value)), inner, *described]}

    def _typed(self, value: torch.Tensor) -> Tree:
        """Return the tree of a tensor whose elements lie in order."""
        if value.dtype in CODES:
            return {"tensor": self._stored(value)}
        flat = as_bytes(value)  # to be viewed as its dtype again when it is read
        return {"bits": [self._stored(flat), str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def _stored(self, value: torch.Tensor) -> str:
        """Put a tensor among the others and return its name."""
        name = str(len(self.others))
        self.others[name] = value.detach()
        return name

    def _check(self, value: torch.Tensor, path: str) -> None:
        # A subclass may mean something else by the same elements: a quantised tensor, a shard of one.
        kind = type(value)
        if (is_distributed(value) and parts.is_cut(value)) or _is_composed(value):
            return
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
        self._known: dict[str, Any] = {}

    def value(self, tree: Tree) -> Any:
        """Return what a tree stands for."""
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()  # one entry, else pack has not made it
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(content))
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
        return complex(*map(self.value, content))

    def _bytes_value(self, content: str) -> bytes:
        return base64.b64decode(content)

    def _defaultdict_value(self, content: list[Tree]) -> defaultdict[Any, Any]:
        factory, items = content
        return defaultdict(_FACTORIES[factory], self._items(items))

    def _deque_value(self, content: list[Any]) -> deque[Any]:
        most, items = content
        return deque(self.value(items), most)

    def _enum_value(self, content: list[str]) -> Enum:
        module, name, member = content
        return _class_at(module, name, Enum).__members__[member]  # type: ignore[no-any-return]

    def _named_value(self, content: list[Any]) -> Any:
        module, name, items = content
        return _class_at(module, name, tuple)._make(self.value(items))

    def _composed_value(self, content: list[Any]) -> torch.Tensor:
        number, module, name, inner, context, shape, stride = content

        def made() -> torch.Tensor:
            tensors = {key: self.value(tree) for key, tree in inner}
            kind, size = _class_at(module, name, torch.Tensor), torch.Size(shape)
            return kind.__tensor_unflatten__(tensors, self.value(context), size, tuple(stride))  # type: ignore[no-any-return]

        return self._once(f"composed {number}", made)

    def _dtype_value(self, content: str) -> torch.dtype:
        return _DTYPES[content]

    def _device_value(self, content: str) -> torch.device:
        return torch.device(content)

    def _weight_value(self, content: str) -> torch.Tensor:
        return self._once(f"weight {content}", lambda: self._packed.weights[content].clone())

    def _tensor_value(self, content: str) -> torch.Tensor:
        return self._once(f"tensor {content}", lambda: self._packed.others[content].clone())

    def _parted_value(self, content: list[Any]) -> parted.Parted:
        if self._packed.files is None:
            raise ValueError("parts without files")
        files = self._packed.files
        return self._once(f"parted {content}", lambda: parted.Parted(files, *content))

    def _bits_value(self, content: list[Any]) -> torch.Tensor:
        name, dtype, shape = content
        return self._once(
            str(content), lambda: self._packed.others[name].clone().view(_DTYPES[dtype]).reshape(torch.Size(shape))
        )

    def _permuted_value(self, content: list[Any]) -> torch.Tensor:
        stored, order = content
        return self._once(str(content), lambda: torch.permute(self.value(stored), np.argsort(order).tolist()))

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """Return one object for each name, so that what was shared is shared again."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]  # type: ignore[no-any-return]

    def _array_value(self, content: list[Any]) -> np.ndarray[Any, Any]:
        name, dtype, shape = content
        # NumPy itself refuses to make Python objects of bytes.
        return np.frombuffer(self._packed.others[name].numpy().tobytes(), dtype).reshape(shape).copy()

    def _scalar_value(self, content: list[Any]) -> Any:
        dtype, encoded = content
        (found,) = np.frombuffer(base64.b64decode(encoded), dtype)
        return found


def _is_composed(value: torch.Tensor) -> bool:
    """Return whether a tensor of another class says of which tensors it consists, and how it is made of them again."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or is_distributed(value):
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__") and _is_found(kind)


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_found(kind: type) -> bool:
    """Return whether a class is found again by its name: one that a function has made is not."""
    try:
        return attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    except (AttributeError, KeyError):
        return False


def _class_at(module: Any, name: Any, base: type) -> Any:
    """Return a class by its name, where its module was imported by now and it is of the base.

    Raises:
        ValueError: there is none.
    """
    try:
        found = attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        raise ValueError(f"the class {module}.{name}, which is not imported") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{module}.{name}, which is no {base.__name__}")
    return found
