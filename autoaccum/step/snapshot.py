"""What a forward and backward may change besides gradients: saved before a window, put back for its replay.

``Snapshot`` keeps buffers and random states, ``Moving`` the Python attributes that forwards change, and ``State``
everything, for measurements that must leave no trace.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from autoaccum.data import randomness
from autoaccum.data.randomness import bytes_of, generator_state, set_generator_state
from autoaccum.memory.oom import insist
from autoaccum.step.python_state import (
    CONTAINERS,
    DEEPEST,
    OWN,
    Attributes,
    has_state,
    is_expanded,
    is_generator,
    objects_of,
    surroundings_of,
    version_of,
)

T = TypeVar("T")
_values_of = methodcaller("values")


class Snapshot:
    """Buffers, random states and which parameters need gradients, as they were when it was taken.

    A buffer's value is copied, and the tensor itself is remembered too: a forward may write into it (BatchNorm's
    running mean) or put another one in its place. Every buffer is copied every time: a version counter would tell
    which ones changed, but writing through ``.data``, as hand-written moving averages do, does not move it.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, functions: Iterable[object] = ()) -> None:
        """Set up.

        Args:
            modules: whose buffers there are.
            device: whose random states there are.
            functions: of the user's, which may draw from generators of their own.
        """
        self._device = device
        # All modules below these, each once, whether it has buffers now or gets some later.
        self._modules = modules
        self.has_other_layers = False
        """Whether layers have come, gone or changed places since the state was remembered before."""
        self._find_layers()
        # Which tensors stood where: (module, its buffers by name), of modules that have any.
        self._buffers: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        # What was in them: (buffer, copy) by the buffer's id, which the buffer that is held here keeps unique.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._flags: list[tuple[torch.Tensor, bool]] = []
        self._random: randomness.RandomState = ()
        # Looked for once: a window takes less time than the search.
        own = [value for owner in self._owners for value in vars(owner).values() if is_generator(value)]
        generators = {id(one): one for one in (*own, *surroundings_of(functions).generators)}
        self._generators = list(generators.values())
        self._drawn: list[Any] = []  # their states

    def _find_layers(self) -> None:
        self._owners = list({id(m): m for module in self._modules for m in module.modules()}.values())
        self._places = [owner._modules for owner in self._owners if owner._modules]
        self._children = list(chain.from_iterable(map(_values_of, self._places)))

    def take(self) -> None:
        """Remember the present state, in place of the one before, in the same memory where the buffers are the same.

        Raises:
            MemoryLimitError: there is no memory for it; nothing but what was remembered has changed.
        """
        insist(self._take, "buffers were copied")

    def _take(self) -> None:
        children = list(chain.from_iterable(map(_values_of, self._places)))
        self.has_other_layers = len(children) != len(self._children) or not all(map(is_, children, self._children))
        if self.has_other_layers:
            self._find_layers()
        self._flags = flags_of(self._owners)
        self._random = randomness.get_state(self._device)
        self._drawn = list(map(generator_state, self._generators))
        self._buffers = [(owner, dict(owner._buffers)) for owner in self._owners if owner._buffers]
        if self._buffers:
            self._copy_buffers()

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        """Copy every buffer, into the copy of the last time where there is one: this runs before every window."""
        before = self._copies
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        stale = []  # copies to write again
        for _, buffers in self._buffers:
            for buffer in buffers.values():
                # What a lazy layer has not built yet has no value. What is expanded shares its elements, so PyTorch
                # lets nothing write through it.
                if buffer is None or id(buffer) in copies or is_lazy(buffer) or is_expanded(buffer):
                    continue
                known = before.get(id(buffer))
                if known is not None and known[1].shape == buffer.shape:
                    copies[id(buffer)] = known
                    stale.append(known)
                else:
                    copies[id(buffer)] = (buffer, buffer.detach().clone())
        _copy([(copy, buffer) for buffer, copy in stale])
        self._copies = copies

    def read_by(self, read: Callable[[], T]) -> T:
        """Return what is read of the data; a generator that they draw from, too, is put back no more.

        What was read is kept when a window is run again, and its draws would be drawn a second time.
        """
        before = list(map(bytes_of, self._generators))
        try:
            return read()
        finally:
            held = zip(self._generators, self._drawn, before, strict=True)
            still = [(one, state) for one, state, was in held if bytes_of(one) == was]
            self._generators, self._drawn = [one for one, _ in still], [state for _, state in still]

    @property
    def has_generators(self) -> bool:
        """Return whether the user's own random generators are put back."""
        return bool(self._generators)

    def restore(self) -> None:
        """Put the remembered state back; it may be done again.

        Raises:
            MemoryLimitError: there is no memory for it.
        """
        insist(self._restore, "buffers were put back")

    def generators(self) -> list[Any]:
        """Return the generators of the user's own that are put back."""
        return list(self._generators)

    def modes(self) -> list[bool]:
        """Return of every module whether it is in training mode."""
        return [owner.training for owner in self._owners]

    def restore_random(self) -> None:
        """Put the remembered random states back, and nothing else."""
        randomness.set_state(self._random, self._device)
        for generator, state in zip(self._generators, self._drawn, strict=False):  # none before it is taken
            set_generator_state(generator, state)

    @torch.no_grad()
    def _restore(self) -> None:
        self.restore_random()
        put_back_flags(self._flags)
        before = {id(owner): buffers for owner, buffers in self._buffers}
        for owner in self._owners:
            # In place, for others may hold the dict; one that had no buffers loses those that a forward registered.
            if not isinstance(owner._buffers, dict):  # of a scripted module, which cannot register any
                continue
            owner._buffers.clear()
            owner._buffers.update(before.get(id(owner), {}))
        for buffer, copy in self._copies.values():
            # A forward has resized it: in place it cannot be made as it was.
            if buffer.shape != copy.shape:
                buffer.data = copy.clone()
        _copy(list(self._copies.values()))


