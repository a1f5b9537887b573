"""What forwards change in attributes: put back with a window, and saved with a run.

Counters, queues and their places, running means that are no buffers, the counts of metrics. Which attributes move is
seen in the first windows and at each doubling of their number; the others cost nothing in between.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from autoaccum.window.attributes import CONTAINERS, DEEPEST, OWN, Attributes, has_state, is_expanded, version_of

_SMALL_BYTES = 2**20
"""Bytes of a tensor or an array that is looked at before it is known whether it moves."""
_MOST_ENTRIES = 1000
"""Entries of a container that are looked at: what is longer is a vocabulary, or data."""
_FAR = 3
"""Objects in objects that may lead back to the model: of Lightning a trainer, a connector and a strategy."""
_PLAIN = (type(None), bool, int, float, str)
_DATA = (Dataset, DataLoader, Sampler, Iterator)
_ABSENT = object()


class Moving:
    """The attributes of modules, and of the objects that they hold, as they were when they were taken.

    Data that a model holds are left alone: what was read of them is kept when a window runs again.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Begin with nothing seen to move."""
        self._modules = modules
        self._number = 0
        self._marks: dict[str, tuple[Any, Any]] = {}  # each attribute with a mark of it, when it was last looked
        self._moved: dict[str, tuple[dict[str, Any], str]] = {}  # where what has moved so far lies, by its name
        # What was taken: attributes, what their containers and arrays hold, values of tensors; and all names there are.
        self._taken: list[tuple[dict[str, Any], str, Any]] = []
        self._held = Attributes(())
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.unsaved: list[str] = []
        """The names of what has moved and was not among what ``state_dict`` returned last."""

    def take(self) -> None:
        """Remember the attributes that have been seen to move; in the first windows, and at each doubling, all."""
        self._number += 1
        is_look = self._number & (self._number - 1) == 0
        if not (is_look or self._taken or self._moved):  # as of most models
            return
        places = [(space, key) for _, space, key in self._look()] if is_look else list(self._moved.values())
        self._names = [(space, frozenset(space)) for _, space in self._spaces()] if is_look else []
        self._taken = [(space, key, space.get(key, _ABSENT)) for space, key in places]
        self._held = Attributes((), [[value for _, _, value in self._taken]])
        most = _SMALL_BYTES if is_look else None
        tensors = {id(one): one for one in self._held.tensors() if _is_state(one, most)}
        self._values = [(one, one.detach().clone()) for one in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was remembered; it may be done again."""
        self._held.restore()
        for space, names in self._names:
            for name in space.keys() - names - OWN:
                del space[name]
        for space, key, value in self._taken:
            if value is _ABSENT:
                space.pop(key, None)
            else:
                space[key] = value
        for tensor, value in self._values:
            if tensor.shape != value.shape:
                tensor.data = value.clone()
            else:
                tensor.copy_(value)

    def _look(self) -> list[tuple[str, dict[str, Any], str]]:
        """Note what has moved since it was last looked; return all attributes there are."""
        found = list(self._named())
        marks = {name: (space[key], _mark(space[key])) for name, space, key in found}
        for name, space, key in found:
            before = self._marks.get(name, (None, None))  # one that is new is what a forward has made
            if self._marks and (before[1] != marks[name][1] or _is_other(before[0], space[key])):
                self._moved[name] = space, key
        self._marks = marks
        return found

    def _named(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (name, the dict that holds it, its key there) of each attribute that is not every module's own."""
        for at, space in self._spaces():
            for key in space.keys() - OWN:
                yield f"{at}.{key}", space, key

    def _spaces(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of modules and of the objects that these hold, by name."""
        waiting = [
            (f"{index}.{name}" if name else str(index), vars(layer), 0)
            for index, module in enumerate(self._modules)
            for name, layer in module.named_modules()
        ]
        seen = {id(space) for _, space, _ in waiting}
        layers = {id(layer) for module in self._modules for layer in module.modules()}
        while waiting:
            at, space, depth = waiting.pop()
            yield at, space
            for key, value in space.items() if depth < DEEPEST else ():
                is_part = key not in OWN and has_state(value) and not isinstance(value, _DATA)
                if is_part and id(vars(value)) not in seen and not _holds(value, layers):
                    seen.add(id(vars(value)))
                    waiting.append((f"{at}.{key}", vars(value), depth + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return what has moved, by its names, for a checkpoint."""
        self._look()
        held = {name: space[key] for name, (space, key) in self._moved.items() if key in space}
        # What has a graph is an output of the last forward.
        held = {name: value for name, value in held.items() if not getattr(value, "requires_grad", False)}
        self.unsaved = sorted(name.partition(".")[2] for name, value in held.items() if not _is_saved(value))
        return {name: value for name, value in held.items() if _is_saved(value)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned, where there are such modules and objects."""
        spaces = dict(self._spaces())
        device = next((p.device for module in self._modules for p in module.parameters()), None)
        for name, value in state.items():
            at, _, key = name.rpartition(".")
            if at not in spaces:
                continue
            self._moved[name] = spaces[at], key
            there = spaces[at].get(key)
            if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and value.shape == there.shape:
                there.copy_(value)  # in place, for others may hold it
            else:
                spaces[at][key] = value.to(device) if isinstance(value, torch.Tensor) else value


def _holds(thing: Any, layers: set[int]) -> bool:
    """Return whether an object holds a layer of the model, as a trainer does that a module has a reference to."""
    found, seen = [thing], {id(thing)}
    for _ in range(_FAR):
        found = [one for each in found for one in vars(each).values() if has_state(one) and id(one) not in seen]
        if any(id(one) in layers for one in found):
            return True
        seen |= set(map(id, found))
    return False


def _is_state(tensor: torch.Tensor, most_bytes: int | None) -> bool:
    """Return whether a tensor in an attribute may hold state: no parameter, no output with a graph, no huge table."""
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return not is_expanded(tensor) and (most_bytes is None or tensor.nbytes <= most_bytes)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return what tells whether an object holds something else later."""
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if type(value) is np.ndarray:
        return value.tobytes() if value.nbytes <= _SMALL_BYTES and value.dtype.kind in "biufc" else id(value)
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, (*CONTAINERS, tuple)) and depth < DEEPEST:
        if len(value) > _MOST_ENTRIES or isinstance(value, set):
            return len(value)
        inside = value.items() if isinstance(value, dict) else value
        return [_mark(one, depth + 1) for one in inside]
    return id(value)


def _is_other(before: Any, now: Any) -> bool:
    """Return whether a tensor was put in another's place, which may have the same number as one that is gone."""
    return isinstance(before, torch.Tensor) and before is not now


def _is_saved(value: Any) -> bool:
    """Return whether a checkpoint holds such a value."""
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return all(map(_is_saved, value)) and all(map(_is_saved, value.values()))
    if type(value) in (list, tuple, set, deque):
        return all(map(_is_saved, value))
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc"
    return type(value) in _PLAIN or (type(value) is torch.Tensor and value.layout is torch.strided)
