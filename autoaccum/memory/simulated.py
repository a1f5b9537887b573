"""A device memory simulated on the CPU, and an out-of-memory error at a chosen operation: for tests.

Both are dispatch modes: PyTorch hands them every operation of this thread, forward and backward (on the CPU the
backward pass runs in the thread that called it). What an operation allocates and frees inside itself is not seen.
A function under ``torch.compile`` runs uncompiled inside them: PyTorch compiles nothing while such a mode is on.
"""

# PyTorch's dispatch modes carry no annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from autoaccum._units import format_bytes
from autoaccum.memory.base import Retries, Usage


class MemorySimulation(TorchDispatchMode):
    """A dispatch mode in which the CPU's tensors live in a memory of ``limit`` bytes.

    A storage is counted once, however many tensors share it, from the first operation that takes or returns it until it
    is freed. Of nested simulations only the innermost counts and raises.

    Attributes:
        limit: bytes there are; may be changed at any time.
        used: bytes of the live storages seen so far.
        peak: the most that ``used`` was since ``reset_peak``.
        retries: times that the allocator had to try again; always 0 unless you raise it, as if memory had got short.
    """

    _counts = "cpu"  # the type of the device whose storages are counted
    _block_bytes = 1  # of which an allocation is a multiple

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.retries = 0
        # Bytes by the storage's id: PyTorch keeps the Python object of a storage, and so its id, for as long as the
        # storage lives. A reference to the storage itself would keep it alive.
        self._counted: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self.peak = self.used

    def __enter__(self) -> MemorySimulation:
        super().__enter__()
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.pop()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _active[-1] is not self:
            return _run(func, args, kwargs)
        # The inputs exist, so they are counted even when they do not fit; the outputs only when they do.
        more_bytes, grown = self._growth((args, tuple(kwargs.values())))
        self._count(more_bytes, grown)
        self._require(more_bytes, self.used)
        result = _run(func, args, kwargs)
        more_bytes, grown = self._growth((result,))
        try:
            self._require(more_bytes, self.used + more_bytes)
        except torch.OutOfMemoryError:
            # The traceback keeps this frame: do not let it keep the tensors that did not fit.
            del result, grown
            raise
        self._count(more_bytes, grown)
        return result

    def _growth(self, values: Iterable[object]) -> tuple[int, list[tuple[torch.UntypedStorage, int]]]:
        """Return the bytes by which the storages of ``values`` outgrow what is counted, in all and each."""
        storages = {id(storage): storage for storage in _storages(values, self._counts)}
        grown = []
        for key, storage in storages.items():
            # Below 0 where ``resize_`` has made a storage smaller.
            delta = self._rounded(storage.nbytes()) - self._counted.get(key, 0)
            if delta:
                grown.append((storage, delta))
        return sum(delta for _, delta in grown), grown

    def _count(self, more_bytes: int, grown: list[tuple[torch.UntypedStorage, int]]) -> None:
        """Count what ``_growth`` returned, until the storages are freed."""
        for storage, delta in grown:
            key = id(storage)
            if key not in self._counted:
                # Not at exit: the interpreter is shutting down then, and nobody reads the count any more.
                weakref.finalize(storage, self._forget, key).atexit = False
            self._counted[key] = self._counted.get(key, 0) + delta
        self.used += more_bytes
        self.peak = max(self.peak, self.used)

    def _rounded(self, num_bytes: int) -> int:
        """Return the bytes of the blocks that an allocation of so many takes."""
        return -(-num_bytes // self._block_bytes) * self._block_bytes

    def _forget(self, key: int) -> None:
        self.used -= self._counted.pop(key)

    def _require(self, asked: int, needed: int) -> None:
        """Raise the error of a device that is asked for more, and would need more in all than it has."""
        # Who asks for nothing gets it, also when the limit was lowered below what is in use: so does a real device.
        if asked > 0 and needed > self.limit:
            raise torch.OutOfMemoryError(
                f"Simulated device out of memory. Tried to allocate {format_bytes(asked)} ({asked} bytes). The device "
                f"has a capacity of {format_bytes(self.limit)} ({self.limit} bytes), of which "
                f"{format_bytes(needed - asked)} ({needed - asked} bytes) are in use."
            )


class OutOfMemoryAt(TorchDispatchMode):
    """A dispatch mode that raises ``torch.OutOfMemoryError`` in place of one operation, once; ``None`` only counts.

    Attributes:
        operations: operations seen so far, the one that raised included.
    """

    def __init__(self, operation: int | None) -> None:
        super().__init__()
        self._operation = operation  # the number of the one to fail, from 1
        self.operations = 0

    def __enter__(self) -> OutOfMemoryAt:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        if self.operations == self._operation:
            raise torch.OutOfMemoryError(f"Simulated out of memory at operation {self.operations}, {func}.")
        return _run(func, args, kwargs or {})


class SimulatedMemory:
    """The simulated memory as the memory of a device."""

    enforced, can_enforce = True, False
    reading_seconds = 0.0  # each figure is an attribute: every window may be measured

    def __init__(self, simulation: MemorySimulation) -> None:
        self._simulation = simulation
        self._retries = Retries()
        self._most = simulation.limit

    def limit(self) -> int:
        """Return the simulation's limit: nothing else uses its memory."""
        self._most = max(self._most, self._simulation.limit)
        return self._simulation.limit

    def capacity(self) -> int:
        """Return the highest limit that was seen: whoever lowers it stands for others, who may give memory back."""
        return max(self._most, self._simulation.limit)

    def enforce(self, limit_bytes: int | None) -> None:
        """Do nothing: the simulation has its own limit, as a device has its size."""

    def usage(self) -> Usage:
        """Return the simulation's figures."""
        used, peak = self._simulation.used, self._simulation.peak
        return Usage(used, peak, used, peak, retries=self._simulation.retries)

    def used(self) -> int:
        """Return the bytes of the live storages seen so far."""
        return self._simulation.used

    def peak(self) -> int:
        """Return the most bytes since ``reset_peak``."""
        return self._simulation.peak

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self._simulation.reset_peak()

    def release(self) -> None:
        """Do nothing: there is no cache."""

    def strained(self) -> str | None:
        """Say by how much the simulation's ``retries`` have risen, if so."""
        return self._retries.reason(self._simulation.retries)


_active: list[MemorySimulation] = []
"""Those that are entered, the innermost last."""


def active_simulation() -> MemorySimulation | None:
    """Return the innermost simulation that is active, if any."""
    return _active[-1] if _active else None


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; count its writes as PyTorch does where no mode is on."""
    result = func(*args, **kwargs)
    # Within a dispatch mode the version counters of the tensors in a list stay as they are, those of ``_foreach_add_``
    # say; and by them a step of an optimizer that failed is known to have written nothing.
    for index, name in _written_lists(func):
        torch.autograd.graph.increment_version(args[index] if index < len(args) else kwargs.get(name, ()))
    return result


@cache
def _written_lists(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of an operation's arguments that are lists of tensors which it writes to."""
    # A fused kernel is left out: nor does PyTorch count its writes.
    schema = func._schema
    if "foreach" not in schema.name:
        return ()
    found = [(index, argument) for index, argument in enumerate(schema.arguments)]
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def _storages(values: Iterable[object], kind: str) -> Iterator[torch.UntypedStorage]:
    """Yield the storages on a kind of device of all tensors in nested lists and tuples, empty ones left out."""
    # Operators take and return nothing but lists and tuples, and this runs for each operator: no general pytree.
    for value in values:
        if isinstance(value, list | tuple):
            yield from _storages(value, kind)
        elif isinstance(value, torch.Tensor):
            yield from _storages_of(value, kind)


def _storages_of(tensor: torch.Tensor, kind: str) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that one tensor is made of: several for sparse layouts and for wrappers of other tensors."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        yield from _storages([getattr(tensor, name) for name in names], kind)
    elif tensor.layout == torch.sparse_coo:
        yield from _storages((tensor._indices(), tensor._values()), kind)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from _storages((tensor.crow_indices(), tensor.col_indices(), tensor.values()), kind)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from _storages((tensor.ccol_indices(), tensor.row_indices(), tensor.values()), kind)
    else:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # an opaque layout (oneDNN's), or a wrapper without a storage: what it holds cannot be asked for
        # The storage's device and not the tensor's: a fake tensor says "cpu" and holds nothing.
        if storage.device.type == kind and storage.nbytes() > 0:
            yield storage
