"""Measures whether a module's call can be split: whether its rows depend on its own samples alone.

A call is run whole and by rows, on a few samples and under the same draws. Its outputs have to agree, and so has its
gradient under random cotangents, for hooks and backwards of a user's own change gradients alone. It may leave nothing
behind either: no state that each call moves, no tensor with a graph.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.memory.oom import is_out_of_memory
from autoaccum.step.gradient import count_nodes
from autoaccum.step.python_state import Attributes, version_of
from autoaccum.step.rng_replay import Draws, Recording, Replaying
from autoaccum.step.snapshot import same
from autoaccum.step.split_calls import Again, Call, NotRowsError, cut, draws_elsewhere

_TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}
"""Relative error up to which numbers of a type are the same; other types have 16 bits or fewer."""
OF_16_BITS = 3e-2
"""The same of 16 bits: sums of micro-batches round otherwise than those of the whole."""

COUNTS = (7, 5, 3, 2)
"""Samples that are measured, the first of these that there are: odd ones are seldom another extent of a tensor."""
_SIZES = {7: (3, 2, 2), 5: (1, 2, 2), 3: (1, 2), 2: (1, 1)}
"""Their micro-batches: of sizes that differ, to tell the dimension of samples, and at odds with groups of two."""


class RowsOfDraws(Replaying):  # type: ignore[no-untyped-call]
    """A mode that gives each micro-batch of a split call its rows of what the whole has drawn."""

    def __init__(self, recorded: Recording, num_samples: int, *, keeps_wide: bool) -> None:
        super().__init__(recorded, range(num_samples), num_samples, keeps_wide=keeps_wide)
        self.num_shared = 0
        """Draws that a micro-batch was given which are those of all samples together."""

    def __exit__(self, *raised: Any) -> None:
        """Leave the mode; what is drawn once for all samples is told by ``num_shared``."""
        Draws.__exit__(self, *raised)  # type: ignore[no-untyped-call]

    def at(self) -> int:
        """Return where in the draws of the whole the next one is."""
        return self._next

    def go(self, place: int, low: int, high: int) -> None:
        """Go to a place, for samples ``low`` to ``high``."""
        self._next = place
        self._rows = torch.arange(low, high, device="cpu")

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Return the rows in place of a draw, and count those that have none."""
        self._is_shared = False
        given = super().draw(func, args, kwargs, returned)
        self.num_shared += self._is_shared
        return given


