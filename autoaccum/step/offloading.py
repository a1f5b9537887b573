"""Keeps what forwards save for their backward on the host until that asks for it, with the same bits.

PyTorch's ``save_on_cpu`` gives tensors back with other strides, for which kernels may come to other bits; it copies
parameters as well, and notices no write to what it has copied.

By storage and not by tensor: of views that share one, such as the queries, keys and values of one product, one copy is
made, and all are views of what comes back. A storage is known by the object and by the version of what is written to
it, never by its address: the next tensor may get the address of one that is gone.

Copies need not be waited for. They are made on the stream that computes, and not on one of their own: so a tensor that
is let go as soon as its copy is under way is not written over before the copy has read it, and what comes back is there
for the kernels behind it, with no event to record and none to forget. What a stream of its own would gain, that copies
run beside kernels, it would lose where it is needed: memory that another stream still reads is not free yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.step.loss_graph import OwnHooks
from autoaccum.step.terms import LossOf

ABOVE_BYTES = 2**20
"""Leave storages of no more than these bytes where they are: their copies would take longer to start than to run."""


def has_host_memory(device: torch.device) -> bool:
    """Return whether the host's memory is another one than the device's, so that it has room of its own."""
    # Metal's devices share the memory of the processor.
    return device.type not in ("cpu", "mps")


class Offloading:
    """The saved tensors of one run's forwards, and where they are until backward."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Set up.

        Args:
            modules: all that forwards may run; their parameters and buffers are there anyway.
            device: where tensors are to make room.
        """
        self._modules, self._device = tuple(modules), device

    def of_loss(self, loss_of: LossOf) -> LossOf:
        """Return a loss whose forward saves its tensors on the host, where it is computed for a backward."""

        def offloaded(model: Any, batch: Any) -> Any:
            if not torch.is_grad_enabled():  # in a validation
                return loss_of(model, batch)
            with self.taking(batch):
                return loss_of(model, batch)

        return offloaded

    @contextmanager
    def taking(self, batch: Any) -> Iterator[None]:
        """Keep on the host what is saved within this, but for the batch, which is there anyway."""
        # Made anew for each forward: parameters may be other tensors by then, and copies are of one graph.
        forward = _Forward(self._device, _storages(self._modules, batch))
        with OwnHooks(forward.pack, _unpack):
            yield


class _Forward:
    """One forward that saves its tensors on the host."""

    def __init__(self, device: torch.device, there_anyway: dict[int, torch.UntypedStorage]) -> None:
        self._device = device
        self._there_anyway = there_anyway
        # Weakly, for a copy is to go with the graph that saved it.
        self._copies: weakref.WeakValueDictionary[tuple[int, int, int], _Copy] = weakref.WeakValueDictionary()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor goes to the host."""
        # Of sparse ones, of subclasses and of lazy conjugates a storage and strides do not tell all.
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._device or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > ABOVE_BYTES and self._there_anyway.get(id(storage)) is not storage

    def pack(self, tensor: torch.Tensor) -> _Kept | _Moved:
        """Return what the graph is to hold in the place of a tensor."""
        if not self.takes(tensor):
            # Detached, for a node that holds its own output would never be freed.
            return _Kept(tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        # Of one stream each, for what one has copied is not there for another until both have waited.
        key = id(storage), tensor._version, _stream_of(self._device)
        copy = self._copies.get(key)
        if copy is None or copy.original() is not storage:
            copy = self._copies[key] = _Copy(storage)
        return _Moved(copy, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _Copy:
    """The bits of a storage as they were at one moment, on the host; brought back once for all who hold them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # Weakly, for to make room for others is what this is for.
        self.original = weakref.ref(storage)
        self.device = storage.device
        self._host = host_bytes(storage.nbytes(), storage.device)
        self._host.copy_(bytes_of(storage), non_blocking=self._host.is_pinned())
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def back(self) -> torch.UntypedStorage:
        """Return a storage of the device with these bits: the last one, while somebody holds it."""
        there = None if self._back is None else self._back()
        if there is None:
            there = on_device(self._host, self.device)
            self._back = weakref.ref(there)
        return there


# Tuples, by which whoever reads a graph knows that to ask for what they stand for computes nothing again.


class _Moved(NamedTuple):
    """A tensor on the host: a view of a storage's copy."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A tensor that stays where it is."""

    tensor: torch.Tensor
    version: int


def _unpack(packed: _Kept | _Moved) -> torch.Tensor:
    """Return the tensor that was saved."""
    if isinstance(packed, _Moved):
        empty = torch.empty(0, dtype=packed.dtype, device=packed.copy.device)
        return empty.set_(packed.copy.back(), packed.offset, packed.size, packed.stride)
    # Autograd itself looks at versions only where no hook is.
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{packed.tensor.dtype} tensor of the shape {list(packed.tensor.shape)} is at version "
            f"{packed.tensor._version}; expected version {packed.version} instead."
        )
    return packed.tensor


def _storages(modules: Sequence[nn.Module], batch: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of parameters, of buffers and of a batch, by their ids."""
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return {id(storage): storage for storage in (tensor.untyped_storage() for tensor in plain)}


def _stream_of(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as one row of bytes, which shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of the host for a device's bytes: pinned, as far as there is any, so that no copy has to wait."""
    if has_host_memory(device):
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except Exception as error:  # of a type that depends on the device
            if not is_out_of_memory(error):
                raise
    # The kernel lets a process pin less than it may have; with this copies wait.
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def on_device(host: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    """Return a new storage of the device with the bytes of the host."""
    there = torch.empty(host.numel(), dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=host.is_pinned())
    return there.untyped_storage()
