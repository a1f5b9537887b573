"""The state besides gradients that a forward and backward changes, saved before a window, put back for its replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoaccum.data import randomness
from autoaccum.data.randomness import bytes_of, generator_state, set_generator_state
from autoaccum.memory.oom import insist
from autoaccum.window.attributes import is_expanded
from autoaccum.window.surroundings import is_generator, surroundings_of

T = TypeVar("T")
_values_of = methodcaller("values")


class Snapshot:
    """Buffers and random states, those of generators of the user's own too, as they were when it was taken.

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
        self._random: randomness.RandomState = ()
        # Looked for once: a window takes less time than the search.
        own = [value for owner in self._owners for value in vars(owner).values() if is_generator(value)]
        generators = {id(one): one for one in (*own, *surroundings_of(functions).generators)}
        self._generators = list(generators.values())
        self._drawn: list[Any] = []  # their states

    def _find_layers(self) -> None:
        self._owners = list({id(m): m for module in self._modules for m in module.modules()}.values())
        self._places = [owner._modules for owner in self._owners if owner._modules]
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(_values_of, self._places)))

    def take(self) -> None:
        """Remember the present state, in place of the one before, in the same memory where the buffers are the same.

        Raises:
            MemoryLimitError: there is no memory for it; nothing but what was remembered has changed.
        """
        insist(self._take, "buffers were copied")

    def _take(self) -> None:
        children = self._children_now()
        self.has_other_layers = len(children) != len(self._children) or not all(map(is_, children, self._children))
        if self.has_other_layers:
            self._find_layers()
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
        if not self._generators:
            return read()
        before = list(map(bytes_of, self._generators))
        try:
            return read()
        finally:
            held = zip(self._generators, self._drawn, before, strict=True)
            still = [(one, state) for one, state, was in held if bytes_of(one) == was]
            self._generators, self._drawn = [one for one, _ in still], [state for _, state in still]

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


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into its first, in one launch a dtype and device rather than one a buffer."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for target, source in pairs:
        groups[target.dtype, target.device].append((target, source))
    for group in groups.values():
        targets, sources = zip(*group, strict=True)
        torch._foreach_copy_(targets, sources)
