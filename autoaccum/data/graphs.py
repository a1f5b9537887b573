"""Cuts and joins batches of graphs, with what was set on them after they were collated.

Graphs are known by their protocol, which is PyTorch Geometric's: ``num_graphs``, ``to_data_list()`` and the class's
``from_data_list``. Nothing of it is imported. ``to_data_list()`` returns only what was collated. If a batch says which
rows a graph has (``stores`` and ``_slice_dict``), what was set later is cut by these. Elsewhere it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def is_graphs(leaf: object) -> bool:
    """Return whether something is a batch of graphs, made of one object for each."""
    return (
        hasattr(leaf, "num_graphs")
        and callable(getattr(leaf, "to_data_list", None))
        and callable(getattr(type(leaf), "from_data_list", None))
    )


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return graphs ``start`` to ``stop`` of a batch.

    Raises:
        ValueError: nothing tells which rows of something are theirs.
    """
    stores = _stores(batch)
    made = _collated(batch, stores, _graphs(batch, stores, start, stop))
    for store, other in zip(stores, _stores(made), strict=True):
        for name in store.added():
            other.held[name] = store.part(name, start, stop)
    return made


def join(parts: Sequence[Any]) -> Any:
    """Join batches of graphs, one after the other.

    Raises:
        ValueError: batches differ in what was set on them.
    """
    of_parts = [_stores(part) for part in parts]
    graphs = [graph for part, stores in zip(parts, of_parts, strict=True) for graph in _graphs(part, stores)]
    made = _collated(parts[0], of_parts[0], graphs)
    for *stores, other in zip(*of_parts, _stores(made), strict=True):
        names = stores[0].added()
        if any(store.added() != names for store in stores):
            raise ValueError("other attributes were set on one batch of graphs than on the next")
        for name in names:
            other.held[name] = _joined(name, stores)
    return made


def _graphs(batch: Any, stores: Sequence[_Store], start: int = 0, stop: int | None = None) -> list[Any]:
    """Return some of the graphs of a batch."""
    for store in stores:
        store.check()
    stop = int(batch.num_graphs) if stop is None else min(stop, int(batch.num_graphs))
    one = getattr(batch, "get_example", None)  # to_data_list() makes all of them, for each micro-batch
    return [one(index) for index in range(start, stop)] if callable(one) else batch.to_data_list()[start:stop]


def _collated(batch: Any, stores: Sequence[_Store], graphs: list[Any]) -> Any:
    """Make a batch of some graphs, with the vectors that ``follow_batch`` makes where the batch has them.

    Raises:
        ValueError: it lacks what was set on the batch.
    """
    followed = list(dict.fromkeys(name for store in stores for name in store.followed()))
    made = _class(batch).from_data_list(graphs, **({"follow_batch": followed} if followed else {}))
    lost = [] if stores else [name for name in vars(batch) if not name.startswith("_") and name not in vars(made)]
    if lost:
        raise ValueError(f"nothing tells which rows of {lost[0]!r} are of which graph")
    return made


def _joined(name: str, stores: Sequence[_Store]) -> Any:
    """Join what was set on several batches by one name."""
    values = [store.held[name] for store in stores]
    first, (dim, *others) = values[0], [store.dim_of(name) for store in stores]
    if dim is None or None in others:
        if not all(type(value) is type(first) and np.array_equal(value, first) for value in values):
            raise ValueError(f"{name!r} belongs to a whole batch of graphs, and is another one in the next")
        return first
    if isinstance(first, list | tuple):
        return type(first)([entry for value in values for entry in value])
    return torch.cat(values, dim) if isinstance(first, torch.Tensor) else np.concatenate(values, dim)


def _class(batch: Any) -> Any:
    """Return the class that makes batches of graphs."""
    # That which defines it: classes that are made on the fly, one for each kind of graph, inherit it.
    return next(cls for cls in type(batch).__mro__ if "from_data_list" in vars(cls))


def cure(batch: Any) -> str:
    """Return what to do where a batch of graphs cannot be cut."""
    return (
        "Set it on each graph before you collate. Or pass the list of graphs and split=autoaccum.splits.graphs, and "
        f"let training_step begin with batch = {_class(batch).__name__}.from_data_list(batch)."
    )


def _stores(batch: Any) -> list[_Store]:
    """Return the stores of a batch of graphs; none where it does not say which rows a graph has."""
    slices = getattr(batch, "_slice_dict", None)
    if slices is None or not hasattr(batch, "stores"):
        return []
    # Each kind of nodes and edges has a store of its own, and slices by its key.
    return [_Store(batch, held, slices if held._key is None else slices.get(held._key, {})) for held in batch.stores]


