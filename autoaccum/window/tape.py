"""What a forward saves for its backward, written down without keeping it; and how much of it is held at once.

So a forward can be measured in a memory in which training it does not fit. Gradients are not measured but reckoned:
where a tensor is saved, its own and one as large; where a layer has parameters, those of its inputs and outputs and of
its largest parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.window.attributes import Attributes
from autoaccum.window.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A moment of a forward, and of the backward that would follow."""

    storage: int = 0
    """The number of the storage that is held from now on; 0 for none, or one that is there anyway."""
    held_bytes: int = 0
    """Its size."""
    loaded_bytes: int = 0
    """What comes back to the device for this moment's backward if it was kept elsewhere."""
    working_bytes: int = 0
    """Gradients that are there in this moment's backward, besides those of parameters that are accumulated."""
    input_of: str = ""
    """The list of blocks to one of which it is an input, which is held where that is checkpointed."""
    within: tuple[tuple[str, int], ...] = ()
    """The blocks whose forward it lies in, from the outermost: the name of the list, the number of the call."""


class _Tape:
    def __init__(self, device: torch.device, there_anyway: Sequence[torch.Tensor]) -> None:
        self.entries: list[Entry] = []
        self._device = device
        self._within: list[tuple[str, int]] = []
        self._count = 0
        # By id, and the object compared: a storage that nobody holds is freed, and the next one may get its id.
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for tensor in there_anyway:
            storage = tensor.untyped_storage()
            self._numbers[id(storage)] = (weakref.ref(storage), 0)

    def _number(self, storage: torch.UntypedStorage) -> int:
        known = self._numbers.get(id(storage))
        if known is None or known[0]() is not storage:
            self._count += 1
            known = self._numbers[id(storage)] = (weakref.ref(storage), self._count)
        return known[1]

    def _note(self, tensor: torch.Tensor, *, input_of: str = "", is_saved: bool = False) -> None:
        if tensor.device != self._device:
            return
        storage = tensor.untyped_storage()
        number = self._number(storage)
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
        self._note(tensor, is_saved=True)

    def enter(self, blocks: str, inputs: Any) -> None:
        for tensor in _tensors(inputs):
            self._note(tensor, input_of=blocks)
        self._within.append((blocks, len(self.entries)))

    def leave(self) -> None:
        self._within.pop()

    def use_parameters(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        """A parameter's gradient is made before it is added to the one of the micro-batches before."""
        own = max(p.nbytes for p in layer.parameters(recurse=False) if p.requires_grad)
        around = sum(t.nbytes for t in _tensors((inputs, outputs)) if t.requires_grad)
        self.entries.append(Entry(working_bytes=own + around, within=tuple(self._within)))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def lists_of_blocks(modules: Sequence[nn.Module]) -> dict[str, list[nn.Module]]:
    """The children of each ModuleList and Sequential of several, by its name: "model.layers"."""
    found = {name: m for root in reversed(modules) for name, m in root.named_modules(prefix="model")}
    lists = {name: list(m) for name, m in found.items() if isinstance(m, nn.ModuleList | nn.Sequential)}
    return {name: blocks for name, blocks in lists.items() if len(blocks) > 1}


def _unpack(_: object) -> torch.Tensor:
    raise RuntimeError("a backward within a forward of which nothing was kept")


def record(
    forward: Callable[[], Any], modules: Sequence[nn.Module], batch: Any, device: torch.device
) -> tuple[Entry, ...]:
    """What a forward saves on the device, in order; it must not go through a backward itself.

    Args:
        forward: computes the loss of the batch.
        modules: that it uses; their parameters and buffers are there anyway.
        batch: so is this.
        device: where to look.
    """
    owned = [t for root in modules for t in (*root.parameters(), *root.buffers())]
    tape = _Tape(device, [*owned, *_tensors(batch)])
    with ExitStack() as stack:
        for name, blocks in lists_of_blocks(modules).items():
            for block in blocks:
                stack.enter_context(
                    block.register_forward_pre_hook(
                        lambda _, args, kwargs, name=name: tape.enter(name, (args, kwargs)), with_kwargs=True
                    )
                )
                stack.enter_context(block.register_forward_hook(lambda *_: tape.leave()))
        for layer in {id(m): m for root in modules for m in root.modules()}.values():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                stack.enter_context(layer.register_forward_hook(tape.use_parameters))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(tape.pack, _unpack))
        forward()
    return tuple(tape.entries)


def most_held(entries: Sequence[Entry], *, checkpointed: str | None = None, elsewhere: bool = False) -> int:
    """The most bytes that are held at once for a backward, and by it.

    Args:
        entries: of its forward.
        checkpointed: the list of blocks of which each keeps its inputs, and the rest while it is computed again.
        elsewhere: what the forward saves is kept on the CPU, and comes back one tensor at a time.
    """
    outer: set[int] = set()
    inner: set[int] = set()
    outer_bytes = inner_bytes = most = 0
    call = None
    for entry in entries:
        before, call = call, next((number for name, number in entry.within if name == checkpointed), None)
        if call != before:
            inner, inner_bytes = set(), 0
        if entry.input_of and (entry.input_of != checkpointed or call is not None):
            continue
        if call is None and entry.storage not in outer:
            outer.add(entry.storage)
            outer_bytes += entry.held_bytes
        elif call is not None and entry.storage not in outer and entry.storage not in inner:
            inner.add(entry.storage)
            inner_bytes += entry.held_bytes
        held = inner_bytes
        if not elsewhere:
            held += outer_bytes
        elif call is None:
            held = entry.loaded_bytes
        most = max(most, held + entry.working_bytes)
    return most


@contextmanager
def no_trace(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Buffers, random states, gradients and what modules keep in attributes are put back after it."""
    snapshot = Snapshot(modules, device)
    snapshot.take()
    attributes = Attributes({id(m): m for root in modules for m in root.modules()}.values())
    gradients = [(p, p.grad) for root in modules for p in root.parameters()]
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        attributes.restore()
        snapshot.restore()
