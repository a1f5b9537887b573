"""State of modules and their optimizer for a checkpoint, including what ``state_dict`` leaves out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.step.python_state import is_expanded

State = dict[str, Any]
"""Plain values and tensors."""
OF_TORCH = frozenset({*vars(torch.optim.Optimizer([torch.zeros(())], {})), "step", "_opt_called"})
"""Attributes that every optimizer has, or that a learning rate scheduler sets."""


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
        _load(module, state["state"])


def _load(module: nn.Module, state: State) -> None:
    """Load a state_dict, all of it.

    Some layers write entries that they do not read, such as the scales of frozen, quantised weights: these have to be
    what they are by now.

    Raises:
        ValueError: an entry is missing, is nothing that the module has, or was another one.
    """
    refused = module.load_state_dict(state, strict=False)
    present = module.state_dict() if refused.unexpected_keys else {}
    changed = [key for key in refused.unexpected_keys if not _is_same(state[key], present.get(key))]
    if refused.missing_keys or changed:
        lacks = f"lacks {', '.join(map(repr, refused.missing_keys))}; " if refused.missing_keys else ""
        reads = f"does not read {', '.join(map(repr, changed))}" if changed else ""
        raise ValueError(f"{type(module).__name__} {lacks}{reads}".removesuffix("; "))


def _is_same(saved: Any, present: Any) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(present, torch.Tensor):
        return saved.dtype == present.dtype and torch.equal(saved, present.to(saved.device))
    return type(saved) is type(present) and bool(saved == present)


def load_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Put back an optimizer's state_dict as it was saved: the same types, in the same precision.

    By itself PyTorch rounds tensors to the parameter's dtype, and builds every list and text anew by calling its type.
    Hooks avoid that, for this optimizer and for those that it wraps.
    """
    with ExitStack() as stack:
        for one in with_wrapped(optimizer).values():
            if hasattr(one, "_optimizer_load_state_dict_pre_hooks"):  # a wrapper may have none of its own
                before, after = _uncast()
                stack.callback(one.register_load_state_dict_pre_hook(before).remove)
                stack.callback(one.register_load_state_dict_post_hook(after).remove)
        optimizer.load_state_dict(state)


def _uncast() -> tuple[Callable[[torch.optim.Optimizer, State], State], Callable[[torch.optim.Optimizer], None]]:
    """Return hooks before and after ``load_state_dict`` by which an optimizer takes state as it is given."""
    moved: dict[tuple[int, torch.device], torch.Tensor] = {}
    saved_groups: list[State] = []

    def before(optimizer: torch.optim.Optimizer, state_dict: State) -> State:
        saved_groups[:] = state_dict["param_groups"]
        of_number = {
            number: (p, saved)
            for group, saved in zip(optimizer.param_groups, saved_groups, strict=False)
            for p, number in zip(group["params"], saved["params"], strict=False)
        }
        kept = {}
        for key, value in state_dict["state"].items():
            p, group = of_number.get(key, (None, {}))
            # Under a number PyTorch casts a value. Under any other key, the parameter itself too, it leaves it alone.
            kept[key if p is None else p] = value if p is None else beside(p, value, group, moved)
        return {**state_dict, "state": kept}

    def after(optimizer: torch.optim.Optimizer) -> None:
        # PyTorch copies groups. A count that a group shares with the state of its parameters stays one.
        shared = {key: tensor for (key, _), tensor in moved.items()}
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=False):
            group.update({name: shared[id(value)] for name, value in saved.items() if id(value) in shared})

    return before, after


def with_wrapped(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer, and those that it wraps, by what stands before their attributes: "", "inner.", "all[0]."."""
    found: dict[str, torch.optim.Optimizer] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", optimizer)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            before = f"{path}." if path else ""
            found[before] = value
            waiting += [(before + name, kept) for name, kept in vars(value).items() if name not in OF_TORCH]
        elif isinstance(value, dict | list | tuple):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key!r}]", entry) for key, entry in entries]
    return found


def beside(
    p: torch.Tensor, value: Any, group: State, moved: dict[tuple[int, torch.device], torch.Tensor], name: Any = None
) -> Any:
    """Return what is kept of a parameter with its tensors on the parameter's device, in containers of its own.

    Args:
        p: the parameter.
        value: what is kept.
        group: of the parameter.
        moved: takes each tensor as it was moved, by its id and the device, so that one that is shared stays one.
        name: under which it is kept.
    """
    if isinstance(value, torch.Tensor):
        # Where PyTorch keeps the number of steps: on the host, unless kernels read it.
        is_on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
        device = value.device if is_on_host else p.device
        return moved.setdefault((id(value), device), value.to(device))
    if isinstance(value, dict):
        by_key = copy(value)  # with what else a dict has, such as its factory
        by_key.update({key: beside(p, entry, group, moved, key) for key, entry in value.items()})
        return by_key
    if isinstance(value, tuple):
        entries = [beside(p, entry, group, moved) for entry in value]
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if isinstance(value, list | deque):
        in_order = copy(value)
        in_order.clear()
        in_order.extend(beside(p, entry, group, moved) for entry in value)
        return in_order
    return value


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


def batch_norms(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    """List every BatchNorm layer, once."""
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())  # in order, as no set would be
    return [layer for layer in layers if isinstance(layer, _BatchNorm)]


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """Count the BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    return sum(layer.training or not layer.track_running_stats for layer in batch_norms(modules))


def smallest_micro_batch(modules: Sequence[nn.Module]) -> int:
    """Return how many samples a micro-batch needs at least: BatchNorm has no statistics of one."""
    return 2 if count_batch_norms(modules) else 1
