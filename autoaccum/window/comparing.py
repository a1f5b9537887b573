"""Compares a forward that is computed again with the first one: each operation has to come to the same bits.

By a checksum of each result, where keeping it would take the memory that is to be saved. Kernels that add in any order
come to other bits whatever a forward does, as ``index_add_`` on an accelerator; and to some results no kernel writes,
as the seed of a dropout that attention does without. They give themselves away: run once more on the very same values,
the operation does not repeat them. What such a result was first is kept from then on, on the host, and taken the second
time, so that all that follows it is compared to the bit like anything else.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoaccum.data import randomness

_TRIES = 5
"""Run an operation so often to see whether it repeats itself."""
_UNTOLD = ("empty", "_to_copy")
"""Parts of the names of operations that are not compared: see ``First``."""
_SMALL_BYTES = 2**16
"""Bytes of a tensor of a device that is copied to the host for a checksum."""
# (type, that of its sums), where these are added up without a copy in that type.
_SUMMED_UP = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32,
    torch.float64: torch.float64,
}  # fmt: skip
Mark = dict[int, int | torch.Tensor]
"""A checksum of each result of an operation, by its place among them; or that itself, on the host."""
_Random = tuple[randomness.RandomState, torch.device]
"""Random states, and the device that they are of, beside the host."""


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
        self.trembling: dict[str, set[int]] = {}
        """The results, by their places, that operations do not repeat on this device."""

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
        # What is not written yet holds anything. A view is read by what is compared; checkpoint makes some the second
        # time alone. Autocast casts a weight once and keeps that, but for the second forward, which casts anew.
        if not _is_told(func):
            return func(*args, **(kwargs or {}))
        return self._run(_Operation(func, _name_of(func), args, kwargs or {}))

    def _run(self, operation: _Operation) -> Any:
        result = operation.run()
        kept = self._comparison.trembling.get(operation.name, ())
        self._marks.append(
            {
                place: tensor.to("cpu", copy=True) if place in kept else _checksum(tensor)
                for place, tensor in self._found(operation, result).items()
            }
        )
        return result

    def _found(self, operation: _Operation, result: Any) -> dict[int, torch.Tensor]:
        found = operation.come_to(result)
        if not self._left_out:
            return found
        return {place: tensor for place, tensor in found.items() if _place_of(tensor) not in self._left_out}


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

    def _run(self, operation: _Operation) -> Any:
        random = operation.random() if operation.draws else None
        result = operation.run()
        if self._is_lost:
            return result
        # Checkpoint ends a forward early, once it has come to all that is wanted: what is left out is not compared.
        mark = self._marks[self._count] if self._count < len(self._marks) else {}
        found = self._found(operation, result)
        others = {place for place, tensor in found.items() if not _is_taken(tensor, mark.get(place))}
        if others or mark.keys() != found.keys():
            varying = set() if operation.draws and 0 in others else operation.varying(found, random)
            if mark.keys() != found.keys() or not others <= varying:
                raise NotRepeatableError(self._block, f"computed again, {operation.name} comes to other bits")
            self._comparison.trembling.setdefault(operation.name, set()).update(varying)
            self._comparison.has_lost = self._is_lost = True
            return result
        self._count += 1
        self._comparison.operations += 1
        return result


def _is_taken(tensor: torch.Tensor, mark: int | torch.Tensor | None) -> bool:
    """Return whether a result is what its mark says; where that is the first one itself, it is made so."""
    if not isinstance(mark, torch.Tensor):
        return mark == _checksum(tensor)
    if _checksum(tensor) != _checksum(mark):  # of arguments that were only read nothing is written
        tensor.copy_(mark)
    return True


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation and what it is called with."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def draws(self) -> bool:
        """Return whether it draws random numbers, or may, by what PyTorch says of it."""
        return isinstance(self.func, OpOverload) and torch.Tag.nondeterministic_seeded in self.func.tags

    def random(self) -> _Random:
        """Return the random states that it finds, and whose they are."""
        leaves = tree_leaves((self.args, self.kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        return randomness.get_state(device), device

    def come_to(self, result: Any) -> dict[int, torch.Tensor]:
        """Return its results by their places, or what it was given where it returns nothing but writes."""
        if isinstance(result, torch.Tensor):
            return {0: result}
        if result is None:
            given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
            return dict(enumerate(given))
        # Bytes beside other results are a library's workspace, not all of which it has written to.
        several = enumerate(result if isinstance(result, list | tuple) else ())
        return {at: one for at, one in several if isinstance(one, torch.Tensor) and one.dtype is not torch.uint8}

    def varying(self, found: Mapping[int, torch.Tensor], random: _Random | None) -> set[int]:
        """Return the places of results that are others when it is run again on the same values.

        Args:
            found: what it has come to.
            random: the random states that it found; None where it draws nothing.
        """
        if not isinstance(self.func, OpOverload):
            return set()
        after = randomness.get_state(None if random is None else random[1])
        seen: dict[int, set[int]] = {place: set() for place in found}
        for _ in range(_TRIES):
            for place, tensor in self._again(random).items():
                seen[place].add(_checksum(tensor))
        varying = {place for place, marks in seen.items() if len(marks) > 1}
        with _memory_filled():
            varying |= {place for place, tensor in self._again(random).items() if place and _holds_filling(tensor)}
        if random is not None:
            randomness.set_state(after, random[1])
        return varying

    def _again(self, random: _Random | None) -> dict[int, torch.Tensor]:
        assert isinstance(self.func, OpOverload)
        if random is not None:
            randomness.set_state(*random)
        # Of what it writes to there are only the values of afterwards, on which it trembles as well.
        given = (self.args, self.kwargs)
        again = tree_map_only(torch.Tensor, torch.clone, given) if self.func._schema.is_mutable else given
        once_more = _Operation(self.func, self.name, *again)
        return once_more.come_to(once_more.run())


@contextmanager
def _memory_filled() -> Iterator[None]:
    """Let PyTorch fill memory before a kernel is given it, as it does where algorithms are deterministic."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filled = torch._C._get_deterministic_fill_uninitialized_memory()
    set_algorithms = torch._C._set_deterministic_algorithms  # the public one sets the compiler's as well
    try:
        with warnings.catch_warnings(action="ignore"):  # of kernels that have no deterministic one
            set_algorithms(True, warn_only=True)
            torch._C._set_deterministic_fill_uninitialized_memory(True)
            yield
    finally:
        set_algorithms(was_on, warn_only=warns_only)
        torch._C._set_deterministic_fill_uninitialized_memory(was_filled)


