"""The contribution of each micro-batch to a window's gradient, measured before it is added.

Each parameter's gradient is looked at on its way to being added, where autograd has it as a whole: that takes no
memory, and changes nothing of the sums. Where one backward brings a parameter's gradient in several pieces, as
reentrant checkpoints of shared layers do, or writes it past autograd, as a fused kernel may, what has been accumulated
is set aside while the backward runs: that costs the memory of another set of gradients, and the sums are those of plain
accumulation, to the bit, but for what comes in pieces, which are added to each other first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from autoaccum.loss.terms import NONE
from autoaccum.planning.noise import Noise, Part, estimate

Before = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, and their gradients of the micro-batches before."""


class Accumulated(Protocol):
    """What is asked of the gradient that is being accumulated: see ``window.gradient``."""

    def trained(self) -> list[torch.Tensor]:
        """Return what gets gradients."""

    def stepped(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients reach the optimizer."""


Parts = tuple[tuple[Part, ...], Noise | None]
"""What each micro-batch adds to a window's gradient, and the noise in that."""


class Contributions:
    """Adds micro-batches to a gradient, and measures each."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.come_in_pieces = False
        """Whether a backward has brought a gradient in pieces, or has written one itself, as later ones will."""

    def state_dict(self) -> dict[str, bool]:
        """Return what was seen, for a checkpoint; nothing where there is nothing to say."""
        return {"in_pieces": True} if self.come_in_pieces else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.come_in_pieces = state.get("in_pieces", False)

    def add(
        self,
        accumulate: Callable[[], None],
        gradients: Accumulated,
    ) -> torch.Tensor:
        """Run a backward, and return the 2-norm of what it adds to the gradient that reaches the optimizer.

        Args:
            accumulate: the backward.
            gradients: what it adds to.
        """
        if not self.come_in_pieces:
            parameters = gradients.stepped()
            if (whole := heard(accumulate, parameters)) is not None:
                return whole
            # That is no number for this one, whose window tells nothing; from the next one on it is measured otherwise.
            self.come_in_pieces = True
            return torch.full((), math.nan, device=parameters[0].device)
        before = set_aside(gradients.trained())
        accumulate()
        found = norm(gradients.stepped())
        add_back(before)
        return found


def heard(accumulate: Callable[[], None], parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Run a backward, and return the 2-norm of what it adds to the gradients of parameters, as ``norm`` does.

    It is None where what it adds to one of them has come in pieces, whose norms are not that of their sum, or past
    autograd.
    """
    before = [_mark(p) for p in parameters]
    found: dict[int, torch.Tensor] = {}
    in_pieces: list[int] = []

    def hear(index: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        (gradient,) = gradients
        if gradient is None:
            return
        if index in found:
            in_pieces.append(index)
            return
        gradient = _real_numbers(gradient)
        found[index] = torch.linalg.vector_norm(gradient, dtype=_wide(gradient))

    # Hooks of the nodes that add, and not of the tensors, where code of users' and what is compiled would heed them.
    nodes: list[Any] = [get_gradient_edge(p).node if p.requires_grad else None for p in parameters]
    handles = [node.register_prehook(partial(hear, index)) for index, node in enumerate(nodes) if node is not None]
    try:
        accumulate()
    finally:
        for handle in handles:
            handle.remove()
    # Some backwards write gradients themselves, and nothing of that is heard.
    is_missed = any(index not in found and _mark(p) != before[index] for index, p in enumerate(parameters))
    if in_pieces or is_missed:
        return None
    # In the order of the parameters, for they come in any where there are several devices.
    norms = [found[index] for index in sorted(found)]
    if not norms:
        return torch.zeros((), device=parameters[0].device)
    # Of several types, or on several devices, where a model is laid out over these.
    if len({(each.dtype, each.device) for each in norms}) > 1:
        wide = reduce(torch.promote_types, (each.dtype for each in norms))
        norms = [each.to(norms[0].device, wide) for each in norms]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def _mark(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return what changes where a gradient does, whoever changes it."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _wide(gradient: torch.Tensor) -> torch.dtype:
    # The square of a float16 number above 256 is infinite: norms are summed in no narrower type than float32.
    return gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32


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
    wide = reduce(torch.promote_types, map(_wide, gradients))
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
    # A sum that may count none has no more of a gradient where it counts more.
    is_sum = is_sum or NONE in counts
    found = []
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        found.append((size, size if is_sum else sign * count, squares[index] if count else 0.0))
    return tuple(found), estimate(tuple(found), (total * unit) * (total * unit))
