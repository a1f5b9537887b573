"""Finds the blocks of a model, whose forward may be computed again: what the model repeats.

Those are the members of a ``ModuleList``, and of a ``Sequential`` that has several of a class; where there are none,
whatever class of modules there is several times. Layers without layers of their own are no blocks: to compute them
again saves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn


def named_blocks(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return all modules below these by their names, "model.layers.0", each once."""
    found: dict[str, nn.Module] = {}
    # The first module is the model: where a loss has something of the same name, the model's is meant.
    for root in reversed(modules):
        inner = dict(root.named_modules(prefix="model"))
        inner.pop("model", None)  # all of it is no block
        found |= inner
    return {name: module for name, module in found.items() if not isinstance(module, torch.jit.ScriptModule)}


def blocks_of(modules: Sequence[nn.Module], without: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks by their names, none within another.

    Args:
        modules: the model, and the loss if it is one too.
        without: names of classes that cannot be computed again, nor what holds one of them.
    """
    named = named_blocks(modules)
    usable = {
        name: module
        for name, module in named.items()
        if _is_block(module) and not any(_name(layer) in without for layer in module.modules())
    }
    repeated: set[type] = set()
    for module in (*modules, *named.values()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            # Of what torch.compile has made the module within. One of a list may be called again and again.
            inside = Counter(type(getattr(child, "_orig_mod", child)) for child in module)
            repeated |= {kind for kind, count in inside.items() if count > 1 or isinstance(module, nn.ModuleList)}
    if not any(type(module) in repeated for module in usable.values()):
        repeated = {kind for kind, count in Counter(map(type, usable.values())).items() if count > 1}
    found: dict[str, nn.Module] = {}
    # By depth, so that what others lie in comes before them.
    for name in sorted(usable, key=lambda name: name.count(".")):
        if type(usable[name]) in repeated and not any(name.startswith(f"{other}.") for other in found):
            found[name] = usable[name]
    return {name: module for name, module in named.items() if name in found}  # as they stand in the model


def _is_block(module: nn.Module) -> bool:
    """Return whether a module has layers of its own, and computes with them by one forward that may be wrapped."""
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or not children:
        return False
    # A stage: its members are the blocks, if any are.
    if isinstance(module, nn.Sequential) and any(map(_has_layers, children)):
        return False
    # What lies within compiled code may be a block, what compiled code lies within may not.
    inner = [layer for layer in module.modules() if layer is not module]
    is_compiled = any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in inner)
    return not (is_compiled or hasattr(module, "_orig_mod"))


def _has_layers(module: nn.Module) -> bool:
    """Return whether a module has layers of its own, but for what computes its weights."""
    return any(name != "parametrizations" for name, _ in module.named_children())


def _name(module: nn.Module) -> str:
    return type(module).__name__


class Level(NamedTuple):
    """A way of saving memory."""

    name: str
    blocks: tuple[str, ...] = ()
    """The names of those that are computed twice."""
    offloads: bool = False
    """Whether saved tensors and the optimizer's state are on the host while a window runs."""

    @property
    def kinds(self) -> frozenset[str]:
        """Return in which ways it saves memory, in the words of the argument."""
        ways = {"checkpoint": bool(self.blocks), "offload": self.offloads}
        return frozenset(way for way, is_taken in ways.items() if is_taken)


OFF = Level("off")
"""The one on which nothing is saved, as in nearly all windows of nearly all runs."""


def levels_of(modules: Sequence[nn.Module], kinds: Collection[str], without: Collection[str] = ()) -> list[Level]:
    """Return the levels below ``OFF``, from the top down; none where nothing can be saved.

    Args:
        modules: the model, and the loss if it is one too.
        kinds: in which ways memory can be saved.
        without: names of classes that cannot be computed again.
    """
    blocks = blocks_of(modules, without) if "checkpoint" in kinds else {}
    classes = " and ".join(dict.fromkeys(map(_name, blocks.values())))
    # Computing twice first: it needs no memory elsewhere, and most kernels are faster than the way there and back.
    found = [Level(f"checkpoint, every {classes}", tuple(blocks))] if blocks else []
    if "offload" in kinds:
        found.append(Level("; ".join([*(level.name for level in found), "offload"]), tuple(blocks), offloads=True))
    return found


class SavedAlready(NamedTuple):
    """How memory is saved already, and how to have it saved in the ways that are left."""

    level: Level = OFF
    how_to_compute_twice: str | None = ""
    """How to have blocks computed twice; empty for the code that does, None where that was tried."""
    how_to_offload: str | None = ""
    """How to have tensors on the host, likewise."""

    @property
    def told(self) -> str:
        """Return what was done to save memory, as an error goes on with it; empty where nothing was tried."""
        done = [f"{len(self.level.blocks)} of the model's blocks computed twice"] if self.level.blocks else []
        done += ["what forwards save on the host"] if self.level.offloads else []
        if done:
            return f", with {' and '.join(done)}"
        none = ", and no block of the model was found that could be computed twice"
        return none if self.how_to_compute_twice is None else ""


NOTHING_SAVED = SavedAlready()
