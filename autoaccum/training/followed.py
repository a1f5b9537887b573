"""What forwards write to beside gradients, which is to be the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.ranks.group import Group
from autoaccum.ranks.units import is_distributed

Mark = tuple[tuple[int, ...], str] | None
"""The shape of a tensor, and what tells its value from another one; None of one that stands still."""


class Followed:
    """What forwards may write to beside gradients: buffers, and frozen parameters, as of a momentum encoder."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Begin with the modules, whose buffers may be others later."""
        self._modules = modules
        self._versions: dict[int, int] = {}  # of frozen parameters, which may be large and mostly stand still

    def tensors(self) -> list[torch.Tensor]:
        """Return them as they are now, each once, in an order that all ranks have."""
        buffers = {id(b): b for module in self._modules for b in module.buffers()}
        parameters = [p for module in self._modules for p in module.parameters()]
        # Of what is sharded each rank has a part of its own, and nothing is to be the same.
        frozen = {id(p): p for p in parameters if not p.requires_grad and not is_distributed(p)}
        return [*buffers.values(), *frozen.values()]

    @torch.no_grad()
    def marks(self) -> list[Mark]:
        """Return what tells the value of each from another one; of a frozen parameter that stands still nothing."""
        found: list[Mark] = []
        for tensor in self.tensors():
            # A kernel that writes running statistics raises no version: buffers are looked at in each window.
            is_frozen = isinstance(tensor, nn.Parameter)
            if is_frozen and self._versions.get(id(tensor), tensor._version) == tensor._version:
                found.append(None)
            else:
                wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
                found.append((tuple(tensor.shape), f"{wide.sum().item()!r} {wide.abs().square().sum().item()!r}"))
            if is_frozen:
                self._versions[id(tensor)] = tensor._version
        return found

    def make_same(self, group: Group, marks: Sequence[Sequence[Mark]]) -> None:
        """Give the first rank's values to all, of those that are not the same by the marks of all ranks.

        Raises:
            ArgumentError: ranks have other buffers, or of other shapes.
        """
        # One that stands still here may have moved elsewhere, so that no shape is told of it.
        shapes = [[mark and mark[0] for mark in of_rank] for of_rank in marks]
        are_alike = len({len(of_rank) for of_rank in shapes}) == 1
        if not are_alike or any(len({*of_one} - {None}) > 1 for of_one in zip(*shapes, strict=True)):
            raise ArgumentError("model", "a buffer", "the same buffers on all ranks, of the same shapes")
        tensors = self.tensors()
        group.spread([tensors[i] for i, each in enumerate(zip(*marks, strict=True)) if len({*each}) > 1])
        self._versions |= {id(tensor): tensor._version for tensor in tensors if isinstance(tensor, nn.Parameter)}
