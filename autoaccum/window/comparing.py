"""Compares a forward that is computed again with the first one: each operation has to come to the same bits.

So has each tensor that autograd saves, by which alone a backward computes. By checksums, where keeping results would
take the memory that is to be saved. Kernels that add in any order come to other bits whatever a forward does, as
``index_add_`` on an accelerator; and to some results no kernel writes, as the seed of a dropout that attention does
without. They give themselves away: run once more on the very same values, the operation does not repeat them, but for
their last bits. What such a result was first is kept from then on, on the host, and taken the second time, so that all
that follows it is compared to the bit like anything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoaccum.data import randomness
from autoaccum.window.checksums import checksum, is_plain, place_of

_TRIES = 5
"""Run an operation so often to see whether it repeats itself."""
_SAVED = "a tensor that its backward reads"
"""What stands in place of an operation's name where autograd saves a tensor."""
Mark = tuple[str, dict[int, int | torch.Tensor]]
"""An operation's name and, by its place among them, a checksum of each of its results; or that itself, on the host."""
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
    """Marks what each operation of a forward comes to, and what autograd saves."""

    supports_higher_order_operators = True

    def __init__(self, comparison: Comparison, marks: list[Mark], left_out: Iterable[torch.Tensor] = ()) -> None:
        """Add them to ``marks``, but for what is written to tensors that are left out."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._comparison = comparison
        self._marks = marks
        self._left_out = {tensor.untyped_storage()._cdata for tensor in left_out}
        self._hooks: AbstractContextManager[Any] = nullcontext()
        self._is_looking = False  # what that takes is no part of the forward

    def __enter__(self) -> Any:
        """Begin; what autograd saves goes where it went before, which is to checkpoint."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None:
            pack, unpack = top

            def look(tensor: torch.Tensor) -> Any:
                # Bytes are a library's workspace, not all of which it has written to.
                if tensor.dtype is not torch.uint8 and place_of(tensor) not in self._left_out:
                    self._is_looking = True
                    try:
                        self._saved(tensor)
                    finally:
                        self._is_looking = False
                return pack(tensor)

            self._hooks = saved_tensors_hooks(look, unpack)
        self._hooks.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """End."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*raised)
        self._hooks = nullcontext()  # they hold this, and what checkpoint holds

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_looking or _is_view(func):
            return func(*args, **(kwargs or {}))
        operation = _Operation(func, _name_of(func), args, kwargs or {})
        # Autocast casts a weight once and keeps that, but for the second forward, which casts anew.
        if operation.name == "aten._to_copy.default":
            return operation.run()
        if _makes_room(func):
            return _cleared(operation.run())
        return self._run(operation)

    def _run(self, operation: _Operation) -> Any:
        result = operation.run()
        kept = self._comparison.trembling.get(operation.name, ())
        found = {
            place: tensor.to("cpu", copy=True) if place in kept else checksum(tensor)
            for place, tensor in self._found(operation, result).items()
        }
        self._marks.append((operation.name, found))
        return result

    def _saved(self, tensor: torch.Tensor) -> None:
        self._marks.append((_SAVED, {0: _of_saved(tensor)}))

    def _found(self, operation: _Operation, result: Any) -> dict[int, torch.Tensor]:
        found = operation.come_to(result)
        if not self._left_out:
            return found
        return {place: tensor for place, tensor in found.items() if place_of(tensor) not in self._left_out}


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
        random = operation.random() if operation.may_draw else None
        result = operation.run()
        if self._is_lost:
            return result
        mark = self._next(operation.name)
        found = self._found(operation, result)
        others = {place for place, tensor in found.items() if not _is_taken(tensor, mark.get(place))}
        if others or mark.keys() != found.keys():
            # Of what is kept from the first forward it is known that it trembles: it may be others by its shape alone.
            is_told = (operation.draws and 0 in others) or any(isinstance(mark.get(at), torch.Tensor) for at in others)
            varying = set() if is_told else operation.varying(found, random)
            if mark.keys() != found.keys() or not others <= varying:
                raise self._refusal(operation.name)
            self._comparison.trembling.setdefault(operation.name, set()).update(varying)
            self._comparison.has_lost = self._is_lost = True
            return result
        self._comparison.operations += 1
        return result

    def _saved(self, tensor: torch.Tensor) -> None:
        if not self._is_lost and self._next(_SAVED) != {0: _of_saved(tensor)}:
            raise self._refusal(_SAVED)

    def _next(self, name: str) -> dict[int, int | torch.Tensor]:
        """Return the first forward's mark where it was at the same; nothing where it was not."""
        # Checkpoint ends a forward early, once it has come to all that is wanted: what is left out is not compared.
        first, mark = self._marks[self._count] if self._count < len(self._marks) else ("", {})
        self._count += 1
        return mark if first == name else {}

    def _refusal(self, name: str) -> NotRepeatableError:
        return NotRepeatableError(self._block, f"computed again, {name} comes to other bits")


def _of_saved(tensor: torch.Tensor) -> int:
    # Parameters are compared by their versions.
    return id(tensor) if isinstance(tensor, nn.Parameter) else checksum(tensor)


