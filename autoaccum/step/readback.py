"""Brings numbers of a device to the host: all that a window leaves to be known by one copy, which is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from autoaccum.step.terms import Count, Reduction, Term


class Numbers:
    """Numbers that are wanted on the host: asked for one after the other, and then read together."""

    def __init__(self) -> None:
        """Begin with none."""
        self._wanted: dict[int, torch.Tensor] = {}  # by identity, which holding them keeps unique
        self._found: dict[int, torch.Tensor] = {}
        self._launched: set[torch.device] = set()

    @property
    def are_wanted(self) -> bool:
        """Tell whether any were asked for, or something that is to be waited for."""
        return bool(self._wanted or self._launched)

    def wait_for(self, device: torch.device) -> None:
        """Ask to wait for what was launched on a device, such as copies to the host, once numbers are read."""
        self._launched.add(device)

    def want(self, values: Iterable[object]) -> None:
        """Ask for those of some values that are tensors on a device."""
        for value in values:
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                self._wanted[id(value)] = value

    def want_of(self, reductions: Iterable[Reduction]) -> None:
        """Ask for what reductions count, and for what their terms were made of."""
        for reduction in reductions:
            self.want([reduction.items, *reduction.constants])
            for term in reduction.terms:
                self.want(term.tensors())

    def read(self) -> None:
        """Wait for the device, once, and copy what was asked for."""
        by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for tensor in self._wanted.values():
            by_device[tensor.device].append(tensor)
        for device, tensors in by_device.items():
            # To 64 bits without loss, whatever they are; those of a type together, for each operation is a launch.
            exact = torch.float32 if device.type == "mps" else torch.float64
            by_type: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
            for tensor in tensors:
                by_type[tensor.dtype].append(tensor)
            flat = [torch.cat([t.detach().reshape(-1) for t in of_type]).to(exact) for of_type in by_type.values()]
            copied, start = torch.cat(flat).cpu(), 0
            for tensor in [t for of_type in by_type.values() for t in of_type]:
                # What was read is a count as the device has it: in its own type it compares as it would there.
                part = copied[start : start + tensor.numel()]
                self._found[id(tensor)] = part.to(tensor.dtype).reshape(tensor.shape)
                start += tensor.numel()
        for device in self._launched - by_device.keys():
            torch.accelerator.synchronize(device)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host."""
        return self._found.get(id(value), value)

    def count(self, value: Count) -> float:
        """Return what a tensor of one number holds."""
        return float(self.tensor(value)) if isinstance(value, torch.Tensor) else value

    def reduction(self, reduction: Reduction) -> Reduction:
        """Return a reduction with all its numbers on the host: as if its loss had been computed there."""
        if not isinstance(reduction.items, torch.Tensor) and not reduction.terms and not reduction.constants:
            return reduction
        terms = tuple(map(self.term, reduction.terms))
        constants = tuple(map(self.count, reduction.constants))
        return replace(reduction, items=self.count(reduction.items), terms=terms, constants=constants)

    def term(self, term: Term) -> Term:
        """Return a term with its numbers on the host."""
        if not term.is_unread:
            return term
        return replace(
            term,
            means=self.count(term.means),
            factor=replace(term.factor, value=self.count(term.factor.value)),
            weights=tuple([(self.tensor(weights), numbers) for weights, numbers in term.weights]),
            ones=tuple(map(self.count, term.ones)),
        )


def read_now(reduction: Reduction) -> Reduction:
    """Return a reduction whose terms were read off their device, for whoever does not mind to wait for it."""
    numbers = Numbers()
    numbers.want_of([reduction])
    numbers.read()
    return numbers.reduction(reduction)


def read_all(values: Sequence[Count]) -> Iterator[float]:
    """Return counts one after the other; those on a device are read together."""
    numbers = Numbers()
    numbers.want(values)
    numbers.read()
    return map(numbers.count, values)
