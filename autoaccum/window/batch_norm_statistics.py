"""The statistics of BatchNorm over a window, whose gradient is known: joined of parts, applied, and gone back from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm


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
        # Either may be without a gradient, as where a layer behind takes the mean away again.
        if self.var.grad is not None:
            wide = input.to(self.var.dtype)
            found = torch.addcmul(found, wide - self.mean.view(shape), self.var.grad.view(shape), value=2.0)
        # In 32 bits as far as that, for the numbers of a window are many.
        return (found / self.count).to(input.dtype)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of statistics: 32 bits for 16, as in PyTorch's layers."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _as_statistics(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    # PyTorch's kernels take inputs of 16 bits beside statistics and weights of 32.
    return None if tensor is None else tensor.to(like.dtype)


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.ndim) if dim != 1]


def _over_channels(input: torch.Tensor) -> list[int]:
    """Return the shape in which a number for each channel meets an input."""
    return [1, -1] + [1] * (input.ndim - 2)


def normalised_alone(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, Norm]:
    """Return a micro-batch normalised by statistics of its own, and these."""
    count = input.numel() // max(1, input.shape[1])
    mean, var = torch.zeros(2, input.shape[1], dtype=_wide(input), device=input.device)
    # With a weight of 1 running statistics become its own, in one kernel with the output. In that their variance is the
    # unbiased one, which a single number has not.
    weight, bias = _as_statistics(weight, mean), _as_statistics(bias, mean)
    output = torch.batch_norm(input, weight, bias, mean, var, True, 1.0, eps, torch.backends.cudnn.enabled)
    var = var * ((count - 1) / count) if count > 1 else torch.zeros_like(var)
    return output, Norm(count, mean, var)


def normalised(
    input: torch.Tensor, norm: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, through which gradients go to the statistics too."""
    affine = [_as_statistics(weight, norm.mean), _as_statistics(bias, norm.mean)]
    output: torch.Tensor = _Normalised.apply(input, norm.mean, norm.var, *affine, eps)  # type: ignore[no-untyped-call]
    return output


class _Normalised(torch.autograd.Function):
    """PyTorch's BatchNorm by given statistics, of which its own has no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        ctx.save_for_backward(input, mean, var, weight)
        ctx.eps = eps
        return batch_norm(input, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, mean, var, weight = ctx.saved_tensors
        scale = (var + ctx.eps).rsqrt()
        factor = scale if weight is None else scale * weight
        # All are made of two sums over a channel: of the gradient, and of it times what was normalised.
        wanted = [ctx.needs_input_grad[0], True, True]
        by_input, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, rows, weight, mean, var, None, None, False, ctx.eps, wanted
        )
        found = by_input, -by_bias * factor, by_weight * factor * scale * -0.5, by_weight, by_bias
        needs = ctx.needs_input_grad
        return *(one if needed else None for one, needed in zip(found, needs, strict=False)), None
