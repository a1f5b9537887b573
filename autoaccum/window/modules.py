"""The state of modules and of their optimizer, for a checkpoint: all of it, also what a ``state_dict`` leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.window.attributes import is_expanded

State = dict[str, Any]
"""Plain values and tensors."""


def into_training(model: nn.Module) -> None:
    """Put a model into training mode.

    One that is in it already may hold layers that were frozen in eval mode on purpose. Of that only modules are asked
    whose own ``train`` may freeze some, as each loop by hand asks them.
    """
    if not model.training:
        model.train()
        return
    for module in list(model.modules()):
        if type(module).train is not nn.Module.train and module.training:
            module.train()


def state_of_modules(modules: Sequence[nn.Module]) -> list[State]:
    """Return of each its state_dict, and the buffers that this leaves out."""
    return [{"state": module.state_dict(), "buffers": left_out(module)} for module in modules]


def left_out(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict leaves out, by the keys that they would have in it."""
    # Most of these can be computed again, but nothing says which: a state that changes as it runs may be among them.
    found = {}
    for key, (layer, name) in buffer_places(module).items():
        buffer = layer._buffers[name]
        if name in layer._non_persistent_buffers_set and buffer is not None:
            found[key] = buffer
    return found


def load_modules(modules: Sequence[nn.Module], states: Sequence[State], device: torch.device) -> None:
    """Put back what ``state_of_modules`` returned; a forward may have made, dropped or resized buffers since."""
    for module, state in zip(modules, states, strict=True):
        # Buffers first: ``load_state_dict`` refuses keys that the module lacks, and copies into what is there by shape.
        kept, named = {**state["state"], **state["buffers"]}, module.state_dict()
        for key in state["buffers"].keys() - buffer_places(module).keys():
            if (new := new_buffer_place(module, key)) is not None:
                new[0].register_buffer(new[1], None, persistent=False)
        for key, (layer, name) in buffer_places(module).items():
            value, there = kept.get(key), layer._buffers[name]
            if value is None:
                # There was nothing when it was saved: a forward has made it since.
                if key in named or name in layer._non_persistent_buffers_set:
                    layer._buffers[name] = None
            elif there is None or (there.shape, there.dtype) != (value.shape, value.dtype) or is_expanded(there):
                # A new one; an expanded one shares its memory among its entries, so that it cannot be written to.
                layer._buffers[name] = value.to(device)
            else:
                # In place, for others may hold it.
                with torch.no_grad():
                    there.copy_(value)
        module.load_state_dict(state["state"])


def load_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Put back an optimizer's state_dict, to the bit.

    ``load_state_dict`` rounds what is kept in more bits than the parameter has: that is put back after it.
    """
    optimizer.load_state_dict(state)
    if not {"param_groups", "state"} <= state.keys():  # a form of its own
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for p, number in zip(parameters, numbers, strict=True):
        for name, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[p].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value.dtype != loaded.dtype:
                optimizer.state[p][name] = value.to(loaded.device)


def buffer_places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return (layer, name) of each buffer, those that are None too, by its key in a state_dict."""
    return {
        f"{path}.{name}" if path else name: (layer, name)
        for path, layer in module.named_modules()
        for name in layer._buffers.keys()  # noqa: SIM118 (no dict in TorchScript)
    }


def new_buffer_place(module: nn.Module, key: str) -> tuple[nn.Module, str] | None:
    """Return (layer, name) of a buffer that a forward has registered in an earlier process; None where it cannot be."""
    if type(key) is not str:
        return None
    path, _, name = key.rpartition(".")
    layer = dict(module.named_modules()).get(path)
    # A name that the layer uses for something else, a method say, is none of a buffer.
    return None if layer is None or not name or hasattr(layer, name) else (layer, name)
