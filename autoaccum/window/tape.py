"""The tape of a forward: what it saves for its backward, written down without keeping it, and how much is held at once.

So a forward can be measured in a memory in which training it does not fit. Gradients are not measured but reckoned:
where a tensor is saved, its own and one as large; where a layer has parameters, those of its inputs and outputs and of
its largest parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.window.attributes import Attributes
from autoaccum.window.snapshot import Snapshot
from autoaccum.window.surroundings import records_among


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A moment of a forward, and of the backward that would follow."""

    storage: int = 0
    """The number of the storage that is held from now on; 0 for none, or one that is there anyway."""
    held_bytes: int = 0
    """Bytes of that storage."""
    loaded_bytes: int = 0
    """Bytes that come back to the device for this moment's backward if they were kept elsewhere."""
    working_bytes: int = 0
    """Bytes of gradients in this moment's backward, besides those of parameters that are accumulated."""
    input_of: str = ""
    """The block to which it is an input, which is held where that is checkpointed."""
    within: tuple[tuple[str, int], ...] = ()
    """The blocks whose forward it lies in, from the outermost: its name, the number of the call."""


class _Tape:
    """The entries of a forward, written by hooks while it runs."""

    def __init__(self, device: torch.device, there_anyway: Sequence[torch.Tensor]) -> None:
        """Begin a tape of what is saved on the device, besides tensors that are there anyway."""
        self.entries: list[Entry] = []
        self._device = device
        self._within: list[tuple[str, int]] = []  # the blocks whose forward is running: see ``Entry.within``
        self._count = 0  # storages that have a number
        # By id, and the object compared: a storage that nobody holds is freed, and the next one may get its id.
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for tensor in there_anyway:
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            self._numbers[id(storage)] = (weakref.ref(storage), 0)

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the storage's number, a new one where it has none; 0 for those that are there anyway."""
        known = self._numbers.get(id(storage))
        if known is None or known[0]() is not storage:
            self._count += 1
            known = self._numbers[id(storage)] = (weakref.ref(storage), self._count)
        return known[1]

    def _note(self, tensor: torch.Tensor, *, input_of: str = "", is_saved: bool = False) -> None:
        """Write down a tensor that is held from now on, by the graph or as the input of a block."""
        if tensor.device != self._device or tensor.layout is not torch.strided:  # others have no one storage
            return
        storage = tensor.untyped_storage()
        number = self._number(storage)
        # Where it is read in a backward, there are its own gradient and the one that this is made from. Integers have
        # none; those of parameters are reckoned with their layers.
        gradients = 2 * tensor.nbytes if is_saved and number and tensor.is_floating_point() else 0
        self.entries.append(
            Entry(
                storage=number,
                held_bytes=storage.nbytes() if number else 0,
                loaded_bytes=tensor.nbytes if is_saved else 0,
                working_bytes=gradients,
                input_of=input_of,
                within=tuple(self._within),
            )
        )

    def pack(self, tensor: torch.Tensor) -> None:
        """Write down a tensor that autograd saves; return nothing, so that the graph holds nothing."""
        self._note(tensor, is_saved=True)

    def enter(self, block: str, inputs: Any) -> None:
        """Write down the inputs of a block of that name, whose forward begins."""
        for tensor in _tensors(inputs):
            self._note(tensor, input_of=block)
        # The length of the tape tells calls apart as well as a counter would, but for two blocks without any entry.
        self._within.append((block, len(self.entries)))

    def leave(self) -> None:
        """Go on behind the innermost block."""
        self._within.pop()

    def use_parameters(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        """Write down the gradients that a layer with parameters works on: of its largest parameter, inputs, outputs."""
        # A parameter's gradient is made before it is added to the one of the micro-batches before.
        own = max(p.nbytes for p in layer.parameters(recurse=False) if p.requires_grad)
        around = sum(t.nbytes for t in _tensors((inputs, outputs)) if t.requires_grad)
        self.entries.append(Entry(working_bytes=own + around, within=tuple(self._within)))


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _unpack(_: object) -> torch.Tensor:
    """Refuse a backward: there is nothing to give it."""
    raise RuntimeError("a backward within a forward of which nothing was kept")


def record(
    forward: Callable[[], Any],
    modules: Sequence[nn.Module],
    batch: Any,
    device: torch.device,
    blocks: Mapping[str, nn.Module] = MappingProxyType({}),
) -> tuple[Entry, ...]:
    """Run a forward, and return what it saves on the device, in order; it must not go through a backward itself.

    Args:
        forward: computes the loss of the batch.
        modules: those that it uses; their parameters and buffers are there anyway.
        batch: what it computes the loss of, which is there anyway too.
        device: where to look.
        blocks: what might be checkpointed, by names.
    """
    there_anyway = _tensors(batch)
    layers: dict[int, nn.Module] = {}  # each once, by its id
    for root in modules:
        there_anyway += [*root.parameters(), *root.buffers()]
        layers |= {id(m): m for m in root.modules()}
    tape = _Tape(device, there_anyway)
    with ExitStack() as stack:
        for name, block in blocks.items():

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                tape.enter(name, (args, kwargs))

            stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(block.register_forward_hook(lambda *_: tape.leave()))
        # These hooks run after those of the blocks: what a block that is itself a layer works on is written behind it.
        for layer in layers.values():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                stack.enter_context(layer.register_forward_hook(tape.use_parameters))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(tape.pack, _unpack))
        forward()
    return tuple(tape.entries)


