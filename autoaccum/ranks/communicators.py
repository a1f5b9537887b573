"""What the units of a sharded model call in place of FSDP2's own collectives, so that each of them is noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoaccum.ranks.collectives import Call, Collectives, scatter


class _Of:
    """What a unit calls to make its collectives: the interface of FSDP2's ``Comm``."""

    def __init__(self, collectives: Collectives, unit: int) -> None:
        self._collectives = collectives
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory of a collective, as FSDP2 takes it by itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _call(self, kind: str, given: torch.Tensor, taken: torch.Tensor, group: dist.ProcessGroup) -> Call:
        return Call(kind, self._unit, given.numel(), taken.numel(), given.dtype, given.device, group)


class Gathers(_Of):
    """Gathers the parameters of a unit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather what each rank gives into what each gets."""
        return self._collectives.launch(
            self._call("all_gather", input_tensor, output_tensor, group),
            lambda is_async: dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=is_async),
            is_async=async_op,
        )


class Scatters(_Of):
    """Sums the gradient of a unit, and scatters it."""

    def __init__(self, collectives: Collectives, unit: int, copies: dist.ProcessGroup | None) -> None:
        """Set up.

        Args:
            collectives: what notes them.
            unit: which one it is.
            copies: the ranks that hold the same part of copies of the model, over which FSDP2 itself sums next.
        """
        super().__init__(collectives, unit)
        self._copies = copies

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum what each rank gives, and scatter it."""
        found = self._collectives.launch(
            self._call("reduce_scatter", input_tensor, output_tensor, group),
            lambda is_async: scatter(output_tensor, input_tensor, op=op, group=group, is_async=is_async),
            is_async=async_op,
        )
        if self._copies is not None:
            self._collectives.await_sum(self._call("all_reduce", output_tensor, output_tensor, self._copies))
        return found

    def summed(self, _: torch.Tensor) -> None:
        """Hear that FSDP2 has summed over the copies."""
        self._collectives.summed()
