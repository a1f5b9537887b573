"""What forwards leave in state, of a whole window and of one that is cut.

Running statistics, queues, codebooks and counters may enter no gradient, and be read in evaluation alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoaccum.window.state import State

_ALIKE = 1e-3
"""The part of a change up to which another one is the same but for rounding."""
_DIGITS = 16
"""The same as a multiple of what a type rounds by, for state that has come to rest."""


class Remains:
    """What the whole leaves: the values of tensors that it has written to, and of buffers that it has replaced."""

    def __init__(self, state: State) -> None:
        """Begin with how things are, as it is remembered."""
        self._state = state
        # A buffer is known by its place, for another tensor may be put there, but for that of a scripted module.
        self._buffers = [
            (layer._buffers, name, one)
            for layer in state.layers
            if isinstance(layer._buffers, dict)
            for name, one in layer._buffers.items()
            if one is not None
        ]
        self._whole: Mapping[int, torch.Tensor] = {}

    def take(self) -> None:
        """Take what the whole has left."""
        self._whole = self._left()

    def others(self) -> list[torch.Tensor]:
        """Return the tensors, as they were, in whose place there are other values now than the whole has left.

        Those of a momentum encoder are the same, which moves by the weights alone and once; those of a queue depend on
        samples, and running statistics move as often as a forward is run.
        """
        left = self._left() if self._whole else {}
        return [
            tensor
            for tensor, before in self._state.values()
            if id(tensor) in left.keys() & self._whole.keys()
            and _is_another(left[id(tensor)], self._whole[id(tensor)], before)
        ]

    def _left(self) -> dict[int, torch.Tensor]:
        """Return the values that have moved, by the ids of the tensors that they were in."""
        now = {id(one): one for one in self._state.moved()}
        for held, name, one in self._buffers:
            value = held.get(name)
            if value is not None and value is not one:
                now[id(one)] = value
        return {place: one.detach().to("cpu", copy=True) for place, one in now.items()}


def _is_another(value: torch.Tensor, whole: torch.Tensor, before: torch.Tensor) -> bool:
    if not value.shape == whole.shape == before.shape:
        return False
    rounding = _DIGITS * torch.finfo(whole.dtype).eps * _size(_wide(whole)) if whole.is_floating_point() else 0.0
    change = _size(_wide(whole) - _wide(before))
    return _size(_wide(value) - _wide(whole)) > max(_ALIKE * change, rounding)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _size(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).norm())
