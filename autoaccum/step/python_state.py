"""Python state beside tensors: attributes of objects, closures and globals, found, remembered and put back.

A training_step may use a projection head, a queue or a counter that no argument passes. They hang on it by a closure,
by a global name, by the arguments of a partial or by the object whose method it is.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""The types of containers whose contents are remembered, exactly: a subclass may mean something else by ``clear``."""
_CONTAINERS = frozenset(CONTAINERS)
_UNCHANGED = frozenset((bool, int, float, str, type(None)))  # what most attributes are
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
        # A forward may change the class itself, as parametrizations do.
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
            if kind in _UNCHANGED:
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
            if type(value) in _UNCHANGED or (name in OWN and isinstance(owner, nn.Module)):
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


_DEEPEST = 4
"""Steps from a function to what it holds: functions that it calls hold things too, but not for ever."""
# Objects of these packages are tools, or would lead to all there is: an optimizer to its parameters, a logger to files.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "autoaccum", "_pytest", "pytest"}
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (int, float, complex, str, bool, type(None))
_DATA = (
    *_PLAIN, *CONTAINERS, tuple, bytes, torch.Tensor, nn.Module, torch.dtype, torch.device, np.ndarray, np.generic,
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, *GENERATORS,
)  # fmt: skip
_MOST_RECORDS = 32
"""Objects that hang together and are still no more than data."""


@dataclass
class Surroundings:
    """What some functions hold; each thing once."""

    modules: list[nn.Module] = field(default_factory=list)
    """Modules, not those that lie within others."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors that belong to no module."""
    compiled: list[Any] = field(default_factory=list)
    """Functions that torch.compile has made."""
    generators: list[Any] = field(default_factory=list)
    """Random generators of the user's own: PyTorch's, NumPy's, Python's."""
    containers: list[Any] = field(default_factory=list)
    """Lists, dicts, sets."""
    objects: list[Any] = field(default_factory=list)
    """Objects with attributes, of classes that no library brings."""
    cells: list[types.CellType] = field(default_factory=list)
    """Variables of enclosing functions."""
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Global variables with a plain value, a tensor, a list, a dict or a set: (namespace, name)."""


def surroundings_of(functions: Iterable[object]) -> Surroundings:
    """Find what functions hold, by what Python shows of them: nothing is called."""
    found = Surroundings()
    seen: set[object] = set()
    stack: list[tuple[Any, int]] = [(function, 0) for function in functions]
    while stack:
        thing, depth = stack.pop()
        # Bound methods are made anew whenever they are asked for.
        key = (id(thing.__func__), id(thing.__self__)) if isinstance(thing, types.MethodType) else id(thing)
        if isinstance(thing, _PLAIN) or key in seen or depth > _DEEPEST:
            continue
        seen.add(key)
        # What we wrap functions in is no step of the user's.
        is_ours = isinstance(thing, types.FunctionType) and (thing.__module__ or "").startswith("autoaccum.")
        stack.extend((held, depth + (not is_ours)) for held in _held_by(thing, found))
    return found


def is_generator(thing: object) -> bool:
    """Return whether a thing draws random numbers by a state that can be put back."""
    return isinstance(thing, GENERATORS) and not isinstance(thing, random.SystemRandom)


def _held_by(thing: Any, found: Surroundings) -> list[Any]:
    """Note a thing where it is one of those looked for, and return what it holds."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__, *_methods_called_by(thing)]
    if isinstance(thing, types.FunctionType) and hasattr(thing, "get_compiler_config"):
        found.compiled.append(thing)
        return [getattr(thing, "__wrapped__", None)]  # what else it holds is PyTorch's
    if isinstance(thing, types.FunctionType):
        return _held_by_function(thing, found)
    if isinstance(thing, nn.Module):
        # One without numbers, called by torch.func.functional_call, is a recipe and no model.
        if not any(tensor.is_meta for tensor in thing.parameters()):
            found.modules.append(thing)
        return [value for value in vars(thing).values() if is_generator(value)]
    if isinstance(thing, torch.Tensor):
        found.tensors.append(thing)
    elif is_generator(thing):
        found.generators.append(thing)
    elif type(thing) in CONTAINERS:
        found.containers.append(thing)
        # What is long is data, or a record of what was: its entries are not looked into.
        if len(thing) <= 100:
            return list(thing.values() if isinstance(thing, dict) else thing)
    elif isinstance(thing, tuple) and len(thing) <= 100:
        return list(thing)
    elif _is_of_user(thing):
        found.objects.append(thing)
        return list(vars(thing).values())
    return []


