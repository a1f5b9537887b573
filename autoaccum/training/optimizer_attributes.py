"""What an optimizer of another library keeps on itself, beside ``state`` and ``param_groups``: saved, or announced."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from autoaccum.data.randomness import bytes_of, generator_state, set_generator_state
from autoaccum.errors import CheckpointStateError
from autoaccum.runs.states import pack
from autoaccum.window.modules import OF_TORCH, State, beside, with_wrapped
from autoaccum.window.optimizers import is_pytorchs
from autoaccum.window.stepping import Places
from autoaccum.window.surroundings import is_generator


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
                if before is None or before[0].differ(now, before[1][0]) or _marks(now)[1] != before[1][1]:
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


def _marks(places: Places) -> tuple[Any, list[bytes]]:
    return places.marks(), [bytes_of(generator) for generator in places.generators]


def _has_key(value: Any, keys: set[int]) -> bool:
    if isinstance(value, dict):
        return any(type(key) is int and key in keys for key in value) or _has_key(list(value.values()), keys)
    return isinstance(value, list | tuple) and any(_has_key(entry, keys) for entry in value)
