"""Refuses data of other libraries and kinds in a sentence that says what to write instead; imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from autoaccum._units import shown
from autoaccum.data import objects
from autoaccum.errors import ArgumentTypeError

_TENSORS = "tensors, arrays, a Dataset or a DataLoader"


def refuse(argument: str, data: Any) -> None:
    """Raise if data, or a part of it, is of a kind that is no data here, however much it looks like some.

    Args:
        argument: its name.
        data: what was passed.

    Raises:
        ArgumentTypeError: it is a table of another library, a dict of datasets, or a text.
    """
    if isinstance(data, str | bytes):
        cure = "Read the file, and pass what is in it; a single text would be a list of one, [text]."
        raise ArgumentTypeError(argument, data, _TENSORS, cure)
    if isinstance(data, list) and data and isinstance(data[0], DataLoader | Dataset):
        cure = f"It holds several: pass one, such as {argument}[0], or torch.utils.data.ConcatDataset of datasets."
        raise ArgumentTypeError(argument, f"a list of {len(data)}", "one dataset or DataLoader", cure)
    if objects.has_samples(data):  # its entries are none of these, and may not bear to be listed
        return
    kinds = (Dataset, DataLoader)
    if (
        isinstance(data, Mapping)
        and data.keys()
        and all(isinstance(part, kinds) or (is_hf(part) and hasattr(part, "column_names")) for part in data.values())
    ):
        first = next(iter(data))
        cure = f"It holds several datasets: pass one, such as {argument}[{first!r}]."
        raise ArgumentTypeError(argument, _names(data), "one dataset", cure)
    # It has a length and an index, as datasets have, but its indices are names of columns.
    if is_table(data):
        cure = (
            "Pass its columns as tensors: (torch.tensor(df[features].to_numpy(), dtype=torch.float32), "
            "torch.tensor(df[target].to_numpy())), where features is a list of names."
        )
        raise ArgumentTypeError(argument, _named(data), _TENSORS, cure)
    if is_columns(data):
        cure = (
            "Pass its columns as tensors: {name: torch.tensor(table[name].to_pylist()) for name in table.column_names}."
        )
        raise ArgumentTypeError(argument, _named(data), _TENSORS, cure)
    # One level deep, where people put them: what is further in fails when it is counted.
    parts = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, tuple) else ()
    for name, part in parts:
        if is_table(part):
            cure = "Pass its values as a tensor: torch.tensor(table.to_numpy(), dtype=torch.float32) for inputs, and "
            cure += "without a dtype for labels."
            raise ArgumentTypeError(f"{argument}[{name!r}]", _named(part), "a tensor or an array", cure)
        if is_hf(part) or hasattr(part, "to_pylist"):  # a column of Hugging Face, or of pyarrow
            read = "column[:]" if is_hf(part) else "column.to_pylist()"
            cure = f"Pass its values as a tensor: torch.tensor({read})."
            raise ArgumentTypeError(f"{argument}[{name!r}]", _named(part), "a tensor or an array", cure)


def refuse_as_batch(batch: Any) -> None:
    """Raise if what should be a batch is data, or no batch of tensors.

    Raises:
        ArgumentTypeError: it is one of these.
    """
    if isinstance(batch, DataLoader):
        raise ArgumentTypeError(
            "batch", _named(batch), "one batch", "Pass each that it yields: for batch in loader: ..."
        )
    if isinstance(batch, torch.Tensor) and not batch.ndim:
        cure = "The loss is computed here, of the batch: pass what the loader yields."
        raise ArgumentTypeError("batch", "a single number, such as a loss", "one batch", cure)
    if isinstance(batch, Dataset) or is_hf(batch):
        cure = (
            "Make a loader of it, whose batch_size is the effective batch: for batch in DataLoader(dataset, ...): ..."
        )
        raise ArgumentTypeError("batch", _named(batch), "one batch", cure)
    refuse("batch", batch)


def is_table(thing: object) -> bool:
    """Return whether something is a DataFrame or a column of one."""
    # Nothing is imported for this: whoever has a table has imported its library.
    modules = {kind.__module__.split(".")[0] for kind in type(thing).__mro__}
    return bool(modules & {"pandas", "polars"}) and hasattr(thing, "to_numpy")


def is_columns(thing: object) -> bool:
    """Return whether something is a table that is indexed by the names of its columns, such as one of pyarrow."""
    return hasattr(thing, "column_names") and hasattr(thing, "to_pylist") and not is_hf(thing)


def is_hf(thing: object) -> bool:
    """Return whether something is a dataset of Hugging Face."""
    # A dict of them is one of splits, and a class of the same package.
    return any(kind.__module__.startswith("datasets.") for kind in type(thing).__mro__) and not isinstance(thing, dict)


def _named(thing: object) -> Any:
    """Return a name for what would fill a screen."""
    return f"a {type(thing).__name__}"


def _names(data: Mapping[Any, Any]) -> str:
    return f"{type(data).__name__} of {shown(list(data))}"
