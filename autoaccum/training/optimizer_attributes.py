"""What optimizers keep outside ``state_dict``: their own attributes, and their ``train()`` and ``eval()`` modes."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum
from functools import partial
from io import IOBase
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.data.randomness import bytes_of, generator_state, set_generator_state
from autoaccum.distributed.fsdp import units_of
from autoaccum.errors import ArgumentError, CheckpointStateError
from autoaccum.memory.oom import insist
from autoaccum.runs.states import leaves
from autoaccum.step.module_state import OF_TORCH, State, beside, with_wrapped
from autoaccum.step.optimizers import is_pytorchs
from autoaccum.step.python_state import is_generator


class OptimizerAttributes:
    """The attributes of an optimizer, and of those that it wraps, which its ``state_dict`` may leave out."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module] = ()) -> None:
        """Note what they are before the first step.

        Args:
            optimizer: see there.
            modules: those that are trained, whose state is saved apart.
        """
        apart = {id(layer) for module in modules for layer in module.modules()}
        self._of = {path: _OfOne(one, apart) for path, one in with_wrapped(optimizer).items()}

    def empty(self, path: str) -> State:
        """Return the containers that began empty, as they were made, of the optimizer at a path."""
        return self._of[path].empty

    def state_dict(self) -> State:
        """Return those that a checkpoint can hold."""
        return {path + name: value for path, one in self._of.items() for name, value in one.state_dict().items()}

    def lost(self) -> list[str]:
        """Return the names of those that steps have changed, and that no checkpoint holds."""
        return [path + name for path, one in self._of.items() for name in one.lost()]

    def load_state_dict(self, state: State) -> None:
        """Put back what ``state_dict`` returned."""
        moved: dict[tuple[int, torch.device], torch.Tensor] = {}
        for name, value in state.items():
            path, _, attribute = name.rpartition(".")
            self._of[path and f"{path}."].put_back(attribute, value, moved)