def _holds_filling(tensor: torch.Tensor) -> bool:
    """Return whether an element has the bits of what memory is filled with now, so that nothing was written there."""
    if not _is_plain(tensor) or not tensor.numel() or tensor.dtype is torch.bool:
        return False
    bits, filling = (
        one.detach().resolve_conj().resolve_neg().contiguous().view(-1, 1).view(torch.uint8)
        for one in (tensor, torch.empty_like(tensor))
    )
    return bool((bits == filling).all(1).any())


@cache  # there are some dozens, and each is asked about thousands of times
def _name_of(func: Callable[..., Any]) -> str:
    return str(func)


@cache
def _is_told(func: Callable[..., Any]) -> bool:
    return not getattr(func, "is_view", False) and not any(part in _name_of(func) for part in _UNTOLD)


def _place_of(tensor: torch.Tensor) -> int | None:
    """Return what storage a tensor lies in; None for one that has none of its own."""
    return tensor.untyped_storage()._cdata if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of a tensor; of one that has none that can be read, of its shape."""
    mark = hash((tensor.shape, tensor.dtype))
    if not _is_plain(tensor) or not tensor.numel():
        return mark
    # To the host, where there is room for it: the device is short of it.
    for part in [tensor] if _is_to_be_copied(tensor) else _summed_up(tensor.detach()):
        lies = part if _lies_at_once(part) else part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # By their address, for each way through an operator takes longer than the checksum of a small tensor.
        if address := lies.data_ptr():
            mark = hash((mark, zlib.crc32((c_char * lies.nbytes).from_address(address))))
    return mark


def _is_to_be_copied(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small, or lies on the host, or is of a kind that is not summed up without a copy."""
    is_small = tensor.device.type == "cpu" or tensor.nbytes <= _SMALL_BYTES
    return is_small or tensor.dtype not in _SUMMED_UP or not tensor.is_contiguous() or tensor.is_neg()


def _summed_up(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what is left of a tensor, seen as a square, once its rows and columns are each made one number.

    By exclusive or of their bits, which constants hide from, and by their sum, which roundings hide from. Both read it
    where it lies; copied to the host it would take a hundred times as long as the operation that has made it.
    """
    side = math.isqrt(tensor.numel())
    flat = tensor.view(-1)
    square, rest = flat[: side * side].view(side, side), flat[side * side :]
    sums = [square.sum(dim, dtype=_SUMMED_UP[tensor.dtype]) for dim in (0, 1)]
    bits = [torch.hash_tensor(square, dim) for dim in (0, 1)]
    return [torch.stack(sums), torch.stack([one.view(torch.int64) for one in bits]), rest]


def _lies_at_once(tensor: torch.Tensor) -> bool:
    """Return whether the bits of a tensor lie on the host one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