def flags_of(layers: Iterable[nn.Module]) -> list[tuple[torch.Tensor, bool]]:
    """Return the parameters of layers, each with whether it needs a gradient."""
    return [(p, p.requires_grad) for one in layers for p in one._parameters.values() if p is not None and p.is_leaf]


def put_back_flags(flags: Iterable[tuple[torch.Tensor, bool]]) -> None:
    """Have parameters need gradients as they did: a step that has failed may have frozen some for a call."""
    for p, flag in flags:
        if p.requires_grad is not flag:
            p.requires_grad_(flag)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into its first, in one launch a dtype and device rather than one a buffer."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for target, source in pairs:
        groups[target.dtype, target.device].append((target, source))
    for group in groups.values():
        targets, sources = zip(*group, strict=True)
        torch._foreach_copy_(targets, sources)


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
        self._device = device
        held = surroundings_of(functions)
        everything = [*modules, *held.modules]
        layers = [layer for module in everything for layer in module.modules() if layer not in without]
        objects = objects_of(layers)
        # A teacher in an object, or in __dict__ where state_dict() does not see it, is a module all the same.
        layers += [one for one in objects if isinstance(one, nn.Module) and one not in without]
        self.layers = list({id(layer): layer for layer in layers}.values())
        """Every module, each once."""
        # Attributes of these may be rebound or written to: counters, caches, queues, lists that are appended to.
        # An object in an attribute, such as a counter or a metric, is state as well.
        self._attributes = Attributes([*self.layers, *held.objects, *objects], held.containers)
        self._flags = flags_of(self.layers)
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

    def values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors with the values that they had, on the host."""
        return list(zip(self._moving, self._values, strict=True))

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that have other values by now."""
        return [tensor for tensor, value in zip(self._moving, self._values, strict=True) if not same(tensor, value)]

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
        put_back_flags(self._flags)
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
            # In the parameter's type again, which a step may have changed and put back.
            p.grad = gradient.to(p.device, getattr(p, "grad_dtype", p.dtype) or gradient.dtype)


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


_SMALL_BYTES = 2**20
"""Bytes of a tensor or an array that is looked at before it is known whether it moves."""
_MOST_ENTRIES = 1000
"""Entries of a container that are looked at: what is longer is a vocabulary, or data."""
_FAR = 3
"""Objects in objects that may lead back to the model: of Lightning a trainer, a connector and a strategy."""
_PLAIN = (type(None), bool, int, float, str)
_DATA = (Dataset, DataLoader, Sampler, Iterator)
_ABSENT = object()


