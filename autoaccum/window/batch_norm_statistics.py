"""The statistics of BatchNorm over a window, whose gradient is known: joined of parts, applied, and gone back from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Norm:
    """The statistics of one call of BatchNorm: one number for each channel, of what it is given in a window."""

    count: int
    """Numbers in a channel."""
    mean: torch.Tensor
    var: torch.Tensor
    """The biased variance."""

    @classmethod
    @torch.no_grad()
    def of(cls, input: torch.Tensor) -> Norm:
        """Compute those of one micro-batch: of 16 bits in 32, as layers do."""
        wide = input.detach().to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(wide, _all_but_channels(input), correction=0)
        return cls(input.numel() // max(1, input.shape[1]), mean, var)

    @classmethod
    @torch.no_grad()
    def joined(cls, parts: Sequence[Norm]) -> Norm:
        """Join those of all micro-batches: Chan, Golub and LeVeque, "Computing the Sample Variance", 1983, eq. 2.1."""
        # From the means of parts, and not from sums of squares, whose difference has few digits far from 0.
        count = sum(part.count for part in parts)
        mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
        off = [(part.var + (part.mean - mean).square()) * (part.count / count) for part in parts]
        return cls(count, mean, torch.stack(off).sum(0))

    @torch.no_grad()
    def cotangent(self, input: torch.Tensor) -> torch.Tensor:
        """Return the gradient by an input of the call, from those by its statistics."""
        shape = _over_channels(input)
        by_mean = torch.zeros_like(self.mean) if self.mean.grad is None else self.mean.grad
        found = by_mean.view(shape).expand(input.shape)
        if self.var.grad is not None:
            wide = input.to(self.var.dtype)
            found = torch.addcmul(found, wide - self.mean.view(shape), self.var.grad.view(shape), value=2.0)
        return (found / self.count).to(input.dtype)


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.ndim) if dim != 1]


def _over_channels(input: torch.Tensor) -> list[int]:
    """Return the shape in which a number for each channel meets an input."""
    return [1, -1] + [1] * (input.ndim - 2)


def normalised(
    input: torch.Tensor, norm: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, through which gradients go to the statistics too."""
    # As one product and one sum, of which a backward keeps the input alone. PyTorch's own has no gradient for them.
    factor = (norm.var + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    shift = -norm.mean * factor if bias is None else bias - norm.mean * factor
    shape = _over_channels(input)
    return torch.addcmul(shift.view(shape), input, factor.view(shape)).to(input.dtype)
