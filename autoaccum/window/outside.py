"""What a forward may change outside of its block and that lies in no tensor, remembered and put back."""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType
from typing import Any

from torch import nn

from autoaccum.window.attributes import Attributes
from autoaccum.window.surroundings import surroundings_of

_ABSENT = object()


class Outside:
    """What a forward may change that lies in no tensor: attributes, variables of functions and what functions hold."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        functions: Iterable[object],
        objects: Iterable[Any] = (),
        *,
        with_modules: bool = True,
    ) -> None:
        """Remember it as it is now, with the attributes of other objects, and of the modules that functions hold."""
        held = surroundings_of(functions)
        self.generators = held.generators
        within = [*modules, *(held.modules if with_modules else ())]
        layers = {id(layer): layer for module in within for layer in module.modules()}
        self._attributes = Attributes([*layers.values(), *held.objects, *objects], held.containers)
        self._cells = [(cell, cell.cell_contents) for cell in held.cells]
        self._names = [(namespace, name, namespace[name]) for namespace, name in held.names]

    def has_changed(self) -> bool:
        """Return whether anything of it is another object now."""
        return (
            self._attributes.have_changed()
            or any(contents_of(cell) is not contents for cell, contents in self._cells)
            or any(namespace.get(name, _ABSENT) is not value for namespace, name, value in self._names)
        )

    def restore(self) -> None:
        """Put it back."""
        if self._attributes.have_changed():
            self._attributes.restore()
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._names:
            namespace[name] = value


def functions_run(modules: Iterable[nn.Module], functions: Iterable[object]) -> list[object]:
    """Return the functions that a forward may run: these, the hooks of layers, and their forwards.

    A hook of a layer within a block is run once more with it, and may count or collect; and so may a forward, in what
    is no attribute of its module.
    """
    layers = [layer for module in modules for layer in module.modules()]
    hooks = [hook for layer in layers for held in hooks_of(layer) for hook in held.values()]
    forwards = {type(layer): layer.forward for layer in layers if "forward" not in vars(layer)}
    own = [vars(layer)["forward"] for layer in layers if "forward" in vars(layer)]
    return [*functions, *hooks, *forwards.values(), *own]


def hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the hooks around the forward of a layer, by numbers that none of them shares."""
    return layer._forward_pre_hooks, layer._forward_hooks


def contents_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function, which may have been deleted."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
