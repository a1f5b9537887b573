"""The windows of a Lightning run: what stands in the place of ``training_step`` and ``backward`` on a whole batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoaccum.errors import DataError
from autoaccum.events import Event
from autoaccum.integrations.lightning_checks import refuse_optimizers
from autoaccum.integrations.lightning_records import Records
from autoaccum.training.accumulator import Accumulator


class Windows:
    """Runs each batch of a run's loop as one window, by an ``Accumulator`` of its optimizer."""

    def __init__(self, trainer: Any, options: Mapping[str, Any], said: Sequence[Event]) -> None:
        """Set up; the optimizer is not there yet.

        Args:
            trainer: whose loop it is.
            options: arguments of the ``Accumulator``.
            said: events from before there is one, which come first of its own.
        """
        self._said = said
        self._trainer = trainer
        self._options = dict(options)
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        # Of the package that the trainer is from, of which there may be two.
        self._call: Any = sys.modules[type(self._loop).__module__].call
        self._stock_closure = self._loop._make_closure
        self._kwargs: dict[str, Any] = {}  # of training_step, but for the batch
        self._records = Records(trainer.fit_loop.epoch_loop._results, trainer.lightning_module, trainer.global_rank)
        self._found: Mapping[str, Any] = {}
        self._key: object = None  # what the accumulator was made for
        self.accumulator: Accumulator | None = None
        """The one that runs the windows; None before the first."""
        self.to_device: Callable[..., Any]
        """Lightning's own way of a batch to the device, with the hooks of the module."""

    def begin(self, found: Mapping[str, Any]) -> None:
        """Begin a run with what an earlier one has found out."""
        refuse_optimizers(self._trainer.optimizers)
        self._found = found
        self._key = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out, and on which device."""
        if self.accumulator is None:
            return dict(self._found)
        return self.accumulator.state_dict()

    def make_closure(self, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Return what Lightning calls to have the gradient of a batch: a closure, which optimizers may call again."""
        # Weights are averaged, say, and a last epoch runs forwards alone, of batches as the loader has them.
        if self._loop._skip_backward:
            batch = self.to_device(kwargs["batch"], dataloader_idx=0)
            return self._stock_closure({**kwargs, "batch": batch}, optimizer, batch_idx)
        return _Closure(self, kwargs, optimizer, batch_idx)

    def run(self, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Leave the gradient of a batch in ``.grad``; return what ``training_step`` returned, as Lightning keeps it."""
        trainer, call = self._trainer, self._call
        accumulator = self._made()
        # Before the forward and not between it and the backward, for there are several of either.
        self._loop._on_before_zero_grad(optimizer)
        self._loop._optimizer_zero_grad(batch_idx, optimizer)
        self._kwargs = dict(kwargs)
        batch = self._kwargs["batch"]
        self._records.begin()
        try:
            loss = accumulator.backward(batch)
        except _NothingReturned:
            if self._records.are_there:
                raise _some_returned_nothing() from None
            return self._loop.output_result_cls(None)
        outputs = dict(accumulator.outputs)
        returned = self._records.commit(outputs, accumulator.micro_batches, loss)
        # Once, with the loss of the batch: there is a backward for each micro-batch, and which of them hold is told
        # at the end.
        call._call_callback_hooks(trainer, "on_before_backward", loss)
        call._call_lightning_module_hook(trainer, "on_before_backward", loss)
        call._call_callback_hooks(trainer, "on_after_backward")
        call._call_lightning_module_hook(trainer, "on_after_backward")
        return self._loop.output_result_cls(loss, extra=returned)

    def _made(self) -> Accumulator:
        """Return the accumulator; another one where what is trained, or what steps, has changed."""
        # Callbacks unfreeze layers, and a finder of learning rates puts another optimizer there for a while.
        optimizer = self._trainer.optimizers[0]
        key = optimizer, {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self.accumulator is None or key != self._key:
            self.accumulator = Accumulator(
                self._trainer.lightning_module, optimizer, training_step=self._micro_batch, **self._options
            )
            self.accumulator.events.extend(self._said)
            if self._found:
                self.accumulator.load_state_dict(self._found)
            self._found, self._key = {}, key
        return self.accumulator

    def _micro_batch(self, model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch, and what is to be had of it at the window's end."""
        call, trainer = self._call, self._trainer
        with self._records.taking() as record:
            batch = self.to_device(batch, dataloader_idx=0)
            kwargs = {**self._kwargs, "batch": batch}
            # The module itself, and not what DDP has wrapped it in: ranks add up their gradients once for a window.
            with trainer.precision_plugin.train_step_context():
                returned = call._call_lightning_module_hook(trainer, "training_step", *kwargs.values())
        # There is no loss to go on with; whatever has run of the window is rolled back.
        if returned is None:
            raise _NothingReturned
        if not isinstance(returned, Mapping) or "loss" not in returned:
            # Lightning has its own words for what is neither.
            loss, extra = self._loop.output_result_cls.from_training_step_output(returned).closure_loss, {}
            loss = returned if isinstance(returned, torch.Tensor) else loss
        else:
            loss, extra = returned["loss"], {name: value for name, value in returned.items() if name != "loss"}
        outputs = self._records.take(record, loss, extra)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None and loss.requires_grad:
            # Lightning takes the scale out of the gradient before it clips and steps. Multiplied into the loss it would
            # be read as a part of what the loss divides by, and be lost to float16, for which it is there.
            loss.register_hook(scaler.scale)
        return loss, outputs


class _Closure:
    """What Lightning hands to the optimizer's step: it computes the gradient, and keeps what was returned."""

    def __init__(self, windows: Windows, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> None:
        self._windows = windows
        self._of_batch = (kwargs, optimizer, batch_idx)
        self._result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Compute the gradient; return the loss."""
        self._result = self._windows.run(*self._of_batch)
        loss: torch.Tensor | None = self._result.loss
        return loss

    def consume_result(self) -> Any:
        """Return what the last call has returned."""
        if self._result is None:
            cure = "Call the closure in optimizer_step, or pass it to optimizer.step."
            raise DataError(f"optimizer_step has not called its closure, so there is no gradient. {cure}")
        result, self._result = self._result, None
        return result


class _NothingReturned(Exception):
    """A ``training_step`` that has returned None, by which Lightning's skip a batch."""


def _some_returned_nothing() -> DataError:
    return DataError(
        "training_step returned None for some micro-batches of a batch and a loss for others: a batch is skipped as a "
        "whole. Return a loss that counts nothing for these, outputs.sum() * 0, or leave such samples out of the data."
    )
