"""What an optimizer of another library keeps on itself, beside ``state`` and ``param_groups``: saved, or announced."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from autoaccum._kinds import below, refuse, shown
from autoaccum.errors import CheckpointStateError
from autoaccum.runs.states import pack
from autoaccum.window.modules import State, beside
from autoaccum.window.optimizers import is_pytorchs
from autoaccum.window.stepping import OF_TORCH, Places


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

    def check(self, state: Any, entry: str) -> None:
        """Check what ``load_state_dict`` is to put back.

        Raises:
            CheckpointCorruptError: it would take the place of a method, or of what PyTorch keeps there.
        """
        if type(state) is not dict:
            refuse(entry, f"is {shown(state)}, not a dict")
        for name in state:
            path, _, attribute = name.rpartition(".") if type(name) is str else ("", "", None)
            one = self._of.get(path and f"{path}.")
            if attribute is None or one is None or not one.may_have(attribute):
                refuse(below(entry, name), "is no attribute of the optimizer's own")

    def load_state_dict(self, state: State) -> None:
        """Put back what ``state_dict`` returned."""
        moved: dict[tuple[int, torch.device], torch.Tensor] = {}
        for name, value in state.items():
            path, _, attribute = name.rpartition(".")
            self._of[path and f"{path}."].put_back(attribute, value, moved)


def with_wrapped(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer, and those that it wraps, by what stands before their attributes: "", "inner.", "all[0]."."""
    found: dict[str, torch.optim.Optimizer] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", optimizer)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            before = f"{path}." if path else ""
            found[before] = value
            waiting += [(before + name, kept) for name, kept in vars(value).items() if name not in OF_TORCH]
        elif isinstance(value, dict | list | tuple):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key!r}]", entry) for key, entry in entries]
    return found


class _OfOne:
    """The attributes of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, apart: set[int]) -> None:
        self._optimizer = optimizer
        self._apart = apart
        self._before = {name: (places := self._places(name), places.marks()) for name in self._names()}
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

    def _places(self, name: str) -> Places:
        found, own = Places(), vars(self._optimizer)
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
            packed = pack({}, value)
        except CheckpointStateError:
            return False
        places = {p.untyped_storage()._cdata for p in parameters if p.layout is torch.strided}
        return all(tensor.untyped_storage()._cdata not in places for tensor in packed.others.values())

    def state_dict(self) -> State:
        """Return those that a checkpoint can hold."""
        own = vars(self._optimizer)
        return {name: own[name] for name in self._names() if self._is_kept(own[name])}

    def lost(self) -> list[str]:
        """Return the names of those that steps have changed, and that no checkpoint holds."""
        kept, found = self.state_dict(), []
        kind = type(self._optimizer)
        of_state = [inspect.unwrap(method).__code__.co_names for method in (kind.state_dict, kind.load_state_dict)]
        for name in self._names():
            # What the optimizer's own methods both name is in its state_dict, in a form of its own.
            if name not in kept and not all(name in names for names in of_state):
                before = self._before.get(name)
                if before is None or before[0].differ(self._places(name), before[1]):
                    found.append(name)
        return found

    def may_have(self, name: str) -> bool:
        """Return whether an attribute may be put back: neither a method, nor what PyTorch keeps there."""
        # A plain default of the class, count = 0, is no method: a step may write to the instance's own.
        return name not in OF_TORCH and not hasattr(getattr(type(self._optimizer), name, 0), "__get__")

    def put_back(self, name: str, value: Any, moved: dict[tuple[int, torch.device], torch.Tensor]) -> None:
        """Put one back."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = vars(self._optimizer)
        there = own.get(name)
        like = there if isinstance(there, torch.Tensor) else parameters[0]
        own[name] = beside(like, value, {}, moved) if parameters else value


def _has_key(value: Any, keys: set[int]) -> bool:
    if isinstance(value, dict):
        return any(type(key) is int and key in keys for key in value) or _has_key(list(value.values()), keys)
    return isinstance(value, list | tuple) and any(_has_key(entry, keys) for entry in value)
