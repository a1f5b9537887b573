"""Compares a forward that is computed again with the first one: each operation has to come to the same bits.

By a checksum of each, where keeping what it came to would take the memory that is to be saved. Kernels that add in any
order come to other bits whatever a forward does, as ``index_add_`` on an accelerator. They give themselves away: run
once more on the very same values, they do not repeat themselves. What such an operation came to first is kept from then
on, on the host, and taken the second time, so that all that follows it is compared to the bit like anything else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from ctypes import c_char
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_TRIES = 5
"""Run an operation so often to see whether it repeats itself."""
_UNTOLD = ("empty", "detach", "_to_copy")
"""Parts of the names of operations that are not compared: see ``First``."""
Mark = int | list[torch.Tensor]
"""A checksum of what an operation came to; or that itself, on the host."""


class NotRepeatableError(Exception):
    """A forward that cannot be computed again: it would not come to what it came to."""

    def __init__(self, block: nn.Module, what: str) -> None:
        self.block = block
        self.what = what
        super().__init__(f"{type(block).__name__}: {what}")


class Comparison:
    """What was compared in an attempt at a window, and what is known of the device's kernels."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.operations = 0
        """Operations that were compared, and found to come to the same bits."""
        self.has_lost = False
        """Whether some were not compared, for they come after one that was not known to tremble."""
        self.trembling: set[str] = set()
        """Operations that do not repeat themselves on this device."""

    def begin(self) -> None:
        """Begin an attempt."""
        self.operations, self.has_lost = 0, False


class First(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks what each operation of a forward comes to."""

    def __init__(self, comparison: Comparison, marks: list[Mark], left_out: Iterable[torch.Tensor] = ()) -> None:
        """Add them to ``marks``, but for what is written to tensors that are left out."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._comparison = comparison
        self._marks = marks
        self._left_out = {tensor.untyped_storage()._cdata for tensor in left_out}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What is not written yet holds anything; checkpoint detaches what it hands on, the second time alone. Autocast
        # casts a weight once and keeps that, but for the second forward, which casts anew: what reads it is compared.
        if _is_told(name := _name_of(func)):
            self._take(func, name, args, kwargs or {}, result)
        return result

    def _found(self, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
        found = _come_to(args, kwargs, result)
        if not self._left_out:
            return found
        return [tensor for tensor in found if _place_of(tensor) not in self._left_out]

    def _take(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        found = self._found(args, kwargs, result)
        trembles = name in self._comparison.trembling
        self._marks.append([t.to("cpu", copy=True) for t in found] if trembles else _checksum(found))


class Second(First):  # type: ignore[no-untyped-call]
    """Compares each operation of the same forward, computed again, with what it came to first."""

    def __init__(
        self, comparison: Comparison, marks: list[Mark], block: nn.Module, left_out: Iterable[torch.Tensor] = ()
    ) -> None:
        """Compare the forward of ``block`` with ``marks``."""
        super().__init__(comparison, marks, left_out)
        self._block = block
        self._count = 0
        self._is_lost = False  # from an operation on that trembles, and was not known to

    def _take(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        if self._is_lost:
            return
        # Checkpoint ends a forward early, once it has come to all that is wanted: what is left out is not compared.
        mark = self._marks[self._count] if self._count < len(self._marks) else None
        found = self._found(args, kwargs, result)
        if isinstance(mark, list):
            for tensor, value in zip(found, mark, strict=True):
                if _checksum([tensor]) != _checksum([value]):  # of arguments that were only read nothing is written
                    tensor.copy_(value)
        elif mark != _checksum(found):
            if mark is None or _repeats_itself(func, args, kwargs):
                raise NotRepeatableError(self._block, f"computed again, {name} comes to other bits")
            self._comparison.trembling.add(name)
            self._comparison.has_lost = self._is_lost = True
            return
        self._count += 1
        self._comparison.operations += 1


@cache  # there are some dozens, and each is asked about thousands of times
def _name_of(func: Callable[..., Any]) -> str:
    return str(func)


@cache
def _is_told(name: str) -> bool:
    return not any(part in name for part in _UNTOLD)


def _repeats_itself(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether an operation comes to the same bits each time that it is run on the same values."""
    # What draws has other bits each time, and is no kernel that trembles: its generator was put back.
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    marks = set()
    for _ in range(_TRIES):
        # Of what it writes to there are only the values of afterwards, on which it trembles as well.
        given = tree_map_only(torch.Tensor, torch.clone, (args, kwargs)) if func._schema.is_mutable else (args, kwargs)
        marks.add(_checksum(_come_to(given[0], given[1], func(*given[0], **given[1]))))
    return len(marks) == 1


def _come_to(args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """Return what an operation has come to: its results, or what it was given where it returns nothing but writes."""
    if isinstance(result, torch.Tensor):
        return [result]
    if result is None:
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # Bytes beside other results are a library's workspace, not all of which it has written to.
    several = result if isinstance(result, list | tuple) else ()
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor) and tensor.dtype is not torch.uint8]


def _place_of(tensor: torch.Tensor) -> int | None:
    """Return what storage a tensor lies in; None for one that has none of its own."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage()._cdata if is_plain else None


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the bits of tensors; of those that have none that can be read, of their shapes."""
    mark = 0
    for tensor in tensors:
        mark = hash((mark, tensor.shape, tensor.dtype))
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or not tensor.numel():
            continue
        # To the host, where there is room for it: the device is short of it.
        lies = tensor if _lies_at_once(tensor) else tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # By their address, for each way through an operator takes longer than the checksum of a small tensor.
        if address := lies.data_ptr():
            mark = hash((mark, zlib.crc32((c_char * lies.nbytes).from_address(address))))
    return mark


def _lies_at_once(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor lie on the host one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