class _Store:
    """What a batch of graphs holds of one kind of nodes or edges, or of the graphs themselves."""

    def __init__(self, batch: Any, held: Any, slices: Mapping[str, Any]) -> None:
        """Set up; ``slices`` has, by the name of what was collated, where the rows of each graph begin."""
        self.held = held
        self._batch = batch
        self._names = list(held.keys())
        self._slices = {name: slices[name] for name in self._names if name in slices}

    def followed(self) -> list[str]:
        """Return the attributes for which there are vectors that say of which graph each row is."""
        names = {*self._names} - {*self._slices}
        return [name for name in self._slices if {f"{name}_batch", f"{name}_ptr"} <= names]

    def added(self) -> list[str]:
        """Return what was set after the batch was collated."""
        made = {f"{name}{end}" for name in self.followed() for end in ("_batch", "_ptr")}
        known = {*self._slices, *made, "batch", "ptr", "num_nodes"}
        return sorted(name for name in self._names if name not in known)

    def check(self) -> None:
        """Raise if an attribute has other rows than it was collated with, as where edges were left out of a batch.

        Raises:
            ValueError: one has.
        """
        for name, bounds in self._slices.items():
            value = self.held[name]
            if not _is_dense(value) or getattr(bounds, "ndim", 0) != 1:
                continue
            if value.ndim == 0 or value.shape[self._cat_dim(name, value)] != int(bounds[-1]):
                raise ValueError(f"{name!r} has other rows than those that were collated")

    def part(self, name: str, start: int, stop: int) -> Any:
        """Return what some graphs have of something that was set; all of what belongs to the whole batch.

        Raises:
            ValueError: nothing tells which rows are theirs.
        """
        value, dim = self.held[name], self.dim_of(name)
        if dim is None:
            return value
        bounds, *others = self._bounds(name, value, dim)
        if not all(torch.equal(bounds, other) for other in others):
            raise ValueError(f"the {int(bounds[-1])} rows of {name!r} may be of nodes or of edges")
        rows = slice(int(bounds[start]), int(bounds[min(stop, len(bounds) - 1)]))
        return value[rows] if isinstance(value, list | tuple) else value[(slice(None),) * dim + (rows,)]

    def dim_of(self, name: str) -> int | None:
        """Return in which dim something that was set has rows of graphs; None where it belongs to the whole batch.

        Raises:
            ValueError: nothing tells.
        """
        value = self.held[name]
        if value is None or isinstance(value, str | bytes | int | float | np.generic):
            return None
        if isinstance(value, list | tuple):
            if len(value) == self._batch.num_graphs:
                return 0
            if all(entry is None or isinstance(entry, str | bytes | int | float) for entry in value):
                return None
        elif _is_dense(value):
            if not value.ndim:
                return None
            dim = self._cat_dim(name, value)
            # By its name it holds numbers of nodes, which change with the nodes before them; nothing says that it does.
            is_whole = isinstance(value, torch.Tensor) and str(value.dtype).startswith(("torch.int", "torch.uint"))
            if is_whole and value.numel() and np.any(self._batch.__inc__(name, value, self.held)):
                raise ValueError(f"{name!r} was set after it was collated, and may number its nodes")
            if self._bounds(name, value, dim):
                return dim
        raise ValueError(f"nothing tells which rows of {name!r} are of which graph")

    def _cat_dim(self, name: str, value: Any) -> int:
        dim: int = (self._batch.__cat_dim__(name, value, self.held) or 0) % value.ndim
        return dim

    def _bounds(self, name: str, value: Any, dim: int) -> list[torch.Tensor]:
        """Return where the rows of each graph begin, of all that has as many rows: graphs, nodes, what was collated."""
        num_rows = len(value) if isinstance(value, list | tuple) else value.shape[dim]
        found = {"": torch.arange(int(self._batch.num_graphs) + 1), **self._slices}
        if "ptr" in self._names:
            found["ptr"] = self.held["ptr"].cpu()
        fitting = {
            of: bounds for of, bounds in found.items() if getattr(bounds, "ndim", 0) == 1 and bounds[-1] == num_rows
        }
        # Of nodes and of edges there may be as many, and then names tell, as they do in PyTorch Geometric.
        alike = [bounds for of, bounds in fitting.items() if ("edge" in of) == ("edge" in name)]
        return alike or list(fitting.values())


def _is_dense(value: object) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and value.layout is torch.strided)
