"""The modules of a model that FSDP2 shards, and the tensors of which each rank has a part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.errors import ArgumentError


def is_unit(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which is slow to import, and is there where it was used
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that ``fully_shard`` was called on, in the order of its modules."""
    return [module for module in model.modules() if is_unit(module)]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; of one that ``fully_shard`` was called on that which it had before."""
    # FSDP2 gives each such module a class of its own, made of a class of its own and that one.
    return next(kind for kind in type(module).__mro__ if not (is_unit(module) and _is_of_fsdp(kind)))


def _is_of_fsdp(kind: type) -> bool:
    return issubclass(kind, sys.modules["torch.distributed.fsdp"].FSDPModule)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in parts on several ranks, of which this one has but its own."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies on this rank: all of it, unless it is distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def check(model: nn.Module, units: Sequence[Any], num_ranks: int) -> None:
    """Refuse models that are sharded otherwise than by FSDP2 over all ranks.

    Raises:
        ArgumentError: the model is one of these.
    """
    for unit in units[:1]:
        if not hasattr(unit, "reset_iter_state"):
            raise ArgumentError("model", f"torch {torch.__version__}", "PyTorch 2.13 for a model sharded by FSDP2")
    for name, p in model.named_parameters():
        if not is_distributed(p):
            cure = "Call fully_shard on the whole model, after its blocks."
            raise ArgumentError("model", name, "parameters that are all sharded, where any is", cure)
        # The last dimension of a mesh is that of the parts, and what comes before it of copies. Tensor parallelism has
        # parts in both, and ranks that read the same samples.
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        is_known = placements[-1].is_shard() and all(placement.is_replicate() for placement in placements[:-1])
        if mesh.size() != num_ranks or mesh.size(-1) < 2 or mesh.ndim > 2 or not is_known:
            accepted = f"a model sharded over all {num_ranks} ranks, by FSDP2 alone"
            raise ArgumentError("model", f"{name}: {placements} over {tuple(mesh.shape)}", accepted)


def forget(unit: Any) -> None:
    """Drop what FSDP2 keeps of a micro-batch, and ``reset_iter_state`` leaves there.

    A gradient that autograd has made of a unit, and that was not scattered, would be added to the next one.
    """
    # There is no public name for these. Parameters as a forward finds them live as long as the model.
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for part in group.fsdp_params:
            if hasattr(part, "_unsharded_param"):
                part._unsharded_param.grad = None
            part.unsharded_accumulated_grad = None
            part.grad_offload_event = None
            # Gathered, and left before it was used: its memory would stay.
            part.free_unsharded_param()
