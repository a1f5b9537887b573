"""``AutoAccumTrainer``: the Trainer of transformers, at an exact effective batch in whatever memory there is.

::

    trainer = AutoAccumTrainer(model, args, train_dataset=dataset, effective_batch=256)
    trainer.train()

    class AutoAccumSFTTrainer(AutoAccumMixin, SFTTrainer): ...     # TRL's and sentence-transformers' trainers likewise

The trainer's loop sees one batch for each of its steps, the window: it clips, steps, logs and saves as it always does.
Here the window is cut into micro-batches, and run again in smaller ones when memory runs out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from autoaccum.integrations.evaluation_sizes import ShortEpochs
from autoaccum.integrations.trainer_arguments import (
    compares_batch,
    of_windows,
    options_in,
    refuse,
    refuse_loop,
    refuse_unknown,
    with_one_batch_per_window,
)
from autoaccum.integrations.trainer_batches import layout_of
from autoaccum.integrations.trainer_evaluation import Evaluation
from autoaccum.integrations.trainer_loss import LossOfTrainer, log_window, showing, trained_beside
from autoaccum.training.accumulator import Accumulator

_FILE = "autoaccum_{}.pt"
"""What a rank has found out about memory and about the loss, beside its random states in a checkpoint's folder."""


class AutoAccumMixin(Trainer):  # type: ignore[misc]  # of no known type where transformers is not installed
    """A mixin for trainers made after that of transformers, placed before them, which runs their steps as windows.

    It takes the arguments of the trainer, and besides, by name: effective_batch, the samples of each step over all
    ranks, which is per_device_train_batch_size times gradient_accumulation_steps times the ranks when left out; and
    those of ``Accumulator`` that say how windows are run: micro_batch, max_micro_batch, min_micro_batch, memory_limit,
    headroom, memory_saving, patience, accumulate, verify, strict, compression, split and
    batch_dim.
    """

    def __init__(self, *arguments: Any, effective_batch: int | None = None, **keywords: Any) -> None:
        """Set up the trainer with its own arguments, and these.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        """
        self.window_options = options_in(keywords)
        refuse_unknown(super().__init__, keywords)
        self.accumulator: Accumulator | None = None
        """What runs the windows; its ``events`` tell how they were cut. None before the first step."""
        self._epochs = ShortEpochs()
        self._of: tuple[Any, Any] | None = None  # the model and the optimizer that it was made for
        self._found: dict[str, Any] | None = None  # of a checkpoint, until there is an accumulator to take it
        changed = [of_windows(type(self), value, effective_batch) for value in arguments]
        keywords = {name: of_windows(type(self), value, effective_batch) for name, value in keywords.items()}
        super().__init__(*changed, **keywords)
        refuse(self, super().training_step)
        # Not before the trainer has made them where there are none.
        given: Any = vars(self)["args"]
        self.args: Any = with_one_batch_per_window(given, effective_batch)
        self._train_batch_size = self.args.train_batch_size
        self._layout = layout_of(self)
        # A loss that goes by a mean over the batch is computed once, on all of the window.
        self._by_default = {"accumulate": "joined"} if compares_batch(self) else {}
        self.evaluation = Evaluation(self, self._layout)
        """How evaluations are run; its ``micro_batch`` is None as long as their batches have fitted as they were."""

    # How the loop comes by its batches and its model.

    def get_train_dataloader(self) -> Any:
        """Return the loader of windows, which stay on the host: only their micro-batches are moved."""
        # A loader is prepared with the placement of its accelerator, and puts all that it yields there. Without one it
        # yields each rank's share from the rank's own copy of the data, those without a length included.
        placement, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.device_placement = placement
        self._epochs.look(self.args.train_batch_size * self.args.world_size, getattr(loader, "dataset", None))
        return loader

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Prepare as the trainer does, without wrapping the model for several ranks: windows join these themselves."""
        with _unwrapped(self.accelerator):
            prepared = super()._prepare_for_training(*arguments, **keywords)
        refuse_loop(self, prepared[1])
        return prepared

    # One window.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Leave the gradient of a window in ``.grad``, and return its loss, 0-dim and detached."""
        # What the stock step does beside the loss: modes of the model, and of optimizers that have some.
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        accumulator = self._accumulator_of(model)
        # TRL's own step keeps activations on the host within this.
        with getattr(self, "maybe_activation_offload_context", nullcontext()):
            loss = accumulator.backward(self._layout.rows(inputs))
        # Only now, for the window has committed: whatever was run again, or to be measured, has left no note.
        log_window(self, accumulator.outputs)
        return loss

    def _accumulator_of(self, model: nn.Module) -> Accumulator:
        """Return what runs the windows of a model and the optimizer as they are now: each training may have others."""
        # Accelerate's wrapper steps, and is the trainer's; gradients are left for the optimizer that it wraps.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.accumulator is None or self._of != (model, optimizer):
            self._of = (model, optimizer)
            self.accumulator = Accumulator(model, optimizer, **self._loss_arguments(model, optimizer))
            self.accumulator.events.extend(self._epochs.events)
        if self._found is not None:
            self.accumulator.load_state_dict(self._found)
            self._found = None
        return self.accumulator

    def _loss_arguments(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        loss_of, beside = LossOfTrainer(self, self._layout), trained_beside(self, model, optimizer)
        return self._by_default | self.window_options | {"training_step": showing(loss_of, beside)}

    # Evaluation, whose batches have a size of their own.

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Return what the trainer does for a batch; where it does not fit, of its pieces."""
        step = partial(
            super().prediction_step, model, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys
        )
        # Ranks wait for each other in a step of evaluation: pieces of one would be waited for by nobody.
        if self.accelerator.num_processes > 1:
            return step(inputs)
        trained = None if self.accumulator is None else self.accumulator.split_modules
        return self.evaluation.predict(inputs, step, trained)

    # Checkpoints.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Beside what a training goes on from, and so not where weights alone are saved.
        super()._save_optimizer_and_scheduler(output_dir)
        if self.accumulator is not None:
            path = os.path.join(output_dir, _FILE.format(self.args.process_index))
            # The rank that makes the directory may be yet to do so.
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.accumulator.state_dict(), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else os.path.join(checkpoint, _FILE.format(self.args.process_index))
        # A checkpoint of the stock trainer has none: then all is found out anew.
        if path is not None and os.path.isfile(path):
            self._found = torch.load(path, weights_only=True)
            self.accumulator = None


class AutoAccumTrainer(AutoAccumMixin):
    """The Trainer of transformers, whose steps are windows; see ``AutoAccumMixin``."""


@contextmanager
def _unwrapped(accelerator: Any) -> Iterator[None]:
    """Let an accelerator prepare models for autocast and compilation alone."""
    # In DDP each backward would wait for other ranks, of which each has as many micro-batches as its memory asks for.
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    try:
        yield
    finally:
        del accelerator.prepare_model
