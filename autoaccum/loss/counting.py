"""Counts the items of micro-batches as users do, and checks what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.loss.stated import CountItems, by_name
from autoaccum.loss.terms import NONE, Count
from autoaccum.memory.oom import is_out_of_memory


def count_items(num_items: CountItems, batch: Any) -> Count | dict[str, Count]:
    """Count the items of a micro-batch as the user does; of several losses those of each.

    Raises:
        ArgumentError: a count is negative, or not a number.
    """
    # A function may count one loss or several: what it returns tells.
    if callable(num_items):
        counted = num_items(batch)
    else:
        counted = {name: count(batch) for name, count in by_name(num_items).items()}
    if isinstance(counted, Mapping | list | tuple):
        return {name: _counted(f"num_items(micro-batch)[{name!r}]", items) for name, items in by_name(counted).items()}
    return _counted("num_items(micro-batch)", counted)


def count_each(num_items: CountItems, batch: Any) -> dict[str, Count]:
    """Count the items of each of several losses; return nothing where the user counts those of one."""
    counted = count_items(num_items, batch)
    return counted if isinstance(counted, dict) else {}


def never_zero(num_items: Any) -> Any:
    """Make a ``num_items`` that counts ``NONE`` where it would count 0; of several by name, each is made one."""
    if isinstance(num_items, Mapping):
        return {name: never_zero(one) for name, one in num_items.items()}
    if isinstance(num_items, list | tuple):
        return [never_zero(one) for one in num_items]
    return lambda batch: _without_zero(num_items(batch))


def _without_zero(counted: Any) -> Any:
    if isinstance(counted, Mapping):
        return {name: _without_zero(one) for name, one in counted.items()}
    if isinstance(counted, list | tuple):
        return [_without_zero(one) for one in counted]
    if isinstance(counted, torch.Tensor) and counted.device.type != "cpu":  # not read: see ``_counted``
        wide = counted.to(torch.promote_types(counted.dtype, torch.float32))
        return torch.where(wide == 0, NONE, wide)
    try:
        return float(counted) or NONE
    except (TypeError, ValueError, RuntimeError) as error:  # it is no count, as whoever checks it says
        if is_out_of_memory(error):
            raise
        return counted


def _counted(argument: str, counted: Any) -> Count:
    if isinstance(counted, torch.Tensor) and counted.numel() == 1 and counted.device.type != "cpu":
        # Not read here, and so not checked: reading would wait for the device in every micro-batch.
        # It may be a tensor that is written to again, so it is copied.
        return counted.detach().reshape(()).clone()
    try:
        return _checked_count(argument, float(counted))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError) or is_out_of_memory(error):  # reading a tensor may be where memory runs out
            raise
        accepted = "a count for each micro-batch, such as (labels != -100).sum()"
        raise ArgumentTypeError(argument, counted, accepted) from None


def _checked_count(argument: str, items: float) -> float:
    if not 0 <= items < float("inf"):
        raise ArgumentError(argument, items, "a count of at least 0")
    return items