def _is_taken(tensor: torch.Tensor, mark: int | torch.Tensor | None) -> bool:
    """Return whether a result is what its mark says; where that is the first one itself, it is made so."""
    if not isinstance(mark, torch.Tensor):
        return mark == checksum(tensor)
    if (tensor.shape, tensor.dtype) != (mark.shape, mark.dtype):
        return False
    if checksum(tensor.to("cpu")) != checksum(mark):  # of arguments that were only read nothing is written
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
        """Return whether it draws random numbers, by what is said of it."""
        return isinstance(self.func, OpOverload) and torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def may_draw(self) -> bool:
        """Return whether it may, for all that is known: of PyTorch's own it is said."""
        return self.draws or not self.name.startswith("aten.")

    def random(self) -> _Random:
        """Return the random states that it finds, and whose they are."""
        leaves = tree_leaves((self.args, self.kwargs))
        devices = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
        device = next(devices, torch.device("cpu"))
        return randomness.get_state(device), device

    def come_to(self, result: Any) -> dict[int, torch.Tensor]:
        """Return its results by their places, or what it was given where it returns nothing but writes."""
        if isinstance(result, torch.Tensor):
            return {0: result}
        if result is None:
            given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
            return dict(enumerate(given))
        several = enumerate(result if isinstance(result, list | tuple) else ())
        tensors = {at: one for at, one in several if isinstance(one, torch.Tensor)}
        # Bytes beside other results are a library's workspace, not all of which it has written to.
        others = {at: one for at, one in tensors.items() if one.dtype is not torch.uint8}
        return others or tensors

    def varying(self, found: Mapping[int, torch.Tensor], random: _Random | None) -> set[int]:
        """Return the places of results that no kernel writes to, or that are others in their last bits each time.

        Args:
            found: what it has come to.
            random: the random states that it found; None where it draws nothing.
        """
        if not isinstance(self.func, OpOverload):
            return set()
        after = None if random is None else randomness.get_state(random[1])
        try:
            return self._unwritten(found, random) | self._trembling(random)
        finally:
            if random is not None and after is not None:
                randomness.set_state(after, random[1])

    def _unwritten(self, found: Mapping[int, torch.Tensor], random: _Random | None) -> set[int]:
        with _memory_filled():
            again = self._again(random)
            places = {place for place in found if place and _holds_filling(again[place], found[place])}
        for place in places:
            again[place].zero_()  # or the next one to ask would find the filling in memory that is not filled for it
        return places

    def _trembling(self, random: _Random | None) -> set[int]:
        first = self._again(random)
        marks, varying, apart = {place: checksum(tensor) for place, tensor in first.items()}, set(), set()
        for _ in range(_TRIES - 1):
            for place, tensor in self._again(random).items():
                if checksum(tensor) != marks[place]:
                    varying.add(place)
                    apart |= set() if _is_rounding(first[place], tensor) else {place}
        return varying - apart

    def _again(self, random: _Random | None) -> dict[int, torch.Tensor]:
        assert isinstance(self.func, OpOverload)
        if random is not None:
            randomness.set_state(*random)
        # Of what it writes to there are only the values of afterwards, on which it trembles as well.
        given = (self.args, self.kwargs)
        again = tree_map_only(torch.Tensor, torch.clone, given) if self.func._schema.is_mutable else given
        once_more = _Operation(self.func, self.name, *again)
        return once_more.come_to(once_more.run())


def _is_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results of an operation are the same in the first half of their digits, as a whole."""
    if not (one.is_floating_point() or one.is_complex()):
        return False
    eps = torch.finfo(one.dtype).eps
    if one.element_size() < 4:
        one, other = one.float(), other.float()
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(is_same, 0, one - other)
    size = torch.where(one.isfinite(), one, 0)
    return bool(torch.linalg.vector_norm(apart) <= eps**0.5 * torch.linalg.vector_norm(size))


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


def _holds_filling(tensor: torch.Tensor, otherwise: torch.Tensor) -> bool:
    """Return whether an element has the bits of what memory is filled with now, and has not where it is not filled."""
    if not is_plain(tensor) or not tensor.numel() or tensor.dtype is torch.bool:
        return False
    bits, filling, others = (
        one.detach().resolve_conj().resolve_neg().contiguous().view(-1, 1).view(torch.uint8)
        for one in (tensor, torch.empty_like(tensor), otherwise)
    )
    return bool(((bits == filling).all(1) & (others != filling).any(1)).any())


def _cleared(room: Any) -> Any:
    """Return new memory without what it happens to hold, of which a part may stay and would differ each time."""
    is_known = isinstance(room, torch.Tensor) and is_plain(room) and not room.is_quantized
    return room.zero_() if is_known else room


@cache  # there are some dozens, and each is asked about thousands of times
def _name_of(func: Callable[..., Any]) -> str:
    return str(func)


@cache
def _is_view(func: Callable[..., Any]) -> bool:
    # A view has no values of its own: those that are read of it are compared where they are computed with, or saved.
    # Checkpoint makes some the second time alone. What makes a tensor of numbers is a view in name only.
    return getattr(func, "is_view", False) and "lift_fresh" not in _name_of(func)


@cache
def _makes_room(func: Callable[..., Any]) -> bool:
    name = _name_of(func)
    return name.startswith(("aten.empty", "aten.new_empty"))
