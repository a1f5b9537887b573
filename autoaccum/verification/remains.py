"""What forwards leave in buffers and frozen parameters: of a whole window, and of its last micro-batch alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Remains = Mapping[tuple[int, str], torch.Tensor]
"""Values on the host, by the number of the layer and the name in it."""
_LARGEST_BYTES = 2**26
"""Bytes of a tensor up to which its values are compared."""
_ALIKE = 1e-3
"""The part of a change up to which another one is the same but for rounding."""


def remains_of(layers: Iterable[nn.Module]) -> Remains:
    """Return the values of the buffers and of the frozen parameters of layers, in copies.

    Statistics of BatchNorm are left out: of these it is told by themselves.
    """
    found = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, _BatchNorm):
            continue
        held = [*layer._buffers.items(), *((name, p) for name, p in layer._parameters.items())]
        for name, tensor in held:
            if tensor is None or tensor.requires_grad or tensor.layout is not torch.strided:
                continue
            if tensor.nbytes <= _LARGEST_BYTES:
                found[number, name] = tensor.detach().to("cpu", copy=True)
    return found


def is_of_a_part(before: Remains, whole: Remains, part: Remains) -> bool:
    """Return whether the last part of a window leaves other values than the whole.

    Those of a momentum encoder are the same, which moves by the weights alone; those of a queue depend on samples.

    Args:
        before: what each of them has found.
        whole: what all samples leave.
        part: what the last micro-batch leaves.
    """
    return any(
        found.shape == part[place].shape == before[place].shape
        and _distance(part[place], found) > _ALIKE * _distance(found, before[place])
        for place, found in whole.items()
        if place in part and place in before
    )


def _distance(value: torch.Tensor, other: torch.Tensor) -> float:
    if value.is_complex():
        value, other = torch.view_as_real(value), torch.view_as_real(other)
    return float((value.double() - other.double()).nan_to_num(0, 0, 0).norm())