def _methods_called_by(method: types.MethodType) -> list[types.MethodType]:
    """Return the methods of the same object that a method of the user's names."""
    function = method.__func__
    if not isinstance(function, types.FunctionType) or _is_foreign(function.__module__):
        return []
    named = [getattr(type(method.__self__), name, None) for name in function.__code__.co_names]
    return [types.MethodType(one, method.__self__) for one in named if isinstance(one, types.FunctionType)]


def _held_by_function(function: types.FunctionType, found: Surroundings) -> list[Any]:
    """Return what a function holds: defaults, variables of enclosing functions, globals that it names."""
    held = list(function.__defaults__ or ()) + list((function.__kwdefaults__ or {}).values())
    if vars(function):  # step.calls += 1
        held.append(vars(function))
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
        found.cells.append(cell)
    # A wrapper of ours leads to the user's function by its closure; its globals are our own.
    if not _is_foreign(function.__module__):
        for name in function.__code__.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                held.append(value)
                # What such a name stands for may be another thing after each call: total = total + loss.detach().
                if isinstance(value, (*_PLAIN, torch.Tensor)) or type(value) in CONTAINERS:
                    found.names.append((function.__globals__, name))
    return held


def _is_of_user(thing: Any) -> bool:
    is_code = isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType)
    is_bare = isinstance(thing, types.SimpleNamespace | argparse.Namespace)
    return not is_code and hasattr(thing, "__dict__") and (is_bare or not _is_foreign(type(thing).__module__))


def _is_foreign(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _FOREIGN - {"__main__"}


def records_among(values: Iterable[Any]) -> list[Any]:
    """Return the objects among values, and within these, that are no more than data: a meter, a cache, a configuration.

    What does something by itself (a logger, a trainer, whatever holds a lock or a file) is left alone: its attributes
    may be another thread's.
    """
    found: dict[int, Any] = {}
    for value in values:
        within: dict[int, Any] = {}
        if not isinstance(value, nn.Module) and _is_record(value, within):
            found |= within
    return list(found.values())


def _is_record(thing: Any, within: dict[int, Any]) -> bool:
    if id(thing) in within:
        return True
    # By the type at first: to ask an object without attributes of its own for them may run code of the user's.
    if not type(thing).__dictoffset__ or not _is_of_user(thing) or len(within) == _MOST_RECORDS:
        return False
    within[id(thing)] = thing
    return all(isinstance(value, _DATA) or _is_record(value, within) for value in vars(thing).values())


_ABSENT = object()


class Outside:
    """What a forward may change that lies in no tensor: attributes, variables of functions and what functions hold."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        functions: Iterable[object],
        objects: Iterable[Any] = (),
        *,
        with_modules: bool = True,
    ) -> None:
        """Remember it as it is now, with the attributes of other objects, and of the modules that functions hold."""
        held = surroundings_of(functions)
        self.generators = held.generators
        within = [*modules, *(held.modules if with_modules else ())]
        layers = {id(layer): layer for module in within for layer in module.modules()}
        self._attributes = Attributes([*layers.values(), *held.objects, *objects], held.containers)
        self._cells = [(cell, cell.cell_contents) for cell in held.cells]
        self._names = [(namespace, name, namespace[name]) for namespace, name in held.names]

    def has_changed(self) -> bool:
        """Return whether anything of it is another object now."""
        return (
            self._attributes.have_changed()
            or any(contents_of(cell) is not contents for cell, contents in self._cells)
            or any(namespace.get(name, _ABSENT) is not value for namespace, name, value in self._names)
        )

    def restore(self) -> None:
        """Put it back."""
        if self._attributes.have_changed():
            self._attributes.restore()
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._names:
            namespace[name] = value


def functions_run(modules: Iterable[nn.Module], functions: Iterable[object]) -> list[object]:
    """Return the functions that a forward may run: these, the hooks of layers, and their forwards.

    A hook of a layer within a block is run once more with it, and may count or collect; and so may a forward, in what
    is no attribute of its module.
    """
    layers = [layer for module in modules for layer in module.modules()]
    hooks = [hook for layer in layers for held in hooks_of(layer) for hook in held.values()]
    forwards = {type(layer): layer.forward for layer in layers if "forward" not in vars(layer)}
    own = [vars(layer)["forward"] for layer in layers if "forward" in vars(layer)]
    return [*functions, *hooks, *forwards.values(), *own]


def hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the hooks around the forward of a layer, by numbers that none of them shares."""
    return layer._forward_pre_hooks, layer._forward_hooks


def contents_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function, which may have been deleted."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
