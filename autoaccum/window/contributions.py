"""The contribution of each micro-batch to a window's gradient, measured before it is added.

What has been accumulated is set aside while a backward runs. That costs the memory of another set of gradients, which
is in the peaks that are measured, for it is there in every micro-batch but the first. The sums are those of plain
accumulation, to the bit: the same two tensors are added. (But for what one backward adds twice to the same parameter,
as reentrant checkpoints may: that is added to itself first.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from autoaccum.planning.noise import Noise, Part, estimate

Before = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, and their gradients of the micro-batches before."""
Parts = tuple[tuple[Part, ...], Noise | None]
"""What each micro-batch adds to a window's gradient, and the noise in that."""


def set_aside(parameters: Sequence[torch.Tensor]) -> Before:
    """Take the gradients from the parameters; until ``add_back`` the list is all that holds them."""
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    # With no gradient there, a backward puts its own in place and adds nothing.
    for p, _ in before:
        p.grad = None
    return before


@torch.no_grad()
def add_back(before: Before) -> None:
    """Add the gradients of now onto those that were set aside, in place, in one launch."""
    sums, addends = [], []
    for p, old in before:
        new, p.grad = p.grad, old
        # This micro-batch did not use the parameter: its sum stays as it is.
        if new is None:
            continue
        # A dense tensor cannot be added onto a sparse one in place; autograd adds them the other way round, too.
        if old.is_sparse and not new.is_sparse:
            p.grad = new.add_(old)
        else:
            sums.append(old)
            addends.append(new)
    if sums:
        torch._foreach_add_(sums, addends)


@torch.no_grad()
def norm(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of the gradients, 0-dim, of 32 bits or more, on the device: nothing waits for it."""
    gradients = [_real_numbers(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    # The square of a float16 number above 256 is infinite: norms are summed in no narrower type than float32.
    wide = reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=wide)))
    return norm


def _real_numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a gradient is made of."""
    # An entry that several samples add to is listed several times until then, and the squares would be summed apart.
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def measured(stepped: Sequence[torch.Tensor], scaler: torch.amp.GradScaler | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the gradient that reaches the optimizer, and the scale of 16 bits that is in it."""
    whole = norm(stepped)
    return whole, torch.ones_like(whole) if scaler is None else scaler.scale(torch.ones_like(whole))


def parts(
    sizes: Sequence[int],
    counts: Sequence[float],
    norms: Mapping[int, torch.Tensor],
    whole: torch.Tensor,
    scale: torch.Tensor,
    *,
    is_sum: bool,
    correction: float,
) -> Parts:
    """Return what each micro-batch adds to a window's gradient, and the noise in that.

    Args:
        sizes: samples of each micro-batch.
        counts: what each counts; 0 where nothing.
        norms: of what each adds to the gradient, by its index.
        whole: the norm of the gradient, which is yet to be corrected.
        scale: that of 16 bits, which is in all norms.
        is_sum: whether the loss is a sum over samples.
        correction: what the gradient is multiplied with in the end.
    """
    # The one wait for the device.
    loss_scale, total, *added = torch.stack([scale, whole, *norms.values()]).tolist()
    unit = correction / loss_scale
    squares = {index: (norm * unit) * (norm * unit) for index, norm in zip(norms, added, strict=True)}
    sign = math.copysign(1, sum(counts))  # a loss that is minus a mean has counts below 0
    found = []
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        found.append((size, size if is_sum else sign * count, squares[index] if count else 0.0))
    return tuple(found), estimate(tuple(found), (total * unit) * (total * unit))