class RowChecks:
    """Measures each call that is split for the first time; a call that cannot be split has its module opened."""

    def __init__(self) -> None:
        self._checked: set[Any] = set()
        self.reasons: dict[str, str] = {}
        """Why a module was opened, by its name in the model."""

    def check(self, call: Call) -> None:
        """Measure a call.

        Raises:
            NotRowsError: it cannot be split.
        """
        key = id(call.module), call.rows, call.signature
        if key in self._checked or len(call.pieces) < 2:
            return
        random, place = call.random_state(), call.place
        values = _Values(call)
        try:
            self._check(call, random, place, values)
        except NotRowsError as error:
            self.reasons[call.name] = str(error)
            call.attributes.restore()
            values.restore()
            raise
        finally:
            call.set_random(random)
            if call.split.draws is not None:
                call.split.draws.go(place, 0, call.split.num_samples)
        values.restore()
        self._checked.add(key)
        self.reasons.pop(call.name, None)

    def _check(self, call: Call, random: Any, place: Any, values: _Values) -> None:
        low, high = call.pieces[0]
        draws = call.split.draws

        def run(low: int, high: int) -> Any:
            call.set_random(random)
            return call.forward_of(low, high, place)

        # What only a first call sets up stays; what each call moves is state.
        run(low, high)
        settled = Attributes(call.objects)
        values.renew()
        versions = [version_of(tensor) for tensor in call.tensors]
        shared = getattr(draws, "num_shared", 0)
        start = count_nodes()
        first = run(low, high)
        if [version_of(tensor) for tensor in call.tensors] != versions:
            raise NotRowsError(call.module, "it changes its inputs in place")
        if _are_inputs(first):
            raise NotRowsError(call.module, "it returns its input")
        if _share_memory(first):
            raise NotRowsError(call.module, "two of its outputs lie in the same memory")
        if settled.have_changed() or values.have_moved():
            raise NotRowsError(call.module, "it moves state")
        if getattr(draws, "num_shared", 0) > shared:
            raise NotRowsError(call.module, "it draws once for all samples")
        if draws_elsewhere(random, call.random_state()):
            raise NotRowsError(call.module, "it draws from a generator that is not PyTorch's")
        call.attributes = settled
        if call.has_grad:
            _refuse_other_graphs(call, first, start)
            _refuse_what_stays(call, first)
        del first
        whole = run(0, call.split.num_samples)
        spec = whole.spec
        outputs = [one.detach() if isinstance(one, torch.Tensor) else one for one in whole.outputs]
        gradients = _Gradients(call, whole)
        del whole
        columns: list[list[Any]] = []
        for low, high in call.pieces:
            found = run(low, high)
            if found.spec != spec:
                raise NotRowsError(call.module, "its micro-batches return other structures than the whole")
            call.note_needs(found)
            columns.append([one.detach() if isinstance(one, torch.Tensor) else one for one in found.outputs])
            del found
        for one, other in zip(outputs, call.joined(columns, [high - low for low, high in call.pieces]), strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                if one.shape != other.shape or one.dtype != other.dtype or not _agree(one, other):
                    raise NotRowsError(call.module, "its rows depend on each other")
            elif type(one) is not type(other) or one != other:
                raise NotRowsError(call.module, "it returns numbers that depend on the number of samples")
        del outputs
        if gradients.are_there:
            for low, high in call.pieces:
                gradients.take(run(low, high), low, high)
            gradients.compare()
        call.learn(call.out_rows)


class _Values:
    """The values of what a call may move: buffers and frozen parameters, those that are small."""

    _MOST_BYTES = 2**26

    def __init__(self, call: Call) -> None:
        layers = call.layers
        found = [one for layer in layers for one in layer._buffers.values() if one is not None]
        found += [p for layer in layers for p in layer._parameters.values() if p is not None and not p.requires_grad]
        found += [one for one in call.attributes.tensors() if not one.requires_grad and one.layout is torch.strided]
        found = list({id(one): one for one in found}.values())
        total = 0
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._large: list[tuple[torch.Tensor, int]] = []  # of which a write in place tells
        for one in sorted(found, key=lambda one: one.nbytes):
            total += one.nbytes
            if total <= self._MOST_BYTES:
                self._held.append((one, one.detach().clone()))
            else:
                self._large.append((one, version_of(one)))
        self._first = list(self._held)

    def renew(self) -> None:
        self._held = [(one, one.detach().clone()) for one, _ in self._held]

    def have_moved(self) -> bool:
        is_written = any(version_of(one) != version for one, version in self._large)
        return is_written or any(not same(one, value) for one, value in self._held)

    @torch.no_grad()
    def restore(self) -> None:
        for one, value in self._first:
            if not same(one, value):
                one.data.copy_(value)


class _Gradients:
    """Compares the gradient of the whole call with that of its micro-batches, under the same random cotangents."""

    def __init__(self, call: Call, whole: Again) -> None:
        """Take the gradient of the whole call, from which those of micro-batches are taken away one by one."""
        self._call = call
        generator = torch.Generator().manual_seed(0)
        with _disable_current_modes():  # in which this would be taken for a draw of the program's
            self._cotangents = [
                torch.randn(one.shape, generator=generator, dtype=torch.float64, device="cpu").to(one.device, one.dtype)
                if one.requires_grad else None
                for one in whole.outputs if isinstance(one, torch.Tensor)
            ]  # fmt: skip
        found = None
        if call.has_grad and any(one is not None for one in self._cotangents):
            found = self._of(whole, [None] * len(self._cotangents), 0, call.split.num_samples)
        self.are_there = found is not None
        """Whether there are gradients that autograd.grad can compute."""
        self._left: list[Any] = [None if one is None else one.clone() for one in found or []]
        self._scales = [_scale(one) for one in self._left]

    def take(self, part: Again, low: int, high: int) -> None:
        """Take away the gradient of samples ``low`` to ``high``."""
        call = self._call
        try:
            found = self._of(part, call.out_rows, low, high) or []
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise NotRowsError(call.module, f"its gradient cannot be computed by rows: {error}") from None
        for at, gradient in enumerate(found):
            if gradient is None:
                continue
            rows = call.rows[at] if at < len(call.tensors) else None
            if self._left[at] is None:
                like = call.tensors[at] if at < len(call.tensors) else call.held[at - len(call.tensors)][0]
                self._left[at] = torch.zeros_like(like)
            cut(self._left[at], rows, low, high).sub_(gradient)

    def compare(self) -> None:
        """Refuse a call where anything but rounding is left.

        Raises:
            NotRowsError: there is.
        """
        scale = max(self._scales, default=0.0)
        for left in self._left:
            if left is not None and not _scale(left) <= _TOLERANCES.get(left.dtype, OF_16_BITS) * scale:
                raise NotRowsError(self._call.module, "the gradients of its rows depend on each other")

    def _of(self, again: Again, out_rows: Sequence[Any], low: int, high: int) -> list[torch.Tensor | None] | None:
        """Return the gradients of a micro-batch; None where a checkpoint knows backward alone."""
        outputs = [one for one in again.outputs if isinstance(one, torch.Tensor)]
        pairs = [
            (output, cut(cotangent, rows, low, high))
            for output, cotangent, rows in zip(outputs, self._cotangents, out_rows, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        leaves = [*again.inputs, *again.held]
        learnt = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not learnt:
            return [None] * len(leaves)
        roots, seeds = zip(*pairs, strict=True)
        try:
            found = iter(torch.autograd.grad(roots, learnt, seeds, allow_unused=True))
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            return None
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return [one.to_dense() if one is not None and one.is_sparse else one for one in gradients]


def _scale(tensor: torch.Tensor | None) -> float:
    """Return the largest magnitude in a tensor; infinity where it is no number."""
    if tensor is None or not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().max())
    return largest if largest == largest else float("inf")


@torch.no_grad()
def _agree(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two tensors are the same but for rounding, relative to the largest number."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(wanted, found)
    bound = _TOLERANCES.get(wanted.dtype, OF_16_BITS) * _scale(wanted.nan_to_num(0, 0, 0))
    return torch.allclose(wanted, found, rtol=0.0, atol=bound, equal_nan=True)


def _graph_of(again: Again, is_entry: Callable[[Any], bool]) -> tuple[set[Any], set[Any]]:
    """Return the nodes of a micro-batch's graph, and its entries, at which the walk ends."""
    nodes, entries = set[Any](), set[Any]()
    waiting: list[Any] = [one.grad_fn for one in again.outputs if isinstance(one, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes or node in entries:
            continue
        if is_entry(node):
            entries.add(node)
        else:
            nodes.add(node)
            waiting.extend(follower for follower, _ in node.next_functions)
    return nodes, entries


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _refuse_other_graphs(call: Call, again: Again, start: int) -> None:
    """Refuse a call whose graph leads to a tensor that is neither its input nor held by its module."""
    own = {id(one) for one in (*again.inputs, *again.held)}
    for node in _graph_of(again, lambda node: _is_leaf(node) or node._sequence_nr() < start)[1]:
        if not _is_leaf(node):
            raise NotRowsError(call.module, "it uses a tensor with a graph that it does not hold")
        if id(node.variable) not in own:
            raise NotRowsError(call.module, "it uses a parameter that it does not hold")


class _Token:
    """Lives as long as the node of a graph that holds it."""


def _refuse_what_stays(call: Call, again: Again) -> None:
    """Refuse a call that leaves a tensor with a graph behind; the micro-batch's outputs are let go of."""
    tokens = []
    for node in _graph_of(again, _is_leaf)[0]:
        node.metadata["autoaccum"] = _Token()
        tokens.append(weakref.ref(node.metadata["autoaccum"]))
    node = None
    again.outputs.clear()
    if any(one() is not None for one in tokens):
        gc.collect()
        if any(one() is not None for one in tokens):
            raise NotRowsError(call.module, "it leaves a tensor with a graph behind")


def _are_inputs(again: Again) -> bool:
    """Return whether an output lies in the memory of an input, so that a write to one is a write to the other."""
    inputs = {one.untyped_storage().data_ptr() for one in again.inputs if one.numel()}
    outputs = [one for one in again.outputs if isinstance(one, torch.Tensor) and one.numel()]
    return any(one.untyped_storage().data_ptr() in inputs for one in outputs)


def _share_memory(again: Again) -> bool:
    """Return whether two outputs lie in the same memory, so that a write to one may be a write to the other."""
    outputs = [one for one in again.outputs if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    places = [one.untyped_storage().data_ptr() for one in outputs if one.numel()]
    return len(set(places)) < len(places)


def sizes_of(count: int) -> tuple[int, ...]:
    """Return how so many samples are split to be measured, unevenly where they can be."""
    if count in _SIZES:
        return _SIZES[count]
    first = count // 2 - (count % 2 == 0)
    return first, count - first
