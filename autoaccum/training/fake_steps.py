"""A step of training without values: forward, backward and the optimizer's step on fake copies, and what they take."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autoaccum.loss.functions import loss_function
from autoaccum.loss.stated import LossOf, total
from autoaccum.loss.weighting import zero_gradient
from autoaccum.memory.fake import FakeMemory, Fakes
from autoaccum.training.fake_copies import FakeCopies, FakeSamples
from autoaccum.window.attributes import is_expanded
from autoaccum.window.blocks import Level, levels_of, named_blocks
from autoaccum.window.modules import into_training
from autoaccum.window.optimizers import (
    allocate_state,
    make_optimizer,
    sparsely_trained,
    trainable_parameters,
)
from autoaccum.window.precision import Precision, autocast
from autoaccum.window.recomputing import Recomputing

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
    operations: int
    """Number of operations that were run; no bytes."""

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
        """Return the ways of saving memory by computing twice: see ``window.saving``."""
        return levels_of(self._modules, ("checkpoint",))

    def peak(self, size: int, level: Level) -> Peak:
        """Run a step with a micro-batch of that size, and return what it takes."""
        gc.collect()  # what a graph before has left in cycles is alive, and counts from its first use on
        named = named_blocks(self._modules) if level.blocks else {}
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
            operations=memory.operations,
        )

    def _held(self) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors that are there before a forward, in the order of ``Peak``."""
        yield [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]
        yield [p.grad for p in self._trained if p.grad is not None]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        yield [value for value in state if isinstance(value, torch.Tensor)]
        yield self._copies
