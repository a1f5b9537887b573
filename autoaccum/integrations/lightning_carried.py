"""Refuses steps that go on from what an earlier micro-batch has left of its samples, as truncated BPTT carries hiddens.

From batch to batch a hidden state has an entry for each place in the batch. From micro-batch to micro-batch it would go
on from other samples, or have the wrong size. That an attribute was written shows nothing, for steps keep outputs to
look at: whether the next micro-batch reads it is seen by a tensor that tells of its use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autoaccum.errors import ArgumentError
from autoaccum.memory.oom import is_out_of_memory

_WINDOWS = 3
"""Windows that are cut in which it is looked for: later ones would be cut likewise."""


class Carried:
    """What micro-batches of one window leave for each other in attributes of a module."""

    def __init__(self, module: Any) -> None:
        """Begin with the first window of a run."""
        self._module = module
        self._left: list[_Place] = []
        self._size = 0  # samples of the micro-batch that has left it
        self._runs = 0  # micro-batches of this window
        self._windows = 0  # that were cut

    def begin(self) -> None:
        """Begin a window: what the one before it has left is of its places in the batch, and may be gone on from."""
        self._windows += self._runs > 1
        self._left, self._size, self._runs = [], 0, 0

    @contextmanager
    def watching(self, size: int) -> Iterator[None]:
        """Watch a micro-batch of so many samples.

        Raises:
            ArgumentError: it goes on from what the one before it has left of its samples.
        """
        # Most of a run is not watched, for this looks at every attribute.
        if self._windows >= _WINDOWS:
            yield
            return
        watched = [(place, _Watched.of(place.value)) for place in self._left if place.is_there()]
        for place, tensor in watched:
            place.put(tensor)
        error: Exception | None = None
        # What a step has not written itself is a constant of the module's, whatever its size.
        before = {id(place.value) for place in self._places()}
        try:
            yield
        except Exception as raised:
            error = raised
        finally:
            for place, tensor in watched:
                if place.holds(tensor):
                    place.put(place.value)
        name = next((place.name for place, tensor in watched if tensor.was_used), None)
        # Of a single sample all that has one entry looks alike; then it is the next size by which it is told.
        is_told = error is not None or self._size > 1
        if name is not None and is_told and not (error is not None and is_out_of_memory(error)):
            raise _refusal(type(self._module).__name__, name) from error
        if error is not None:
            raise error
        self._left = [place for place in self._places() if id(place.value) not in before and size in place.value.shape]
        self._size = size
        self._runs += 1

    def _places(self) -> list[_Place]:
        """Return where tensors lie in attributes: by themselves, and within tuples, lists and dicts."""
        found = []
        for prefix, module in self._module.named_modules():
            held = vars(module)
            for name, value in held.items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                path = f"{prefix}.{name}" if prefix else name
                if isinstance(value, torch.Tensor):
                    found.append(_Place(path, held, name, value))
                # An LSTM's hidden state is a pair, and several layers may have theirs in a list.
                elif type(value) is tuple:
                    entries = enumerate(value)
                    found += [_Place(path, held, name, one, i) for i, one in entries if isinstance(one, torch.Tensor)]
                elif type(value) in (list, dict):
                    pairs = enumerate(value) if type(value) is list else value.items()
                    found += [_Place(path, value, key, one) for key, one in pairs if isinstance(one, torch.Tensor)]
        return found


class _Place(NamedTuple):
    """Where a tensor lies."""

    name: str
    owner: Any
    """The dict or list that holds it, or that holds the tuple which it is in."""
    key: Any
    value: torch.Tensor
    within: int | None = None
    """Within a tuple."""

    def now(self) -> Any:
        """Return what lies there; None where there is nothing any more."""
        try:
            held = self.owner[self.key]
            return held if self.within is None else held[self.within]
        except (LookupError, TypeError):
            return None

    def is_there(self) -> bool:
        """Return whether the tensor still lies there."""
        return self.holds(self.value)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies there."""
        return self.now() is tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there."""
        if self.within is None:
            self.owner[self.key] = tensor
        else:
            parts = list(self.owner[self.key])
            parts[self.within] = tensor
            self.owner[self.key] = tuple(parts)


class _Watched(torch.Tensor):
    """A tensor that tells whether anything was computed with it."""

    was_used: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Watched:
        """Return one with the values of a tensor."""
        # A view of the same memory: what is computed with it is what would have been.
        made = tensor.as_subclass(_Watched)
        made.was_used = False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as tensors do, and take note of it."""
        for one in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(one, _Watched):
                one.was_used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refusal(module: str, name: str) -> ArgumentError:
    return ArgumentError(
        "training_step",
        f"{module}.training_step, which reads self.{name}",
        "one that goes by its own samples: a micro-batch would go on from what the one before it has left of others",
        "Pass accumulate='joined', or micro_batch= the whole batch if it fits; keep what is carried in the batch, or "
        "reset it.",
    )
