"""Remembers all that a forward and backward may change, wherever it is held, and puts it back."""

from __future__ import annotations

import pickle
from collections.abc import Container, Iterable, Sequence
from copy import copy
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoaccum.data import randomness
from autoaccum.data.randomness import generator_state, set_generator_state
from autoaccum.memory.oom import insist
from autoaccum.window.attributes import Attributes, is_expanded, objects_of
from autoaccum.window.surroundings import is_generator, surroundings_of

SMALL_BYTES = 2**24
"""Bytes of parameters that are copied whatever they are: a forward may write to any, and the copy takes 3 ms."""


_LARGEST_BYTES = 2**26
"""Bytes of a tensor that a function holds and that is copied."""


class State:
    """Everything but gradients that a forward and backward may change, kept on the host.

    Values of buffers, of tensors that modules or the user's functions hold, of parameters that are written to; random
    states; attributes of modules and of the objects whose methods are called; variables of enclosing functions.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Iterable[object],
        device: torch.device,
        parameters: Sequence[torch.Tensor],
        written: Iterable[torch.Tensor] = (),
        like: State | None = None,
        without: Container[nn.Module] = (),
    ) -> None:
        """Remember how things are.

        Args:
            modules: whose forwards are run.
            functions: of the user's, which may hold state of their own.
            device: whose random state there is.
            parameters: what gets gradients.
            written: parameters that forwards have been seen to write to.
            like: what was remembered before: where values are the same, its copies do.
            without: layers that functions hold, and of which nothing is to be remembered.

        Raises:
            MemoryLimitError: the device has no memory to copy from or to.
        """
        self._device, self._functions = device, tuple(functions)
        held = surroundings_of(self._functions)
        everything = [*modules, *held.modules]
        layers = [layer for module in everything for layer in module.modules() if layer not in without]
        objects = objects_of(layers)
        # A teacher in an object, or in __dict__ where state_dict() does not see it, is a module all the same.
        layers += [one for one in objects if isinstance(one, nn.Module) and one not in without]
        self.layers = list({id(layer): layer for layer in layers}.values())
        """Every module, each once."""
        # Attributes of these may be rebound or written to: counters, caches, queues, lists that are appended to.
        self._held = held
        # An object in an attribute, such as a counter or a metric, is state as well.
        self._attributes = Attributes([*self.layers, *held.objects, *objects], held.containers)
        self._cells = [(cell, cell.cell_contents) for cell in held.cells]
        self._names = [(namespace, name, namespace[name]) for namespace, name in held.names]
        self._parameters = parameters
        trained = {id(p) for p in parameters if p.requires_grad}
        large = _data_among(held.tensors)
        small = [tensor for tensor in (*held.tensors, *self._attributes.tensors()) if id(tensor) not in large]
        # The attributes of modules hold their buffers, and their parameters too, which are chosen below.
        # Those of a scripted module are no attributes.
        buffers = [buffer for layer in self.layers for buffer in layer.buffers(recurse=False)]
        others = [t for t in (*small, *buffers) if not isinstance(t, nn.Parameter)]
        self._moving = _distinct([*others, *self._to_copy(written, trained)])
        own = [value for layer in self.layers for value in vars(layer).values() if is_generator(value)]
        generators = {id(generator): generator for generator in (*held.generators, *own)}.values()
        self._generators = [(generator, generator_state(generator)) for generator in generators]
        known = {} if like is None else dict(zip(map(id, like._moving), like._values, strict=True))
        self._values: list[torch.Tensor] = insist(partial(self._copy, known), "the state was laid aside")

    def _to_copy(self, written: Iterable[torch.Tensor], trained: set[int]) -> list[torch.Tensor]:
        """Return the parameters whose values are to be kept."""
        everything = [p for layer in self.layers for p in layer._parameters.values() if p is not None]
        frozen = [p for p in everything if id(p) not in trained and not is_lazy(p) and _is_plain(p)]
        bytes_of_frozen = sum(p.nbytes for p in frozen)
        own = [p for p in self._parameters if p.requires_grad and not is_lazy(p)]
        bytes_of_own = sum(p.nbytes for p in own)
        kept = list(written)
        if bytes_of_own <= SMALL_BYTES:
            kept.extend(own)
        # Frozen ones may be a momentum encoder, as large as the model; or a backbone that is much larger, and still.
        if bytes_of_frozen <= max(SMALL_BYTES, 2 * bytes_of_own):
            kept.extend(frozen)
        return kept

    @torch.no_grad()
    def _copy(self, known: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        self._random = randomness.get_state(self._device)
        copies: list[torch.Tensor] = []
        for tensor in self._moving:
            value = known.get(id(tensor))
            if value is None or value.shape != tensor.shape or not same(tensor, value):
                value = tensor.detach().to("cpu", copy=True)
            copies.append(value)
        return copies

    def num_bytes(self) -> int:
        """Return the bytes of what is kept of values."""
        return sum(value.nbytes for value in self._values)

    def values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors with the values that they had, on the host."""
        return list(zip(self._moving, self._values, strict=True))

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that have other values by now."""
        return [tensor for tensor, value in zip(self._moving, self._values, strict=True) if not same(tensor, value)]

    def renewed(self) -> State | None:
        """Return this with the random states of now; None where anything else has moved since.

        Raises:
            MemoryLimitError: the device has no memory to compare values in.
        """
        # What takes longest comes last: values may have to be read from a device.
        if not self._held.are(surroundings_of(self._functions)) or self._attributes.have_changed():
            return None
        if any(cell.cell_contents is not contents for cell, contents in self._cells):
            return None
        if any(namespace[name] is not value for namespace, name, value in self._names):
            return None
        if not insist(self._are_values_the_same, "the state was compared"):
            return None
        now = copy(self)
        now._random = randomness.get_state(self._device)
        now._generators = [(generator, generator_state(generator)) for generator, _ in self._generators]
        return now

    @torch.no_grad()
    def _are_values_the_same(self) -> bool:
        pairs = zip(self._moving, self._values, strict=True)
        return all(tensor.shape == value.shape and same(tensor, value) for tensor, value in pairs)

    def foreign_draws(self) -> bool:
        """Return whether Python's or NumPy's generator has moved since: what it draws has no rows."""
        now = randomness.get_state()
        if now[1] != self._random[1] or pickle.dumps(now[2]) != pickle.dumps(self._random[2]):
            return True
        own = [(one, state) for one, state in self._generators if not isinstance(one, torch.Generator)]
        return any(pickle.dumps(generator_state(one)) != pickle.dumps(state) for one, state in own)

    def generators(self) -> list[torch.Generator]:
        """Return PyTorch's generators among what is remembered."""
        return [generator for generator, _ in self._generators if isinstance(generator, torch.Generator)]

    def restore(self, *, random: bool = True) -> None:
        """Put everything back, the random states too unless told otherwise; it may be done again."""
        if random:
            randomness.set_state(self._random, self._device)
            for generator, state in self._generators:
                set_generator_state(generator, state)
        insist(self._restore, "the state was put back")

    def restore_parameters(self) -> None:
        """Put back parameters alone, which a layer may set by the first batch that it sees."""
        own = set(map(id, self._parameters))
        pairs = [(tensor, value) for tensor, value in self.values() if id(tensor) in own]
        insist(partial(_put_back, pairs), "parameters were put back")

    @torch.no_grad()
    def _restore(self) -> None:
        self._attributes.restore()
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._names:
            namespace[name] = value
        _put_back(self.values())


