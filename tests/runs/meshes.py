"""Meshes of ranks that one process stands for, one after the other: what a rank has, without the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


@contextmanager
def as_rank(rank: int, *shape: int) -> Iterator[DeviceMesh]:
    """Be a rank of a mesh of that shape, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = torch.Size(shape).numel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield init_device_mesh("cpu", shape)
        finally:
            torch.distributed.destroy_process_group()


def cut(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """Return a tensor as FSDP2 has it: in parts along the last dimension of the mesh, copied along what is before."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
