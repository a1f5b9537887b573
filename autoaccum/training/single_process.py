"""Whether a run has its process and its model to itself; where it has not, it is refused before anything is trained.

A run seeds and restores the random states of its process, and reads its memory: another one at the same time would
train something else than either would alone. And ranks that train apart, each on all of the data, look like a run that
goes well.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from autoaccum.distributed.fsdp import is_unit, units_of
from autoaccum.distributed.launcher import is_launched
from autoaccum.errors import AlreadyRunningError, ArgumentError
from autoaccum.memory.devices import current_device_kept

F = TypeVar("F", bound=Callable[..., Any])
Ranks = Literal["together", "independent"]
"""How the processes that a launcher has started go together."""

# torchrun and accelerate; Open MPI; MPICH and those that follow it; srun, which alone sets it for the tasks of a step.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers say how many processes they have started."""

# By the modules that classes come from and not by the classes, whose import takes seconds, or is not installed.
_SHARING = (
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.optim",
    "deepspeed",
    "fairscale",
)
"""Where classes of models, parameters and optimizers come from that speak to other ranks in each step."""


def of_ranks(ranks: object, model: object, loss_fn: object, training_step: object, optimizer: object) -> None:
    """Refuse to train as one of several ranks.

    Raises:
        ArgumentError: there are several processes and nothing says that they are independent; or the model, its
            parameters or the optimizer are shared with other ranks.
    """
    if ranks not in ("together", "independent"):
        raise ArgumentError("ranks", ranks, "'together' or 'independent'")
    shared = "It speaks to other ranks whenever a gradient is made, and so would be wrong, or wait for ever, when a "
    shared += "window is cut. "
    # Ranks that train together make up for what one of them leaves of FSDP2's collectives: see ``distributed.fsdp``.
    is_sharded = ranks == "together" and is_launched() and isinstance(model, nn.Module) and bool(units_of(model))
    for module in (model, loss_fn, training_step):
        for part in module.modules() if isinstance(module, nn.Module) else ():
            if module is model and is_sharded and (is_unit(part) or not is_sharing(part)):
                continue
            if is_sharing(part):
                wrapped = f"{shared}Pass the module within it (model.module of DistributedDataParallel)."
                sharded = f"{shared}Start it by torchrun, with ranks='together', or leave out fully_shard."
                cure = sharded if is_unit(part) else wrapped
                raise ArgumentError("model", type(part).__name__, "a model of this process alone", cure)
            # By itself it is a BatchNorm; among several it waits in each forward for as many forwards of the others.
            if isinstance(part, nn.SyncBatchNorm) and is_launched():
                cure = (
                    f"{shared}Leave out convert_sync_batchnorm: each micro-batch has statistics of its own here, and "
                )
                cure += "GroupNorm or LayerNorm have none of several samples."
                raise ArgumentError("model", "SyncBatchNorm", "nn.BatchNorm, where there are several ranks", cure)
            for name, parameter in part.named_parameters(recurse=False):
                if is_sharing(parameter):
                    accepted = "parameters of this process alone"
                    raise ArgumentError("model", f"{name}: {type(parameter).__name__}", accepted, shared.rstrip())
    if is_sharing(optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "one of this process alone", shared.rstrip())
    refuse_strangers(ranks)


def refuse_strangers(ranks: object) -> None:
    """Refuse to train together as one of several processes that cannot find each other.

    Raises:
        ArgumentError: nothing says that they are independent.
    """
    if ranks == "together" and not is_launched() and (found := several_processes()):
        cure = (
            "These processes cannot find each other: each would train by itself on all of the data, and end with "
            "weights of its own. Start them by torchrun; or pass ranks='independent' where each is to train by itself."
        )
        raise ArgumentError("ranks", ranks, f"one process, and {found}", cure)


def refuse_ranks(ranks: object, name: str) -> None:
    """Refuse to be one of several processes in what each does by itself.

    Raises:
        ArgumentError: there are several, and nothing says that they are independent.
    """
    if ranks == "together" and (found := several_processes()):
        cure = (
            f"{name} is for one process, and what it finds holds for ranks too: run it without torchrun. Or pass "
            "ranks='independent' where each is to do so by itself, on a device of its own."
        )
        raise ArgumentError("ranks", ranks, f"one process, and {found}", cure)


def is_sharing(thing: object) -> bool:
    """Return whether an object is of a kind that speaks to other ranks."""
    # Of a subclass too: FSDP2 gives each module a class of its own, beside the module's.
    return any(f"{kind.__module__}.".startswith(f"{name}.") for kind in type(thing).__mro__ for name in _SHARING)


def several_processes() -> str:
    """Say what shows that this process is one of several that were started together; empty where nothing does."""
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_grouped and (size := torch.distributed.get_world_size()) > 1:
        return f"the process group has {size}"
    for name in _SIZES:
        if (value := os.environ.get(name, "")).isdecimal() and int(value) > 1:
            return f"{name} is {value}"
    return ""


_lock = threading.Lock()  # held while the next is looked at and set
_holder: tuple[str, threading.Thread] | None = None  # of this process: what runs, and where


def only_run(name: str, *, picks_device: bool = False) -> Callable[[F], F]:
    """Make a decorator of functions that have the process to themselves: see ``holding``.

    Args:
        name: of the function.
        picks_device: whether it makes a device current, and another one is to be so afterwards.
    """

    def decorate(function: F) -> F:
        # Not the context's own way to decorate: its frame is not ours, and would be named as where warnings come from.
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with holding(name), current_device_kept() if picks_device else nullcontext():
                return function(*args, **kwargs)

        return cast(F, call)

    return decorate


@contextmanager
def holding(name: str) -> Iterator[None]:
    """Have the process to oneself within it.

    Args:
        name: what runs, as users call it, for the error of whoever comes second.

    Raises:
        AlreadyRunningError: something else runs in this process.
    """
    global _holder
    with _lock:
        refuse_beside_a_run(name)
        _holder = name, threading.current_thread()
    try:
        yield
    finally:
        _holder = None


def refuse_beside_a_run(name: str) -> None:
    """Refuse what would disturb a run that goes on in this process, if one does.

    Raises:
        AlreadyRunningError: one does.
    """
    holder = _holder
    if holder is not None:
        running, thread = holder
        raise AlreadyRunningError(name, running, is_within=thread is threading.current_thread())


def _forget() -> None:
    """Make the process free: it is the copy of one, and the run goes on in the other."""
    global _lock, _holder
    # Whoever held the lock is not there to give it back.
    _lock, _holder = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
