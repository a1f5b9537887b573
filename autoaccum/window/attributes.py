"""The attributes of objects, remembered and put back: counters, caches, hooks, their very class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""The types of containers whose contents are remembered, exactly: a subclass may mean something else by ``clear``."""
_CONTAINERS = frozenset(CONTAINERS)
_PLAIN = frozenset((bool, int, float, str, type(None)))  # what most attributes are


class Attributes:
    """Classes and attributes of objects, with what the containers among these hold, as they were when it was made.

    Containers are put back in place, for others hold them: the handle of a hook has a weak reference to the dict that
    the hook is in. Tensors are remembered, their values are not.
    """

    def __init__(self, objects: Iterable[Any], containers: Iterable[Any] = ()) -> None:
        """Remember the attributes of these objects now, and what these containers hold."""
        # A forward may change the class itself: a lazy layer becomes an ordinary one.
        self._classes = [(owner, type(owner)) for owner in objects]
        # (container, a copy of it) by the container's id, which the container that is held here keeps unique.
        self._contents: dict[int, tuple[Any, Any]] = {}
        # The same, told apart when it is first asked for: containers that were empty, and the others with their copies.
        self._empty: list[Any] | None = None
        self._full: list[tuple[Any, Any]] = []
        # The attributes themselves are a dict: it is remembered like those that lie in it. Not by recursion, for lists
        # may hold themselves or be nested deeply.
        self._tensors: list[torch.Tensor] = []
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
            elif isinstance(thing, tuple):
                self._tensors.extend(one for one in thing if isinstance(one, torch.Tensor))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among what is remembered."""
        return self._tensors

    def have_changed(self) -> bool:
        """Return whether an attribute, what a container holds, or a class is another object now."""
        if any(type(owner) is not kind for owner, kind in self._classes):
            return True
        if self._empty is None:
            self._empty = [container for container, contents in self._contents.values() if not contents]
            self._full = [held for held in self._contents.values() if held[1]]
        # Most of a module's are empty, such as those of hooks that nobody has registered.
        return any(self._empty) or not all(_holds_the_same(container, contents) for container, contents in self._full)

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


def _holds_the_same(container: Any, contents: Any) -> bool:
    """Return whether a container holds the very objects that its copy holds, in the same order."""
    if len(container) != len(contents) or not all(map(is_, container, contents)):
        return False
    return not isinstance(container, dict) or all(map(is_, container.values(), contents.values()))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of the tensor share memory, so that nothing can write to it."""
    if tensor.layout != torch.strided:
        return False
    # A stride of 0 leads from an element to itself; with a size of 1 it leads nowhere.
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
