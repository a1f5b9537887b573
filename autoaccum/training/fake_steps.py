"""Steps of training on fake copies of model, functions, optimizer and samples, and the bytes they take."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from autoaccum.data import batches, objects
from autoaccum.data.dims import AtDim
from autoaccum.data.splits import Automatic
from autoaccum.distributed.gradients import zero_gradient
from autoaccum.errors import ArgumentError
from autoaccum.memory.fake import FakeMemory, Fakes
from autoaccum.step.checkpointing import Level, Recomputing, levels_of, named_submodules
from autoaccum.step.job import Precision, autocast
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.module_state import into_training
from autoaccum.step.optimizers import (
    allocate_state,
    make_optimizer,
    sparsely_trained,
    trainable_parameters,
    with_types_of,
)
from autoaccum.step.python_state import Attributes, is_expanded, surroundings_of
from autoaccum.step.terms import LossOf, total
from autoaccum.training.check import Examples

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


_CPU = torch.device("cpu")


class Peak(NamedTuple):
    """What a step with a micro-batch of one size takes, in bytes."""

    bytes: int
    """Most at once."""
    parameters: int
    """There all the time, as the next three are: parameters and buffers."""
    gradients: int
    """Those of the parameters, which the micro-batches before have left."""
    optimizer: int
    """The optimizer's state."""
    copies: int
    """Copies of buffers, by which a window is rolled back."""

    @property
    def held(self) -> int:
        """Return what is there before the forward."""
        return self.parameters + self.gradients + self.optimizer + self.copies


class FakeStep:
    """Runs steps of what a user trains, on copies of it."""

    def __init__(
        self,
        fakes: Fakes,
        samples: FakeSamples,
        modules: Sequence[nn.Module],
        functions: dict[str, Any],
        precision: Precision,
    ) -> None:
        """Copy what is trained.

        Args:
            fakes: makes tensors.
            samples: makes batches.
            modules: the user's, the model first.
            functions: the user's by their arguments: ``loss_fn``, ``training_step``, ``optimizer``.
            precision: that forwards compute in.
        """
        self._fakes, self._samples = fakes, samples
        # Modules first: what functions and the optimizer hold of them is then the same copies.
        copies = FakeCopies(fakes)
        self._modules = copies.of_modules(modules)
        self._model = self._modules[0]
        into_training(self._model)
        functions = {name: copies.of_function(function, name) for name, function in functions.items()}
        optimizer = functions.pop("optimizer")
        loss_fn, training_step = functions.values()
        self._context = autocast(precision, _CPU)
        self._loss_of: LossOf = loss_function(loss_fn, training_step)
        self._recomputing = Recomputing(self._modules, functions.values(), _CPU, has_values=False)
        parameters = trainable_parameters(self._model, self._modules, optimizer)
        sparse = {id(weight) for weight in sparsely_trained(self._modules)}
        with fakes.within():
            self._optimizer = make_optimizer(optimizer, None, parameters, (loss_fn, training_step))
            held = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
            trained = [p for p in ({id(p): p for p in parameters} | held).values() if p.requires_grad]
            # As they are in every micro-batch of a window but the first. Zeros would make a sparse one dense.
            self._trained = [p for p in trained if id(p) not in sparse]
            for p in self._trained:
                p.grad = zero_gradient(p)
            allocate_state(self._optimizer, self._modules)
            buffers = {id(b): b for module in self._modules for b in module.buffers() if not is_expanded(b)}
            self._copies = [buffer.detach().clone() for buffer in buffers.values()]
            # What makes its state in the step has it from now on.
            self._step(FakeMemory())

    def _step(self, memory: FakeMemory) -> None:
        """Step the optimizer; what it reads off tensors is 1."""
        with memory:
            memory.answers_items = True
            self._optimizer.step()

    def levels(self) -> list[Level]:
        """Return the ways of saving memory by computing twice: see ``step.memory_saving``."""
        return levels_of(self._modules, ("checkpoint",))

    def peak(self, size: int, level: Level) -> Peak:
        """Run a step, the optimizer's too, on a fake batch of ``size`` samples; return the bytes that it takes."""
        gc.collect()  # what a graph before has left in cycles is alive, and counts from its first use on
        named = named_submodules(self._modules) if level.blocks else {}
        self._recomputing.blocks = [named[name] for name in level.blocks]
        loss_of = self._recomputing.of_loss(self._loss_of) if level.blocks else self._loss_of
        batch = self._samples.batch(size)
        # A count of its own for each size: what an earlier one has left is counted when it is used, as on a device.
        memory = FakeMemory()
        with self._fakes.within():
            parameters, gradients, optimizer, copies = [memory.hold(tensors) for tensors in self._held()]
            with memory:
                with self._context():
                    loss = total(loss_of(self._model, batch))
                # The call of training itself, so that it takes the same.
                torch.autograd.backward(loss)
                del loss, batch
            # Its copies may be the peak, where samples take little: no plan makes that smaller.
            self._step(memory)
        return Peak(
            bytes=memory.peak,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            copies=copies,
        )

    def _held(self) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors that are there before a forward, in the order of ``Peak``."""
        yield [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]
        yield [p.grad for p in self._trained if p.grad is not None]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        yield [value for value in state if isinstance(value, torch.Tensor)]
        yield self._copies
