"""The attributes of objects, remembered and put back: counters, caches, hooks, their very class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""The types of containers whose contents are remembered, exactly: a subclass may mean something else by ``clear``."""
_CONTAINERS = frozenset(CONTAINERS)
_PLAIN = frozenset((bool, int, float, str, type(None)))  # what most attributes are
_values_of = methodcaller("values")
_LARGEST_BYTES = 2**26
"""Bytes of a NumPy array whose values are remembered: what is larger is data."""


class Attributes:
    """Classes and attributes of objects, with what the containers among these hold, as they were when it was made.

    Containers are put back in place, for others hold them: the handle of a hook has a weak reference to the dict that
    the hook is in. Tensors are remembered, their values are not; of NumPy arrays both are.
    """

    def __init__(self, objects: Iterable[Any], containers: Iterable[Any] = ()) -> None:
        """Remember the attributes of these objects now, and what these containers hold."""
        # A forward may change the class itself: a lazy layer becomes an ordinary one.
        self._classes = [(owner, type(owner)) for owner in objects]
        # (container, a copy of it) by the container's id, which the container that is held here keeps unique.
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._looked_for: _Contents | None = None  # made when it is first asked for
        # The attributes themselves are a dict: it is remembered like those that lie in it. Not by recursion, for lists
        # may hold themselves or be nested deeply.
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[tuple[Any, Any]] = []
        found: list[Any] = [vars(owner) for owner, _ in self._classes]
        found.extend(containers)
        # This runs in windows, over some twenty attributes of each module: what is told by its type alone comes first.
        while found:
            thing = found.pop()
            kind = type(thing)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS:
                if id(thing) not in self._contents:
                    self._contents[id(thing)] = (thing, thing.copy())
                    found.extend(thing.values() if isinstance(thing, dict) else thing)
            elif isinstance(thing, torch.Tensor):
                self._tensors.append(thing)
            elif kind is np.ndarray and thing.dtype.kind in "biufc" and thing.nbytes <= _LARGEST_BYTES:
                self._arrays.append((thing, thing.copy()))
            elif isinstance(thing, tuple):
                self._tensors.extend(one for one in thing if isinstance(one, torch.Tensor))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among what is remembered."""
        return self._tensors

    def have_changed(self) -> bool:
        """Return whether an attribute, what a container or an array holds, or a class is another one now."""
        if self._looked_for is None:
            self._looked_for = _Contents(self._classes, self._contents.values())
        if not self._looked_for.are_the_same():
            return True
        return not all(np.array_equal(array, values, equal_nan=True) for array, values in self._arrays)

    def restore(self) -> None:
        """Put everything back; it may be done again."""
        for owner, kind in self._classes:
            if type(owner) is not kind:
                owner.__class__ = kind
        for container, contents in self._contents.values():
            container.clear()
            if isinstance(container, list | deque):
                container.extend(contents)
            else:
                container.update(contents)
        for array, values in self._arrays:
            array[...] = values


class _Contents:
    """What containers hold and what objects are, laid out to be compared without a loop of Python's.

    It is looked at twice for each block whose forward is computed again, some twenty attributes of each of its layers.
    """

    def __init__(self, classes: Iterable[tuple[Any, type]], contents: Iterable[tuple[Any, Any]]) -> None:
        self._owners, self._classes = [owner for owner, _ in classes], [kind for _, kind in classes]
        held = list(contents)
        # Most of a module's are empty, such as those of hooks that nobody has registered.
        self._empty = [container for container, copy in held if not copy]
        # The copy of a set may have another order than the set, and so may the set once it is put back.
        self._sets = [(container, set(map(id, copy))) for container, copy in held if copy and type(copy) is set]
        full = [(container, copy) for container, copy in held if copy and type(copy) is not set]
        self._full, self._lengths = [container for container, _ in full], [len(copy) for _, copy in full]
        self._entries = [entry for _, copy in full for entry in copy]
        dicts = [(container, copy) for container, copy in full if isinstance(container, dict)]
        self._dicts, self._values = [one for one, _ in dicts], [value for _, copy in dicts for value in copy.values()]

    def are_the_same(self) -> bool:
        """Return whether all hold the very objects that they held, sets in any order, and are of the same classes."""
        return (
            all(map(is_, map(type, self._owners), self._classes))
            and not any(self._empty)
            and all(set(map(id, container)) == entries for container, entries in self._sets)
            and list(map(len, self._full)) == self._lengths
            and all(map(is_, chain.from_iterable(self._full), self._entries))
            and all(map(is_, chain.from_iterable(map(_values_of, self._dicts)), self._values))
        )


class StandIn:
    """A forward that stands in place of a module's own while a window runs, and computes the same."""


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of the tensor share memory, so that nothing can write to it."""
    if tensor.layout != torch.strided:
        return False
    # A stride of 0 leads from an element to itself; with a size of 1 it leads nowhere.
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def objects_of(layers: Iterable[nn.Module]) -> list[Any]:
    """Return the objects that modules hold besides modules and tensors, and modules in plain containers."""
    found: dict[int, Any] = {}
    known = {id(layer) for layer in layers}
    waiting: list[tuple[Any, int]] = [(layer, 0) for layer in layers]
    while waiting:
        owner, depth = waiting.pop()
        for name, value in vars(owner).items():
            if type(value) in _PLAIN or (name in OWN and isinstance(owner, nn.Module)):
                continue
            inside = value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,)
            for one in inside:
                parts = one.modules() if isinstance(one, nn.Module) else (one,)
                for part in parts:
                    if id(part) not in known and id(part) not in found and has_state(part):
                        found[id(part)] = part
                        if depth < DEEPEST:
                            waiting.append((part, depth + 1))
    return list(found.values())


DEEPEST = 2
"""Objects in objects that are looked into: a module's tracker may hold a meter, and a reference to all the rest."""
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 of one that does not count, as under ``inference_mode``."""
    return 0 if tensor.is_inference() else tensor._version


def has_state(thing: Any) -> bool:
    """Return whether something is an object with attributes, but no function, no class and none of PyTorch's own."""
    if isinstance(thing, torch.Tensor | type) or (callable(thing) and not isinstance(thing, nn.Module)):
        return False
    root = type(thing).__module__.partition(".")[0]
    return isinstance(getattr(thing, "__dict__", None), dict) and (root != "torch" or isinstance(thing, nn.Module))
