"""The gradients that are added up: all of a parameter's, or the rows that a sparse one has on any rank.

Which rows these are is told with all else at a window's end. Each rank then lays its own into one tensor that has the
rows of all, and these are added up as the gradient of a parameter is: so a sum has each row once, in one order, and is
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoaccum.distributed.channel import undisturbed
from autoaccum.distributed.gradients import Summing, type_of_gradient

Told = bool | torch.Tensor
"""Whether a rank has a gradient of a parameter; of a sparse one its indices, on the host."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a sparse gradient has on all ranks."""

    indices: torch.Tensor
    """Of the rows, each once, in their order: one column for each, on the host."""
    places: Sequence[torch.Tensor]
    """Of each rank's rows among these; empty where it has none."""


Kind = bool | Rows
"""Whether there is a gradient of a parameter on any rank; where those of all are sparse, what they have."""


def told(parameters: Sequence[torch.Tensor]) -> list[Told]:
    """Return what this rank tells of the gradients of parameters."""
    found: list[Told] = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # each row once, which several micro-batches have added to
            found.append(p.grad.indices().cpu())
        else:
            found.append(p.grad is not None)
    return found


def joined(told: Sequence[Sequence[Told]]) -> list[Kind]:
    """Return what all ranks have told of each parameter."""
    return [_joined(of_ranks) for of_ranks in zip(*told, strict=True)]


def _joined(of_ranks: Sequence[Told]) -> Kind:
    # A dense gradient on any rank makes the sum dense.
    if not any(isinstance(found, torch.Tensor) for found in of_ranks) or any(found is True for found in of_ranks):
        return any(found is not False for found in of_ranks)
    # A rank that has none has no rows either.
    there = [found for found in of_ranks if isinstance(found, torch.Tensor)]
    nothing = there[0][:, :0]
    of_each = [found if isinstance(found, torch.Tensor) else nothing for found in of_ranks]
    indices, places = torch.unique(torch.cat(of_each, 1), dim=1, return_inverse=True)
    return Rows(indices, places.split([found.shape[1] for found in of_each]))


def add_up(summing: Summing, parameters: Sequence[torch.Tensor], kinds: Sequence[Kind], factor: float) -> None:
    """Replace the gradient of each parameter by the sum over all ranks, each times the rank's factor.

    All ranks have to pass the same parameters and kinds. What goes wrong on this rank is raised when all of it is done,
    so that the others need not wait.
    """
    failures: list[Exception] = []

    def tried(function: Callable[[], None]) -> bool:
        try:
            function()
        except Exception as error:
            failures.append(error)
            return False
        return True

    summed: list[torch.Tensor] = []
    sparse: list[tuple[torch.Tensor, torch.Tensor, Rows]] = []  # the parameter, what stands for its rows, these
    for p, kind in zip(parameters, kinds, strict=True):
        if isinstance(kind, Rows):
            with undisturbed():
                rows = _stand_in(p, kind)
            if p.grad is not None:
                tried(lambda p=p, rows=rows, kind=kind: _lay_in(rows, p, kind.places[summing.rank]))  # type: ignore[misc]
            summed.append(rows)
            sparse.append((p, rows, kind))
        elif kind:
            # What could not be made dense counts as nothing; the window is thrown away.
            if p.grad is not None and p.grad.is_sparse and not tried(lambda p=p: _make_dense(p)):  # type: ignore[misc]
                p.grad = None
            summed.append(p)
    tried(lambda: summing.add_up(summed, factor))
    for p, rows, kind in sparse:
        tried(lambda p=p, rows=rows, kind=kind: _take_out(p, rows, kind))  # type: ignore[misc]
    if failures:
        raise failures[0]


def _stand_in(p: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a tensor as large as the rows, which takes no memory; its gradient will be what is in them."""
    # Others need to know its size alone, and so it has to be there where there is no memory for the rows.
    own = p.detach()
    shape = (rows.indices.shape[1], *own.shape[len(rows.indices) :])
    return own.as_strided((1,) * len(shape), (1,) * len(shape)).expand(shape)  # every number is the first one


@torch.no_grad()
def _lay_in(rows: torch.Tensor, p: torch.Tensor, places: torch.Tensor) -> None:
    assert p.grad is not None
    values = torch.zeros(rows.shape, dtype=p.grad.dtype, device=p.device)
    rows.grad = values.index_copy_(0, places.to(p.device), p.grad.values())


@torch.no_grad()
def _take_out(p: torch.Tensor, rows: torch.Tensor, kind: Rows) -> None:
    values = torch.zeros(rows.shape, dtype=type_of_gradient(p), device=p.device) if rows.grad is None else rows.grad
    indices = kind.indices.to(p.device)
    p.grad = torch.sparse_coo_tensor(indices, values, p.shape, is_coalesced=True, check_invariants=False)


@torch.no_grad()
def _make_dense(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad.to_dense()
