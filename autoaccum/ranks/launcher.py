"""What the launcher of this process says: whether there are others, which one this is, and where they meet."""

from __future__ import annotations

import os
import uuid

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from autoaccum.memory import clock

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to each process."""
_BACKENDS = ("gloo", "nccl")
"""Those of a group of the user's own that ranks can tell each other anything by."""


def is_launched() -> bool:
    """Return whether this process is one of several that can find each other: torchrun's, or those of a group."""
    # A group that the user has made says it best: variables may be those of a launcher further out.
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1 and dist.get_backend() in _BACKENDS
    return all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def meet() -> tuple[Store, int, int]:
    """Wait for the processes of the same launch; return (a store of theirs alone, this one's number, how many).

    A launcher that starts processes anew, as torchrun does with ``--max-restarts``, may give them the store of those
    before, with the addresses of processes that are dead (pytorch/pytorch#135712). So each says that it is there under
    a name of its own, and is answered by the first one that runs now.
    """
    store, rank, size = next(rendezvous("env://"))
    if rank:
        own = uuid.uuid4().hex
        store.set(f"autoaccum/hello/{rank}", own)
        launch = store.get(f"autoaccum/welcome/{own}").decode()
        store.set(f"autoaccum/{launch}/there/{rank}", "")
        return PrefixStore(f"autoaccum/{launch}", store), rank, size
    launch, missing = uuid.uuid4().hex, set(range(1, size))
    while missing:
        # Of one that is dead there is a greeting, too, and nobody hears the answer.
        for other in list(missing):
            if store.check([f"autoaccum/hello/{other}"]):
                store.set(f"autoaccum/welcome/{store.get(f'autoaccum/hello/{other}').decode()}", launch)
            if store.check([f"autoaccum/{launch}/there/{other}"]):
                missing.remove(other)
        clock.sleep(0.01)
    return PrefixStore(f"autoaccum/{launch}", store), rank, size


def own_device() -> str | None:
    """Return the accelerator that is this rank's of those of its machine; None where that is not said."""
    local, accelerator = os.environ.get("LOCAL_RANK", ""), torch.accelerator.current_accelerator(check_available=True)
    # Where there are more processes than devices some share one, as tests do.
    if accelerator is None or not local.isdecimal():
        return None
    return f"{accelerator.type}:{int(local) % torch.accelerator.device_count()}"
