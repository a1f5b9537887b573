"""The attributes of objects, remembered and put back: counters, caches, hooks, their very class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""The types of containers whose contents are remembered, exactly: a subclass may mean something else by ``clear``."""


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
        # The attributes themselves are a dict: it is remembered like those that lie in it. Not by recursion, for lists
        # may hold themselves or be nested deeply.
        found: list[Any] = [vars(owner) for owner, _ in self._classes]
        found.extend(containers)
        while found:
            container = found.pop()
            if type(container) not in CONTAINERS or id(container) in self._contents:
                continue
            self._contents[id(container)] = (container, container.copy())
            found.extend(container.values() if isinstance(container, dict) else container)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among what is remembered."""
        found: list[torch.Tensor] = []
        for _, contents in self._contents.values():
            entries = contents.values() if isinstance(contents, dict) else contents
            for entry in entries:
                within = entry if isinstance(entry, tuple) else (entry,)
                found.extend(one for one in within if isinstance(one, torch.Tensor))
        return found

    def have_changed(self) -> bool:
        """Return whether an attribute, or what a container holds, is another object now."""
        for container, contents in self._contents.values():
            if len(container) != len(contents):
                return True
            now, before = list(container), list(contents)
            if isinstance(container, dict):
                now, before = list(container.values()), list(contents.values())
            if any(one is not other for one, other in zip(now, before, strict=True)):
                return True
        return False

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


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of the tensor share memory, so that nothing can write to it."""
    if tensor.layout != torch.strided:
        return False
    # A stride of 0 leads from an element to itself; with a size of 1 it leads nowhere.
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
