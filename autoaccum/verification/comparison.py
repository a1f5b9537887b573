"""Compares two gradients, and two losses: how far one is off the other, as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

TOLERANCES = {torch.float64: 1e-6}
"""Relative errors up to which gradients are the same, by the narrowest type of a parameter that has no 16 bits.

Right ones stay below 1e-12. What lies between is a constant of the program's, as in ``/ (mask.sum() + 1e-8)``, which is
too small to matter for any step, and shows the most where few samples have few items."""
OF_STATE = 1e-7
"""The same where forwards move state: it may have come to rest by now, and not stay there."""
TOLERANCE = 2e-5
"""The same of float32, in which right ones stay below 3e-6, and wrong ones above 1e-4."""
MOST_ROUNDING = 0.1
"""The relative error below which 64 bits are asked whether rounding explains it."""
_LEAST_SHARE = 1e-2
"""A tensor's error is relative to its own norm, or to this share of what its norm would be if all entries of the
gradient were alike. A gradient that is 0 but for rounding, as that of a bias before a normalisation, has no digits."""


@dataclass(frozen=True, slots=True)
class Error:
    """How far a gradient is off another one."""

    relative: float
    """The larger of the error of all tensors together and of the worst one; 1 is as large as the gradient itself."""
    tensor: int | None
    """The index of the worst tensor; None where all are the same."""
    of_tensors: tuple[float, ...] = ()
    """The error of each tensor; empty where nothing can be compared."""


def error_of(gradients: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> Error | None:
    """Return how far gradients are off those that are wanted; None where these are 0, which nothing can be told by."""
    rows = []
    for found, right in zip(gradients, wanted, strict=True):
        rows.append(_norms(found, right))
    # One wait for the device.
    device = next((row.device for row in rows if row is not None), None)
    if device is None:
        return None
    zero = torch.zeros(2, dtype=torch.float64, device="cpu")
    numbers = torch.stack([zero if row is None else row.to("cpu", torch.float64) for row in rows]).tolist()
    present = [found if right is None else right for found, right in zip(gradients, wanted, strict=True)]
    sizes = [0 if gradient is None else gradient.numel() for gradient in present]
    total = math.sqrt(sum(right * right for _, right in numbers))
    if not total:
        return None
    if not math.isfinite(total):
        return Error(math.nan, None)
    worst, tensor = 0.0, None
    of_tensors = []
    count = sum(sizes) or 1
    for index, ((off, right), size) in enumerate(zip(numbers, sizes, strict=True)):
        relative = off / max(right, _LEAST_SHARE * total * math.sqrt(size / count)) if off else 0.0
        of_tensors.append(relative)
        if not relative <= worst:
            worst, tensor = relative, index
    whole = math.sqrt(sum(off * off for off, _ in numbers)) / total
    return Error(max(whole, worst) if not math.isnan(worst) else math.nan, tensor, tuple(of_tensors))


def _norms(found: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return (norm of the difference, norm of what is wanted) on the device; None where there is neither gradient."""
    if found is None and right is None:
        return None
    present = right if right is not None else found
    assert present is not None
    wide = torch.promote_types(present.dtype, torch.float32)
    found = None if found is None else _dense(found).to(wide)
    right = None if right is None else _dense(right).to(wide)
    off = found if right is None else (right if found is None else found - right)
    norm = torch.linalg.vector_norm(off)
    return torch.stack([norm, torch.zeros_like(norm) if right is None else torch.linalg.vector_norm(right)]).real


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient.detach()


def loss_tolerance_of(parameters: Sequence[torch.Tensor]) -> float:
    """Return the relative error up to which losses of these parameters are the same, as far as a first look tells.

    Where state converges, as that of a spectral norm does, the loss is off by the square of what its gradient is.
    """
    return 1e-12 if tolerance_of(parameters) < TOLERANCE else 2e-6


def tolerance_of(parameters: Sequence[torch.Tensor]) -> float:
    """Return the relative error up to which gradients of these parameters are the same."""
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    if dtypes and dtypes <= {torch.float64, torch.complex128}:
        return TOLERANCES[torch.float64]
    return TOLERANCE


def any_of(gradient: torch.Tensor) -> bool:
    """Return whether a gradient, a sparse one too, has any number but 0."""
    values = gradient.coalesce()._values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())


def names_of(
    tensors: Sequence[torch.Tensor],
    modules: Sequence[torch.nn.Module],
    other: str = "a parameter of the optimizer alone",
) -> list[str]:
    """Return the names of parameters and buffers, with that of their module where it is not the first.

    Args:
        tensors: these.
        modules: where to look for them.
        other: stands for the name of those that are not found.
    """
    names: dict[int, str] = {}
    for index, module in enumerate(modules):
        for name, one in chain(module.named_parameters(), module.named_buffers()):
            name = name.removeprefix("_orig_mod.")  # of what torch.compile made of it
            names.setdefault(id(one), name if not index else f"{type(module).__name__}.{name}")
    return [names.get(id(one), other) for one in tensors]