class _OfOne:
    """The attributes of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, apart: set[int]) -> None:
        self._optimizer = optimizer
        self._apart = apart
        self._before = {name: (places := self._places(name), _marks(places)) for name in self._names()}
        own, kinds = vars(optimizer), (dict, list, set, deque)
        self.empty = {name: copy(own[name]) for name in self._before if isinstance(own[name], kinds) and not own[name]}
        """Containers that began empty, as they were made."""

    def _names(self) -> list[str]:
        # PyTorch's own keep nothing there that is more than a cache. What one wraps has its own.
        if is_pytorchs(self._optimizer):
            return []
        return [
            name
            for name, value in vars(self._optimizer).items()
            if not (name in OF_TORCH or isinstance(value, torch.optim.Optimizer) or id(value) in self._apart)
        ]

    def _places(self, name: str) -> _Places:
        found, own = _Places(), vars(self._optimizer)
        found.add({name: own[name]}, own)
        # Parameters, and what is kept of each, are saved apart.
        apart: list[Any] = [p for group in self._optimizer.param_groups for p in group["params"]]
        for kept in self._optimizer.state.values():
            apart += kept.values() if isinstance(kept, dict) else [kept]
        found.leave_out({id(tensor) for tensor in apart})
        return found

    def _is_kept(self, value: Any) -> bool:
        """Return whether a checkpoint can hold a value: neither parameters themselves, nor anything by their ids."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if _has_key(value, {id(p) for p in parameters}):
            return False
        try:
            found = [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
        except (CheckpointStateError, RecursionError):
            return False
        places = {p.untyped_storage()._cdata for p in parameters if p.layout is torch.strided}
        return all(tensor.untyped_storage()._cdata not in places for tensor in found)

    def state_dict(self) -> State:
        """Return those that a checkpoint can hold."""
        own = vars(self._optimizer)
        found = {name: generator_state(own[name]) if self.generator(name) else own[name] for name in self._names()}
        return {name: value for name, value in found.items() if self._is_kept(value)}

    def generator(self, name: str) -> Any:
        """Return the attribute where it is a random generator, of which the state is saved."""
        value = vars(self._optimizer).get(name)
        return value if is_generator(value) else None

    def lost(self) -> list[str]:
        """Return the names of those that steps have changed, and that no checkpoint holds."""
        kept, found = self.state_dict(), []
        kind = type(self._optimizer)
        of_state = [inspect.unwrap(method).__code__.co_names for method in (kind.state_dict, kind.load_state_dict)]
        for name in self._names():
            # What the optimizer's own methods both name is in its state_dict, in a form of its own.
            if name not in kept and not all(name in names for names in of_state):
                before = self._before.get(name)
                now = self._places(name)
                is_other = before is None or before[0].differ(now, before[1][0]) or _marks(now)[1] != before[1][1]
                if is_other or now.has_iterators:
                    found.append(name)
        return found

    def put_back(self, name: str, value: Any, moved: dict[tuple[int, torch.device], torch.Tensor]) -> None:
        """Put one back."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = vars(self._optimizer)
        if (generator := self.generator(name)) is not None:
            set_generator_state(generator, value)
            return
        there = own.get(name)
        like = there if isinstance(there, torch.Tensor) else parameters[0]
        own[name] = beside(like, value, {}, moved) if parameters else value


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


class _Places:
    """Where an optimizer keeps what its steps write."""

    def __init__(self) -> None:
        """Begin with none."""
        self.has_iterators = False
        """Whether there are iterators that have not ended, such as ``itertools.count``: only the next entry tells."""
        self.generators: list[Any] = []
        """Random generators."""
        # Weakly, for a step that puts another tensor in place of one is to find the old one's memory free.
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._plain: list[tuple[Any, Any]] = []  # containers or objects, and where in them a plain value is
        self._seen: set[int] = set()  # of containers and objects

    def add(self, values: Any, container: Any) -> None:
        """Find the tensors and the plain values below ``values``, which lie in the container under the same keys."""
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, torch.Tensor):
                self._tensors.append(weakref.ref(value))
            elif _is_value(value):
                self._plain.append((container, key))
            elif isinstance(value, _CONTAINERS):
                self.add(value, value)
            elif is_generator(value):
                self.generators.append(value)
            elif _is_looked_into(value):
                own = getattr(value, "__dict__", {})
                self.add(own, own)
                self.add(_slots_of(value), value)
            elif isinstance(value, FunctionType):
                for cell in filter(_holds_values, value.__closure__ or ()):
                    self.add({"cell_contents": cell.cell_contents}, cell)
            elif not isinstance(value, _CODE):
                has_ended = getattr(value, "gi_frame", value) is None
                self.has_iterators |= isinstance(value, Iterator) and not (has_ended or isinstance(value, IOBase))

    def leave_out(self, tensors: set[int]) -> None:
        """Forget tensors, by their ids."""
        self._tensors = [ref for ref in self._tensors if id(ref()) not in tensors]

    def differ(self, now: _Places, before: tuple[list[int | None], list[Any]]) -> bool:
        """Return whether anything was written, as far as it shows."""
        # A tensor in place of another one is a write too.
        return not self._is_same(now) or now.marks() != before

    def _is_same(self, other: _Places) -> bool:
        """Return whether both have found the same tensors, and as many plain values."""
        if len(self._tensors) != len(other._tensors) or len(self._plain) != len(other._plain):
            return False
        return all(mine() is theirs() for mine, theirs in zip(self._tensors, other._tensors, strict=True))

    def marks(self) -> tuple[list[int | None], list[Any]]:
        """Return the version counters of the tensors, and the plain values."""
        versions = [None if (tensor := ref()) is None else tensor._version for ref in self._tensors]
        places = self._plain
        return versions, [one[key] if isinstance(one, _CONTAINERS) else getattr(one, key) for one, key in places]


def _is_value(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_value, value))
    return type(value) in _PLAIN or isinstance(value, Enum | np.generic)


_CONTAINERS = (dict, list, tuple, deque)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial, logging.Logger)
"""What no step writes to."""


def _is_looked_into(value: Any) -> bool:
    """Return whether an object's attributes are all that it keeps, as far as anybody can tell."""
    if isinstance(value, _CODE) or not (hasattr(value, "__dict__") or _slots_of(value)):
        return False
    is_tools = type(value).__module__.partition(".")[0] in {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
    return not is_tools or isinstance(value, torch.optim.Optimizer | nn.Module)


def _slots_of(thing: Any) -> dict[str, Any]:
    """Return what an object holds in slots."""
    kinds = [vars(kind) for kind in type(thing).__mro__ if "__slots__" in vars(kind)]
    names = [name for kind in kinds for name, member in kind.items() if isinstance(member, MemberDescriptorType)]
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def _holds_values(cell: CellType) -> bool:
    """Return whether a variable of a closure is a number, a text, a tensor, or a container of these."""
    try:
        held = cell.cell_contents
    except ValueError:  # it has none yet
        return False
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, list | deque) else [held]
    return all(isinstance(one, torch.Tensor) or _is_value(one) for one in inside)


def _marks(places: _Places) -> tuple[Any, list[bytes]]:
    return places.marks(), [bytes_of(generator) for generator in places.generators]


def _has_key(value: Any, keys: set[int]) -> bool:
    if isinstance(value, dict):
        return any(type(key) is int and key in keys for key in value) or _has_key(list(value.values()), keys)
    return isinstance(value, list | tuple) and any(_has_key(entry, keys) for entry in value)


_EVALUATING: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those that were put into their mode for evaluation."""


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the model is to be evaluated after ``optimizer.eval()`` alone, as of schedule-free ones."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def refuse_sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has modes, over a model of which no rank has all.

    Raises:
        ArgumentError: it is one.
    """
    if has_modes(optimizer) and units_of(model):
        cure = "Its checkpoints would need two sets of weights: take another optimizer, or do not call fully_shard."
        raise ArgumentError("optimizer", type(optimizer).__name__, "one without train() and eval()", cure)


def into_training(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer that has modes into that for training.

    Raises:
        ArgumentError: it only hands on its train(), to an optimizer that has none.
    """
    if has_modes(optimizer):
        try:
            optimizer.train()  # type: ignore[attr-defined]
        except AttributeError as error:
            cure = f"It raised {error!r}. Have it wrap one with train() and eval(), or step it in a loop of your own."
            raise ArgumentError(
                "optimizer", type(optimizer).__name__, "one whose train() can be called", cure
            ) from error
        _EVALUATING.discard(optimizer)


def into_evaluation(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer that has modes into that for evaluation, for good: the model has the weights that count."""
    if has_modes(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]
        _EVALUATING.add(optimizer)


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the model use the weights that the optimizer is about; those that it steps on are put back, to the bit."""
    if not has_modes(optimizer) or optimizer in _EVALUATING:
        yield
        return
    # Modes change weights by arithmetic, there and back, which rounds.
    parameters = parameters_of(optimizer)
    kept = insist(partial(_on_host, parameters), "the weights that an optimizer steps on were copied to the host")
    try:
        into_evaluation(optimizer)
        yield
    finally:
        into_training(optimizer)
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                insist(partial(p.copy_, value), "the weights that an optimizer steps on were put back")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def evaluated_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a model's state_dict with the weights that the optimizer is about: copies on the host, if it has modes."""
    if not has_modes(optimizer) or optimizer in _EVALUATING:
        return model.state_dict()
    with evaluating(optimizer):
        found: dict[str, Any] = model.state_dict(keep_vars=True)
        copies: dict[int, Any] = {}  # what is tied stays so
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and id(value) not in copies:
                copies[id(value)] = insist(partial(_on_host, [value]), "weights were copied to the host")[0]
            found[name] = copies.get(id(value), value)
    return found


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
