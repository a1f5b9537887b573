"""What the launcher of this process says: whether there are others, which one this is, and where they meet."""

from __future__ import annotations

import datetime
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from autoaccum.distributed.watch import Place, Watch

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to each process."""
_BACKENDS = ("gloo", "nccl")
"""Those of a group of the user's own that ranks can tell each other anything by."""
PATIENCE = 600.0
"""Seconds that processes may begin apart, as torchrun's agents may."""


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


def meet(watch: Watch, pause: Callable[[int], None]) -> tuple[Store, int, int]:
    """Wait for the processes of the same launch; return (a store of theirs alone, this one's number, how many).

    A launcher that starts processes anew, as torchrun does with ``--max-restarts``, may give them the store of those
    before, with the addresses of processes that are dead (pytorch/pytorch#135712). So each says that it is there under
    a name of its own, and is answered by the first one that runs now.

    Args:
        watch: of this process, which begins when all are there.
        pause: waits a moment for a rank, or raises where there is no use in that.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, own = _store(rank, size), uuid.uuid4().hex
    launch = own if rank == 0 else _welcomed(store, rank, own, watch, pause)
    if rank == 0:
        places = _welcome(store, size, launch, watch, pause)
        store.set(f"autoaccum/{launch}/places", json.dumps([astuple(place) for place in places]))
    else:
        _await(store, f"autoaccum/{launch}/places", pause)
        places = [Place(*found) for found in json.loads(store.get(f"autoaccum/{launch}/places"))]
    watch.begin(rank, places)
    return PrefixStore(f"autoaccum/{launch}", store), rank, size


def _store(rank: int, size: int) -> Store:
    """Return the store by which processes find each other: the launcher's, or else the first one's."""
    # Not by PyTorch's ``rendezvous``, whose first process waits in C++ until all have come, and knows of none of them.
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not _is_launchers_store(),
        timeout=datetime.timedelta(seconds=PATIENCE),
        wait_for_workers=False,
        multi_tenant=not _is_launchers_store(),
    )


def _is_launchers_store() -> bool:
    """Return whether the store is the launcher's, which may be there longer than the processes that it has started."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _welcomed(store: Store, rank: int, own: str, watch: Watch, pause: Callable[[int], None]) -> str:
    """Say that this process is there, and return the name of the launch once the first one has answered."""
    store.set(f"autoaccum/hello/{rank}", json.dumps([own, astuple(watch.place)]))
    _await(store, f"autoaccum/welcome/{own}", pause)
    launch = store.get(f"autoaccum/welcome/{own}").decode()
    store.set(f"autoaccum/{launch}/there/{rank}", "")
    return launch


def _welcome(store: Store, size: int, launch: str, watch: Watch, pause: Callable[[int], None]) -> list[Place]:
    """Answer all that say they are there, as the first process; return the places of all once they have heard it."""
    places, answered = {0: watch.place}, dict.fromkeys(range(1, size), "")
    missing = set(answered)
    while missing:
        # Of one that is dead there is a greeting, too, and nobody hears the answer.
        for other in list(missing):
            if store.check([f"autoaccum/hello/{other}"]):
                own, place = json.loads(store.get(f"autoaccum/hello/{other}"))
                if own != answered[other]:
                    answered[other], places[other] = own, Place(*place)
                    store.set(f"autoaccum/welcome/{own}", launch)
            if store.check([f"autoaccum/{launch}/there/{other}"]):
                missing.remove(other)
        pause(min(missing, default=0))
    return [places[rank] for rank in range(size)]


def _await(store: Store, key: str, pause: Callable[[int], None]) -> None:
    """Wait until the first process has set a key."""
    while not store.check([key]):
        pause(0)


def own_device() -> str | None:
    """Return the accelerator that is this rank's of those of its machine; None where that is not said."""
    local, accelerator = os.environ.get("LOCAL_RANK", ""), torch.accelerator.current_accelerator(check_available=True)
    # Where there are more processes than devices some share one, as tests do.
    if accelerator is None or not local.isdecimal():
        return None
    return f"{accelerator.type}:{int(local) % torch.accelerator.device_count()}"
