"""The key of past trials: a short text of all that decides what a micro-batch costs.

Runs that share it cost the same, as far as their arguments tell.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.data import batches
from autoaccum.memory.devices import memory_of
from autoaccum.runs.past import FORMAT

# Attributes that all modules have: hooks, buffers, submodules. They say nothing of a cost that is not read elsewhere,
# and hooks are numbered by how many were made before in the process.
_MACHINERY = frozenset(vars(nn.Module()))
# Texts of objects have their addresses in them, which differ from process to process.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_LARGEST_CONTAINER = 64
"""Enter lists, sets and mappings of at most so many entries: a vocabulary in an attribute is not a switch."""


def key(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    precision: str,
    batch: Any,
    device: torch.device,
    compiled: bool,
    differ_in_length: bool = False,
    functions: Iterable[Callable[..., Any] | None] = (),
) -> str:
    """Return a digest of 32 hexadecimal digits, the same in every process.

    Weights, the learning rate, the seed and the limit do not count, nor does the code of functions.

    Args:
        modules: the model, and the loss if it is one too; built, and in the modes that they train in.
        optimizer: over their parameters.
        precision: of forwards.
        batch: any pytree; of its rows only the shape of one sample counts.
        device: where to compute.
        compiled: whether the model runs through torch.compile.
        differ_in_length: whether samples do, so that their shapes do not count.
        functions: what computes the loss; of one that is no module the name counts.
    """
    facts = {
        "format": FORMAT,
        "torch": torch.__version__,
        "modules": [_module(module) for module in modules],
        "functions": [_plain(function, 0) for function in functions],
        "optimizer": _optimizer(optimizer),
        "precision": precision,
        "compiled": compiled,
        "batch": _batch(batch, differ_in_length),
        "device": [describe(device), _size(device), type(memory_of(device)).__name__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def describe(device: torch.device) -> str:
    """Return the device's type and name, for people.

    >>> describe(torch.device("cpu")).split()[0]
    'cpu'
    """
    properties = _properties(device)
    return f"{device.type} {platform.machine() if properties is None else properties.name}"


def _size(device: torch.device) -> int:
    """Return the bytes of an accelerator, or the threads of the host.

    The host's memory is seldom all one's own, while its threads decide how fast it is.
    """
    properties = _properties(device)
    return torch.get_num_threads() if properties is None else int(properties.total_memory)


def _properties(device: torch.device) -> Any:
    """Return what the device says of itself; None for the host, and for Apple's GPU, which is a part of it."""
    return None if device.type in ("cpu", "mps") else torch.get_device_module(device).get_device_properties(device)


def _module(root: nn.Module) -> list[Any]:
    """Return the shapes and types of a module's tensors, and what each of its layers says of itself."""
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for named in (root.named_parameters(), root.named_buffers())
        for name, tensor in named
    ]
    layers = [
        [name, _name(type(layer)), layer.training, _ADDRESS.sub("", layer.extra_repr()), _attributes(layer)]
        for name, layer in root.named_modules()
    ]
    return [tensors, layers]


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's own attributes.

    Switches such as gradient checkpointing, or an activation function, stand there or in a config that is one of them.
    """
    return {name: _plain(value, 2) for name, value in vars(layer).items() if name not in _MACHINERY}


def _optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return its class, and of each group the shapes of its parameters and its options but the rates."""
    groups = []
    for group in optimizer.param_groups:
        # Schedulers add initial_lr, max_lr and the like.
        options = {name: _plain(value, 1) for name, value in group.items() if not name.endswith(("lr", "params"))}
        groups.append([[list(p.shape) for p in group["params"]], options])
    return [_name(type(optimizer)), groups]


def _batch(batch: Any, differ_in_length: bool) -> list[Any]:
    """Return the structure of a batch, and what one sample of each of its leaves is."""
    leaves, structure = batches.flatten(batch)
    return [_ADDRESS.sub("", str(structure)), [_leaf(leaf, differ_in_length) for leaf in leaves]]


def _leaf(leaf: Any, differ_in_length: bool) -> list[Any]:
    # Dim 0 is the samples, of which a micro-batch has any number; lengths that differ do not count either.
    if isinstance(leaf, torch.Tensor | np.ndarray):
        shape = leaf.ndim if differ_in_length else list(leaf.shape[1:])
        return [_name(type(leaf)), shape, str(leaf.dtype)]
    return [_name(type(leaf))]


def _plain(value: Any, depth: int) -> Any:
    """Return what a value says about costs, as JSON has it; objects are entered ``depth`` levels deep."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int | float):  # of a rate only whether there is one: without it an operation is left out
        return "a rate" if isinstance(value, float) and value else int(value)
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, partial):
        return _plain(value.func, 0)
    if hasattr(value, "__qualname__"):  # a function, a method, a class
        return _name(value)
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        if not depth or len(value) > _LARGEST_CONTAINER:
            return [_name(type(value)), len(value)]
        if isinstance(value, Mapping):
            return [[_plain(name, 0), _plain(entry, depth - 1)] for name, entry in value.items()]
        entries = [_plain(entry, depth - 1) for entry in value]
        # The order of a set of texts changes from process to process.
        return sorted(entries, key=repr) if isinstance(value, set | frozenset) else entries
    # A module in an attribute is only named: the model's own are listed with all that they are made of.
    inner = getattr(value, "__dict__", {}) if depth and not isinstance(value, nn.Module) else {}
    return [_name(type(value)), {str(name): _plain(entry, depth - 1) for name, entry in inner.items()}]


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
