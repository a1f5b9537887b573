"""What the launcher of this process says: whether there are others, which one this is, and where they meet."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to each process."""
_BACKENDS = ("gloo", "nccl")
"""Those of a group of the user's own that ranks can tell each other anything by."""


def is_launched() -> bool:
    """Return whether this process is one of several that can find each other: torchrun's, or those of a group."""
    # A group that the user has made says it best: variables may be those of a launcher further out.
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1 and not backends().isdisjoint(_BACKENDS)
    return all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def backends(group: dist.ProcessGroup | None = None, kind: str | None = None) -> frozenset[str]:
    """Return the backends of a group, or of all processes: for tensors on one kind of device, or on any.

    By device, for ``get_backend`` says "undefined" where whoever made the group named none, as ``fully_shard`` does.
    """
    found = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return frozenset(backend for device, _, backend in found if kind in (None, device))


def begin_group(backend: str, to_come: datetime.timedelta) -> None:
    """Make PyTorch's process group of all that were launched together, which are waited for for so long at most."""
    store, rank, size = next(rendezvous("env://", timeout=to_come))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Ranks that torchrun starts anew find the addresses of dead ones in its store (pytorch/pytorch#135712).
        store = PrefixStore(f"autoaccum/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=to_come)


def own_device() -> str | None:
    """Return the accelerator that is this rank's of those of its machine; None where that is not said."""
    local, accelerator = os.environ.get("LOCAL_RANK", ""), torch.accelerator.current_accelerator(check_available=True)
    # Where there are more processes than devices some share one, as tests do.
    if accelerator is None or not local.isdecimal():
        return None
    return f"{accelerator.type}:{int(local) % torch.accelerator.device_count()}"