class Moving:
    """The attributes of modules, and of the objects that they hold, as they were when they were taken.

    Data that a model holds are left alone: what was read of them is kept when a window runs again.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Begin with nothing seen to move."""
        self._modules = modules
        self._number = 0
        self._marks: dict[str, tuple[Any, Any]] = {}  # each attribute with a mark of it, when it was last looked
        self._moved: dict[str, tuple[dict[str, Any], str]] = {}  # where what has moved so far lies, by its name
        # What was taken: attributes, what their containers and arrays hold, values of tensors; and all names there are.
        self._taken: list[tuple[dict[str, Any], str, Any]] = []
        self._held = Attributes(())
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.unsaved: list[str] = []
        """The names of what has moved and was not among what ``state_dict`` returned last."""

    def take(self) -> None:
        """Remember the attributes that have been seen to move; in the first windows, and at each doubling, all.

        Raises:
            MemoryLimitError: there is no memory for it.
        """
        self._number += 1
        is_look = self._number & (self._number - 1) == 0
        if is_look or self._taken or self._moved:  # of most models nothing moves
            insist(partial(self._take, is_look), "attributes were copied")

    def _take(self, is_look: bool) -> None:
        places = [(space, key) for _, space, key in self._look()] if is_look else list(self._moved.values())
        self._names = [(space, frozenset(space)) for _, space in self._spaces()] if is_look else []
        self._taken = [(space, key, space.get(key, _ABSENT)) for space, key in places]
        self._held = Attributes((), [[value for _, _, value in self._taken]])
        most = _SMALL_BYTES if is_look else None
        tensors = {id(one): one for one in self._held.tensors() if _is_state(one, most)}
        self._values = [(one, one.detach().clone()) for one in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was remembered; it may be done again."""
        self._held.restore()
        for space, names in self._names:
            for name in space.keys() - names - OWN:
                del space[name]
        for space, key, value in self._taken:
            if value is _ABSENT:
                space.pop(key, None)
            else:
                space[key] = value
        for tensor, value in self._values:
            if tensor.shape != value.shape:
                tensor.data = value.clone()
            else:
                tensor.copy_(value)

    def _look(self) -> list[tuple[str, dict[str, Any], str]]:
        """Note what has moved since it was last looked; return all attributes there are."""
        found = list(self._named())
        marks = {name: (space[key], _mark(space[key])) for name, space, key in found}
        for name, space, key in found:
            before = self._marks.get(name, (None, None))  # one that is new is what a forward has made
            if self._marks and (before[1] != marks[name][1] or _is_other(before[0], space[key])):
                self._moved[name] = space, key
        self._marks = marks
        return found

    def _named(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (name, the dict that holds it, its key there) of each attribute that is not every module's own."""
        for at, space in self._spaces():
            for key in space.keys() - OWN:
                yield f"{at}.{key}", space, key

    def _spaces(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of modules and of the objects that these hold, by name."""
        waiting = [
            (f"{index}.{name}" if name else str(index), vars(layer), 0)
            for index, module in enumerate(self._modules)
            for name, layer in module.named_modules()
        ]
        seen = {id(space) for _, space, _ in waiting}
        layers = {id(layer) for module in self._modules for layer in module.modules()}
        while waiting:
            at, space, depth = waiting.pop()
            yield at, space
            for key, value in space.items() if depth < DEEPEST else ():
                is_part = key not in OWN and has_state(value) and not isinstance(value, _DATA)
                if is_part and id(vars(value)) not in seen and not _holds(value, layers):
                    seen.add(id(vars(value)))
                    waiting.append((f"{at}.{key}", vars(value), depth + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return what has moved, by its names, for a checkpoint."""
        self._look()
        held = {name: space[key] for name, (space, key) in self._moved.items() if key in space}
        # What has a graph is an output of the last forward.
        held = {name: value for name, value in held.items() if not getattr(value, "requires_grad", False)}
        self.unsaved = sorted(name.partition(".")[2] for name, value in held.items() if not _is_saved(value))
        return {name: value for name, value in held.items() if _is_saved(value)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned, where there are such modules and objects."""
        spaces = dict(self._spaces())
        device = next((p.device for module in self._modules for p in module.parameters()), None)
        for name, value in state.items():
            at, _, key = name.rpartition(".")
            if at not in spaces:
                continue
            self._moved[name] = spaces[at], key
            there = spaces[at].get(key)
            if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and value.shape == there.shape:
                there.copy_(value)  # in place, for others may hold it
            else:
                spaces[at][key] = value.to(device) if isinstance(value, torch.Tensor) else value


def _holds(thing: Any, layers: set[int]) -> bool:
    """Return whether an object holds a layer of the model, as a trainer does that a module has a reference to."""
    found, seen = [thing], {id(thing)}
    for _ in range(_FAR):
        found = [one for each in found for one in vars(each).values() if has_state(one) and id(one) not in seen]
        if any(id(one) in layers for one in found):
            return True
        seen |= set(map(id, found))
    return False


def _is_state(tensor: torch.Tensor, most_bytes: int | None) -> bool:
    """Return whether a tensor in an attribute may hold state: no parameter, no output with a graph, no huge table."""
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return not is_expanded(tensor) and (most_bytes is None or tensor.nbytes <= most_bytes)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return what tells whether an object holds something else later."""
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if type(value) is np.ndarray:
        return value.tobytes() if value.nbytes <= _SMALL_BYTES and value.dtype.kind in "biufc" else id(value)
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, (*CONTAINERS, tuple)) and depth < DEEPEST:
        if len(value) > _MOST_ENTRIES or isinstance(value, set):
            return len(value)
        inside = value.items() if isinstance(value, dict) else value
        return [_mark(one, depth + 1) for one in inside]
    return id(value)


def _is_other(before: Any, now: Any) -> bool:
    """Return whether a tensor was put in another's place, which may have the same number as one that is gone."""
    return isinstance(before, torch.Tensor) and before is not now


def _is_saved(value: Any) -> bool:
    """Return whether a checkpoint holds such a value."""
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return all(map(_is_saved, value)) and all(map(_is_saved, value.values()))
    if type(value) in (list, tuple, set, deque):
        return all(map(_is_saved, value))
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc"
    return type(value) in _PLAIN or (type(value) is torch.Tensor and value.layout is torch.strided)
