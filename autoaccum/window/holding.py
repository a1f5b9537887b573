"""What holds a device's memory at a moment: bytes by kind, and the largest tensors.

Everything is read off objects that are there: no operation is run, nothing is allocated on the device, no random number
is drawn. Tensors that a graph alone keeps for its backward are no objects of Python: they are in the rest of the sum.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from autoaccum.data.batches import flatten
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import asked_bytes
from autoaccum.window.job import Job

LARGEST = 20
"""List so many tensors."""
LONGEST = 500
"""Keep so many characters of what the error says."""
KINDS = ("parameters", "buffers", "gradients", "optimizer state", "inputs")
REST = "activations and others"
"""All that tensors hold beside those kinds; on a CPU whatever else the process holds too."""


def held(job: Job, memory: Memory, error: BaseException) -> dict[str, Any]:
    """Return what holds the memory while an error is handled, in plain values that pin nothing.

    Args:
        job: what is computed, and on which device.
        memory: of that device.
        error: what memory ran out with; what its frames hold is still there.
    """
    usage = memory.usage()
    found: dict[int, dict[str, Any]] = {}  # by the address of what holds the bytes
    # Neither a mode nor a class of the user's is to hear that its tensors are looked at.
    with torch._C.DisableTorchFunction():
        for kind, name, tensor in _known(job, error):
            _note(found, job.device, kind, name, tensor)
        by_kind = {kind: sum(one["bytes"] for one in found.values() if one["kind"] == kind) for kind in KINDS}
        for other in _all_tensors():
            _note(found, job.device, REST, None, other)
    largest = sorted(found.values(), key=lambda one: -one["bytes"])[:LARGEST]
    return {
        "device": str(job.device),
        "error": str(error)[:LONGEST],
        "asked_bytes": asked_bytes(error),
        "used_bytes": usage.used_bytes,
        "peak_bytes": usage.peak_bytes,
        "bytes_by_kind": {**by_kind, REST: max(0, usage.allocated_bytes - sum(by_kind.values()))},
        "only_the_allocator_holds_bytes": usage.used_bytes - usage.allocated_bytes,
        "largest_tensors": largest,
        "allocator": _statistics(job.device),
    }


def _known(job: Job, error: BaseException) -> Iterator[tuple[str, str | None, Any]]:
    """Yield (kind, name, tensor) of all that has a name; what several modules share comes once for each."""
    names = {}
    for module in job.modules:
        for name, parameter in module.named_parameters():
            names[id(parameter)] = name
            yield "parameters", name, parameter
            yield "gradients", name, parameter.grad
        for name, buffer in module.named_buffers():
            yield "buffers", name, buffer
    for owner, state in job.optimizer.state.items():
        name = names.get(id(owner), "")
        for entry, value in state.items() if isinstance(state, dict) else ():
            yield "optimizer state", f"{name} {entry}".strip(), value
    for leaf in flatten(_batch_of(error.__traceback__))[0]:
        yield "inputs", None, leaf


def _batch_of(trace: TracebackType | None) -> Any:
    """Return the micro-batch that was run, which is ``batch`` in the function of ours that ran it; None without it."""
    while trace is not None:
        frame = trace.tb_frame
        is_ours = str(frame.f_globals.get("__name__", "")).startswith("autoaccum.")
        if is_ours and "batch" in frame.f_code.co_varnames:
            found = frame.f_locals
            batch = found.get("batch")
            # Up to Python 3.12 this is a copy that the frame keeps, and by it all that the function holds.
            if type(found) is dict:
                found.clear()
            return batch
        trace = trace.tb_next
    return None


def _all_tensors() -> Iterator[torch.Tensor]:
    """Yield all tensors that Python knows of."""
    kinds = set(map(id, _kinds_of(torch.Tensor)))
    for generation in (0, 1, 2):  # one after the other, for the list of all objects takes some MB
        # By the type itself: to ask an object of the user's for its class may run code of his. There are some hundred
        # thousand objects, and a window may take less time than to ask each type whether it is a tensor's.
        yield from [one for one in gc.get_objects(generation) if id(type(one)) in kinds]


def _kinds_of(kind: type) -> list[type]:
    """Return a class and all that derive from it, some of them twice."""
    found = [kind]
    derived: type
    for derived in type.__subclasses__(kind):
        found.extend(_kinds_of(derived))
    return found


def _note(found: dict[int, dict[str, Any]], device: torch.device, kind: str, name: str | None, tensor: Any) -> None:
    """Note what a tensor holds of the device, unless another one was noted that holds the same bytes."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # a sharded one's part on this rank
    if not isinstance(tensor, torch.Tensor):
        return
    with suppress(RuntimeError, NotImplementedError):  # one without a storage: sparse, or made up by a compiler
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and storage.device.type == device.type and address not in found:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = list(tensor.shape)
            found[address] = {"bytes": storage.nbytes(), "shape": shape, "dtype": dtype, "kind": kind, "name": name}


def _statistics(device: torch.device) -> dict[str, int]:
    """Return what the device's allocator counts, as PyTorch names it; nothing of a CPU, which counts nothing."""
    if device.type == "cpu":
        return {}
    with suppress(RuntimeError):  # of an allocator that a user has plugged in
        stats = torch.accelerator.memory_stats(device)
        # Over all pools together: those of small and of large blocks apart are three times as many.
        return {name: int(value) for name, value in stats.items() if ".all." in name or name.startswith("num_")}
    return {}
