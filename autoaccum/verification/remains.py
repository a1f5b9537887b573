"""What forwards leave in the state that the next one finds: of a whole window, and of its last micro-batch alone."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.window.state import Place, State

Remains = Mapping[Place, torch.Tensor]
"""Numbers on the host, by where they are."""
_LARGEST_BYTES = 2**26
"""Bytes of a tensor up to which its values are compared."""
_ALIKE = 1e-3
"""The part of a change up to which another one is the same but for rounding."""
_MOST = 64
"""Entries at the end of a list that are compared: there stands what was added, whatever was there before."""
_DEEPEST = 3
"""Lists within lists that are looked into."""


def remains_of(state: State) -> Remains:
    """Return the numbers that forwards may have left in what a state remembers, in copies.

    These are buffers, frozen parameters, attributes, variables, and what lists and the like hold. Statistics of
    BatchNorm are left out: of these it is told by themselves.
    """
    found: dict[Place, torch.Tensor] = {}
    for place, owner, value in state.places():
        if not isinstance(owner, _BatchNorm):
            found.update(_numbers(place, value))
    return found


def _numbers(place: Place, value: Any, depth: int = 0) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield the numbers that a value is, or holds, with their places."""
    if isinstance(value, torch.Tensor):
        # What has a graph was computed to be differentiated, and a parameter that is trained is no state.
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        if not value.requires_grad and value.nbytes <= _LARGEST_BYTES and is_plain:
            yield place, value.detach().to("cpu", copy=True)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "biufc" and value.nbytes <= _LARGEST_BYTES:
            yield place, torch.tensor(np.array(value, complex if value.dtype.kind == "c" else float))
    elif isinstance(value, bool | int | float) and abs(value) < sys.float_info.max:
        yield place, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, dict | list | tuple | set | deque) and depth < _DEEPEST:
        yield (*place, len), torch.tensor(float(len(value)))
        entries = () if isinstance(value, set) else value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in islice(entries, max(0, len(value) - _MOST), None):
            if not isinstance(entry, nn.Module):
                yield from _numbers((*place, key), entry, depth + 1)


def is_of_a_part(before: Remains, whole: Remains, part: Remains) -> bool:
    """Return whether the last part of a window leaves other values than the whole.

    Those of a momentum encoder are the same, which moves by the weights alone; those of a queue depend on samples.

    Args:
        before: what was found in each place.
        whole: what all samples leave.
        part: what the last micro-batch leaves.
    """
    return any(_differ(place, before.get(place), found, part[place]) for place, found in whole.items() if place in part)


def _differ(place: Place, before: torch.Tensor | None, whole: torch.Tensor, part: torch.Tensor) -> bool:
    is_entry = len(place) > _OF_ATTRIBUTES
    if whole.shape != part.shape:
        # What is kept of a forward alone, such as a map of attention, has the shape of its batch. A list keeps more.
        return is_entry
    if before is None or before.shape != whole.shape:
        return is_entry and _distance(part, whole) > _ALIKE * _distance(whole, torch.zeros_like(whole))
    return _distance(part, whole) > _ALIKE * _distance(whole, before)


_OF_ATTRIBUTES = 3
"""Parts of the place of an attribute or a variable: those of entries of a list have more."""


def _distance(value: torch.Tensor, other: torch.Tensor) -> float:
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    return float((value.double() - other.double()).nan_to_num(0, 0, 0).norm())
