"""Finds what functions of the user's hold beside their arguments: modules, tensors, lists, objects with attributes.

A training_step may use a projection head, a queue or a counter that no argument passes. They hang on it by a closure,
by a global name, by the arguments of a partial or by the object whose method it is.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.window.attributes import CONTAINERS

_DEEPEST = 4
"""Steps from a function to what it holds: functions that it calls hold things too, but not for ever."""
# Objects of these packages are tools, or would lead to all there is: an optimizer to its parameters, a logger to files.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "autoaccum", "_pytest", "pytest"}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (int, float, complex, str, bool, type(None))
_DATA = (
    *_PLAIN, *CONTAINERS, tuple, bytes, torch.Tensor, nn.Module, torch.dtype, torch.device, np.ndarray, np.generic,
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, *_GENERATORS,
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

    def are(self, other: Surroundings) -> bool:
        """Return whether another search has found the very same things, in the same order."""
        mine, others = (
            [*one.modules, *one.tensors, *one.generators, *one.containers, *one.objects, *one.cells]
            for one in (self, other)
        )
        names = [[(id(namespace), name) for namespace, name in one.names] for one in (self, other)]
        return len(mine) == len(others) and all(map(is_, mine, others)) and names[0] == names[1]


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
    return isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom)


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


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules that lie within no other of them, each once, in their order."""
    given = list(dict.fromkeys(modules))
    within = {id(inner) for module in given for inner in module.modules() if inner is not module}
    return [module for module in given if id(module) not in within]
