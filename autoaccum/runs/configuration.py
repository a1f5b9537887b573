"""Plain values of what was asked of a run, for its directory, and the names of those that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoaccum.distributed.fsdp import class_of
from autoaccum.planning.schedule_kinds import Schedule

ONLY_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of optimizers that decide how a step is computed, which may depend on the device, and not what comes of it.
A run may go on with others, so they are left out."""
PARAMETERS = "recipe parameters"
"""What a recipe was called with, where that differs from its defaults; left out where nothing does."""
_LONGEST_SHOWN = 8
"""Write out a list, tuple or dict of at most so many entries."""


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return what tells one model from another: its class, the shapes and types it begins with, and what is frozen."""
    found: dict[str, Any] = {"class": class_of(model).__name__}  # a run may go on with a model that is sharded, or not
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        found[name] = f"{_type_and_shape(parameter)}{frozen}"
    for name, buffer in model.named_buffers():
        found[name] = f"buffer {_type_and_shape(buffer)}"
    return found


def _type_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return its class, and of each group how many parameters it has and what decides what they become."""
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = {}
        for name, value in group.items():
            # What is off is left out, for that is what options of a later PyTorch will be: a run that was begun
            # without them may go on.
            if name in ("params", *ONLY_HOW) or value is None or value is False:
                continue
            is_number = isinstance(value, torch.Tensor) and value.numel() == 1  # an lr may be given as a tensor
            options[name] = value.item() if is_number else value
        found[f"group {number}"] = {"parameters": len(group["params"]), **plain(options)}
    return found


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as JSON can hold them: what it cannot hold, as a text."""
    found = {}
    for name, value in values.items():
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
            value = value.item()  # a number or a flag of NumPy's is the one of Python that it stands for
        # A member of an IntEnum, or of a StrEnum, is the number or the text that it stands for.
        kinds: dict[type, Callable[[Any], Any]] = {bool: bool, int: int, float: float, str: str.__str__}
        as_plain = next((made for kind, made in kinds.items() if isinstance(value, kind)), text_of)
        found[name] = None if value is None else as_plain(value)
    return found


def text_of(value: Any) -> str:
    """Return a text by which a person recognises the value.

    It has no address in memory and no other detail that changes from one process to the next: it is compared.

    >>> text_of(len), text_of((0.9, 0.999)), text_of([(3, 3, 2)]), text_of(object()), text_of({"a": len, "b": [1]})
    ('len', '(0.9, 0.999)', 'list of 1', 'object', "{'a': len, 'b': [1]}")
    """
    if isinstance(value, Schedule | torch.device):
        return str(value)
    if isinstance(value, dict) and len(value) <= _LONGEST_SHOWN:  # of tensors, say, or of functions
        return "{" + ", ".join(f"{name!r}: {_entry(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, tuple | list | dict):
        if len(value) <= _LONGEST_SHOWN and all(isinstance(entry, bool | int | float | str) for entry in value):
            return str(value)
        return f"{type(value).__name__} of {len(value)}"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _entry(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else text_of(value)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield ``name: before -> now`` for each entry that differs, entries of nested mappings among them.

    >>> list(differing({"seed": 0, "data": {"samples": 5}}, {"seed": 0, "data": {"samples": 6}}))
    ['data samples: 5 -> 6']
    """
    # In the order in which they were first written, those that are new last: a set would shuffle the message.
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        path = f"{name} {key}".strip()
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, path)
        elif old != new:
            yield f"{path}: {'nothing' if old is None else old} -> {'nothing' if new is None else new}"