def most_held(
    entries: Sequence[Entry], *, checkpointed: Collection[str] = (), elsewhere: bool = False, above_bytes: int = -1
) -> int:
    """Return the most bytes that are held at once for a backward, and by it.

    Args:
        entries: the tape of its forward.
        checkpointed: the blocks of which each keeps its inputs, and the rest while it is computed again.
        elsewhere: whether what the forward saves is kept on the CPU, and comes back one tensor at a time.
        above_bytes: of storages that are larger than that; -1: of all, and of what is there anyway too.
    """
    # A backward goes through the tape from its end, and what a moment needs is held from the forward on: so at each
    # moment there is all that the tape had up to it. Storages, each counted once: those held from the forward on
    # (outer), and those of the checkpointed block that is computed again just then (inner).
    outer: set[int] = set()
    inner: set[int] = set()
    outer_bytes = inner_bytes = most = 0
    call = None  # the number of the checkpointed block's call that the entry lies in
    for entry in entries:
        before, call = call, _call_within(entry, checkpointed)
        if call != before:
            inner, inner_bytes = set(), 0
        # Inputs are held by checkpoints alone. Of nested blocks only the outermost is checkpointed.
        if entry.input_of and (entry.input_of not in checkpointed or call is not None):
            continue
        goes = elsewhere and entry.held_bytes > above_bytes
        if call is None and entry.storage not in outer:
            outer.add(entry.storage)
            outer_bytes += 0 if goes else entry.held_bytes
        elif call is not None and (goes or entry.storage not in outer) and entry.storage not in inner:
            inner.add(entry.storage)
            inner_bytes += entry.held_bytes
        # What is computed again inside a block is on the device in any case.
        held = inner_bytes + outer_bytes
        if goes and call is None:
            held += entry.loaded_bytes
        most = max(most, held + entry.working_bytes)
    return most


def _call_within(entry: Entry, blocks: Collection[str]) -> int | None:
    """Return the number of the outermost call of one of these blocks that the entry lies in; None for none."""
    for name, number in entry.within:
        if name in blocks:
            return number
    return None


@contextmanager
def no_trace(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Put back, at its end, buffers, random states, gradients, and what modules keep in attributes and records."""
    snapshot = Snapshot(modules, device)
    snapshot.take()
    layers: dict[int, nn.Module] = {}  # each once, by its id
    for root in modules:
        layers |= {id(m): m for m in root.modules()}
    records = records_among(value for layer in layers.values() for value in vars(layer).values())
    attributes = Attributes([*layers.values(), *records])
    gradients = [(p, p.grad) for root in modules for p in root.parameters()]
    try:
        yield
    finally:
        # The tensors themselves, not their values: a forward makes no gradients, but may set them to None.
        for p, gradient in gradients:
            p.grad = gradient
        attributes.restore()
        snapshot.restore()
