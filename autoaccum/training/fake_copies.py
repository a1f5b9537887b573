"""Copies of a user's model, functions, optimizer and samples, in which every tensor is a fake one.

Nothing of the user's is computed with or written to, and nothing of its size is allocated: what is copied are modules,
closures and containers, down to the tensors in them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from autoaccum.data import batches, objects
from autoaccum.data.dims import AtDim
from autoaccum.data.splits import Automatic
from autoaccum.errors import ArgumentError
from autoaccum.memory.fake import Fakes
from autoaccum.training.lazy import Examples
from autoaccum.window.attributes import Attributes
from autoaccum.window.optimizers import with_types_of
from autoaccum.window.surroundings import surroundings_of

T = TypeVar("T")


class FakeCopies:
    """Copies of several things that hold each other, and tensors in common."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        # What stands for what, by its id: ``copy.deepcopy`` asks here before it copies, and adds what it has copied.
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # of what there is a copy, so that no other thing gets its id

    def of_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Return copies of modules.

        Raises:
            ArgumentError: one cannot be copied.
        """
        layers = {id(layer): layer for module in modules for layer in module.modules()}
        # Those that are parameters or buffers, and those that are plain attributes, in lists and dicts too.
        self._fake(Attributes(layers.values()).tensors())
        return [self._copied(module, "model") for module in modules]

    def of_function(self, function: Any, argument: str) -> Any:
        """Return a function that holds copies where this one holds modules or tensors; one that holds none, as it is.

        Raises:
            ArgumentError: it holds what cannot be copied.
        """
        if isinstance(function, torch.optim.Optimizer):
            return self._of_optimizer(function)
        if isinstance(function, types.FunctionType):
            return self._of_plain_function(function, argument)
        # Methods, partials and objects that can be called are copied with all that they hold.
        return self._copied(function, argument) if self._holds_tensors(function) else function

    def _holds_tensors(self, thing: object) -> bool:
        # On the way their tensors are replaced, so that deepcopy allocates none of them.
        held = surroundings_of([thing])
        layers = {id(layer): layer for module in held.modules for layer in module.modules()}
        self._fake([*Attributes(layers.values()).tensors(), *held.tensors])
        return bool(held.modules or held.tensors)

    def _of_plain_function(self, function: types.FunctionType, argument: str) -> Any:
        """Return a function of the same code, whose variables of enclosing functions, and globals, are copies."""
        if id(function) in self._made:
            return self._made[id(function)]
        if not self._holds_tensors(function):
            return function
        self._kept.append(function)
        # ``deepcopy`` takes functions for constants. This one is known before it is filled, for it may name itself.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = dict(function.__globals__)
        made = types.FunctionType(function.__code__, names, function.__name__, None, cells or None)
        self._made[id(function)] = made
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.of_function(original.cell_contents, argument)
            except ValueError:  # a variable that has no value yet
                continue
        for name in function.__code__.co_names:
            if name in names:
                names[name] = self.of_function(names[name], argument)
        made.__defaults__ = tuple(self.of_function(value, argument) for value in function.__defaults__ or ())
        given = function.__kwdefaults__ or {}
        made.__kwdefaults__ = {name: self.of_function(value, argument) for name, value in given.items()}
        made.__dict__.update(vars(function))
        return made

    def _of_optimizer(self, optimizer: Any) -> Any:
        """Return a copy of an optimizer, over the copies of what it trains."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        state = batches.flatten(list(optimizer.state.values()))[0]
        self._fake([*trained, *(value for value in state if isinstance(value, torch.Tensor))])
        return self._copied(optimizer, "optimizer")

    def _fake(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._made:
                self._kept.append(tensor)
                self._made[id(tensor)] = self._fakes.of(tensor)
                if isinstance(tensor, nn.Parameter):
                    with_types_of([self._made[id(tensor)]], [tensor])

    def _copied(self, thing: T, argument: str) -> T:
        try:
            return copy.deepcopy(thing, self._made)
        except Exception as error:
            cure = f"copy.deepcopy of it raised {type(error).__name__}: {error}"
            raise ArgumentError(argument, type(thing).__name__, "something that can be copied", cure) from error


class FakeSamples:
    """Batches of any number of samples, made of a few real ones."""

    def __init__(self, fakes: Fakes, examples: Examples, num_samples: int, split: Any) -> None:
        """Take some samples.

        Args:
            fakes: makes tensors.
            examples: the real ones.
            num_samples: how many of them to take.
            split: what cuts them, and joins them.
        """
        self._fakes = fakes
        batch = examples.example(num_samples)
        # By values a split cuts packed sequences, graphs and what is flattened: then real samples are cut.
        leaves = batches.flatten(batch)[0]
        self._is_cut_as_fakes = isinstance(split, Automatic | AtDim) and not any(map(objects.has_samples, leaves))
        self._split = split.known(batch, num_samples)
        if self._is_cut_as_fakes:
            batch = self._faked(batch)
        self._doubled = [(num_samples, batch)]  # and twice, four times, eight times as many

    def batch(self, num_samples: int) -> Any:
        """Return so many samples, in memory of their own."""
        if not self._is_cut_as_fakes:
            return self._faked(self._cut(num_samples))
        # Copied, for a slice would hold the memory of all that it was cut from.
        with self._fakes.within():
            return batches.to_device(self._cut(num_samples), torch.device("cpu"), copy=True)

    def _cut(self, num_samples: int) -> Any:
        count, batch = self._doubled[-1]
        # Twice as many each time, for a search may ask for a million.
        while count < num_samples:
            count, batch = 2 * count, self._split.join([batch, batch])
            self._doubled.append((count, batch))
        enough = next(batch for count, batch in self._doubled if count >= num_samples)
        return self._split(enough, 0, num_samples)

    def _faked(self, batch: Any) -> Any:
        # Texts and numbers have no memory on a device: they go along as they are.
        leaves, spec = batches.flatten(batch)
        return spec.unflatten([self._fakes.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
