"""Keeps an optimizer's state on the host while a window runs, and has it back on the device for the step.

Nothing of the state is needed before the step, and of Adam it is twice as large as the parameters. The tensors stay the
objects that they are, and so do their version counters; only what they view changes. So the step is the one that it is
without, fused kernels included, and between windows there is no difference to be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autoaccum.data.batches import flatten
from autoaccum.window.offloading import ABOVE_BYTES, bytes_of, host_bytes, on_device


class _View(NamedTuple):
    """A tensor of the state, and where in its storage it lies."""

    tensor: torch.Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def move(self, storage: torch.UntypedStorage) -> None:
        """Make it the same view of another storage."""
        # Through ``.data``: the object, its version and all that refers to it stay what they are.
        moved = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        self.tensor.data = moved.set_(storage, self.offset, self.size, self.stride)


class _Away(NamedTuple):
    """A storage that is on the host, and what is a view of it."""

    views: list[_View]
    host: torch.Tensor
    original: weakref.ref[torch.UntypedStorage]


class OptimizerState:
    """The state of one run's optimizer, on the device or, within windows, on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Set up, with nothing moved.

        Args:
            optimizer: whose state it is.
            modules: whose parameters and buffers stay where they are, be they in the state as well.
            device: where the state is to make room.
        """
        self._optimizer, self._modules, self._device = optimizer, tuple(modules), device
        self._away: list[_Away] = []
        # By the first tensor of each storage. Kept between windows, for to pin memory takes longer than to fill it.
        self._staging: Any = WeakTensorKeyDictionary()

    @torch.no_grad()
    def take_out(self) -> None:
        """Move what is on the device to the host; all of it or, where the host has no memory, nothing.

        Raises:
            RuntimeError: the host has no memory.
        """
        found = self._there()
        # All that is needed for it is had before anything is moved.
        for storage, views in found:
            held = self._staging.get(views[0].tensor)
            if held is None or held.numel() != storage.nbytes():
                self._staging[views[0].tensor] = host_bytes(storage.nbytes(), self._device)
        away = []
        for storage, views in found:
            host = self._staging[views[0].tensor]
            host.copy_(bytes_of(storage), non_blocking=host.is_pinned())
            away.append(_Away(views, host, weakref.ref(storage)))
        # A callback may read the state, or save it, in the midst of a window: by then it has to have arrived.
        if away and self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        for one in away:
            self._away.append(one)
            for view in one.views:
                view.move(one.host.untyped_storage())

    def put_back(self) -> None:
        """Move what is on the host back to the device; where memory runs out in this, it may be called again.

        Raises:
            torch.OutOfMemoryError: the device has no memory.
        """
        with torch.no_grad():
            while self._away:
                views, host, original = self._away[-1]
                # Where somebody else holds it nothing was gained, but all go on sharing it.
                storage = original()
                if storage is None:
                    storage = on_device(host, self._device)
                for view in views:
                    view.move(storage)
                self._away.pop()

    def _there(self) -> list[tuple[torch.UntypedStorage, list[_View]]]:
        """Return the storages on the device that are worth moving, each with what is a view of it."""
        known = [t for module in self._modules for t in (*module.parameters(), *module.buffers())]
        known += [p for group in self._optimizer.param_groups for p in group["params"]]
        # Parameters may be held by a state as well, as those of some averages are.
        stay = {id(tensor.untyped_storage()) for tensor in known if tensor.layout is torch.strided}
        # Step counts are small, and so are the moments of biases; those that lie on the CPU anyway make no room.
        found: dict[int, tuple[torch.UntypedStorage, list[_View]]] = {}
        tensors = {id(t): t for t in flatten(list(self._optimizer.state.values()))[0] if type(t) is torch.Tensor}
        for tensor in tensors.values():
            if tensor.device != self._device or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() > ABOVE_BYTES and id(storage) not in stay:
                view = _View(tensor, int(tensor.storage_offset()), tensor.size(), tensor.stride())
                found.setdefault(id(storage), (storage, []))[1].append(view)
        return list(found.values())
