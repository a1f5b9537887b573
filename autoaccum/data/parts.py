"""Looks into the objects that data are made of: loaders, samplers, generators, whatever holds them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST = 2000
"""Objects that are looked at."""
_LONGEST = 64
"""Entries of a list or a dict that is made of parts; longer ones are data."""
_WITHOUT_PARTS = (
    str, bytes, int, float, complex, type(None), type, torch.Tensor, np.ndarray, nn.Module, ModuleType, FunctionType,
    BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def parts_of(*things: Any) -> Iterator[Any]:
    """Yield objects and all that they hold in attributes, short lists and dicts, each once, the outer ones first."""
    pending, seen = deque(things), set[int]()
    while pending and len(seen) < _MOST:
        part = pending.popleft()
        if id(part) in seen or isinstance(part, _WITHOUT_PARTS):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, GENERATORS):
            continue
        if isinstance(part, Mapping | list | tuple):
            if type(part) in (dict, list, tuple) and len(part) <= _LONGEST:
                pending.extend(part.values() if isinstance(part, dict) else part)
        elif isinstance(part, MethodType):
            pending.append(part.__self__)
        # What iterates may hold its state in slots; the objects of data do not, and properties may do anything.
        pending.extend(getattr(part, "__dict__", {}).values())


def generators_of(*things: Any) -> list[Any]:
    """Return the random generators that objects hold; not those of the operating system, which have no state."""
    found = [part for part in parts_of(*things) if isinstance(part, GENERATORS)]
    return [generator for generator in found if not isinstance(generator, random.SystemRandom)]


def set_epoch(epoch: int, *things: Any) -> None:
    """Tell the epoch to whatever wishes to know it, as a loop of the user's would: each object once."""
    told = set[int]()
    for thing in things:
        if id(thing) not in told and callable(getattr(thing, "set_epoch", None)):
            told.add(id(thing))
            thing.set_epoch(epoch)