class Gradients:
    """The gradients of a run, taken away until ``restore``: on the host, where there is room."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        insist(self._take, "gradients were laid aside")

    @torch.no_grad()
    def _take(self) -> None:
        for p in self._parameters:
            if p.grad is not None:
                self._kept.append((p, p.grad.to("cpu")))
                p.grad = None

    def restore(self) -> None:
        """Put them back; it may be done again."""
        insist(self._restore, "gradients were put back")

    @torch.no_grad()
    def _restore(self) -> None:
        for p in self._parameters:
            p.grad = None
        for p, gradient in self._kept:
            p.grad = gradient.to(p.device)


@torch.no_grad()
def _put_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in pairs:
        if tensor.shape != value.shape:
            tensor.data = value.to(tensor.device, copy=True)
        elif not same(tensor, value):
            tensor.detach().copy_(value)


def same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a tensor holds a value, NaN for NaN, to the bit."""
    value = value.to(tensor.device)
    if torch.equal(tensor, value):
        return True
    return tensor.is_floating_point() and bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


def _data_among(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the tensors that are no state of what holds them: large ones, and many, are the data."""
    found, total = set(), 0
    for tensor in sorted(filter(_is_plain, tensors), key=lambda one: one.nbytes):
        total += tensor.nbytes
        if tensor.nbytes > _LARGEST_BYTES or total > 4 * _LARGEST_BYTES:
            found.add(id(tensor))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds values in one piece, as a sparse or a nested one does not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor once, without those that hold no values of their own."""
    kept = {}
    for tensor in tensors:
        if not is_lazy(tensor) and _is_plain(tensor) and not tensor.is_meta and not is_expanded(tensor):
            kept[id(tensor)] = tensor
    return list(kept.values())
