"""``AutoAccum``: the windows of autoaccum in Lightning's own loop, for a LightningModule as it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoaccum._checks import positive_int
from autoaccum.integrations.evaluation_sizes import ShortEpochs
from autoaccum.integrations.lightning_checks import OPTIONS, refuse_module, refuse_trainer, remade
from autoaccum.integrations.lightning_evaluation import Evaluation
from autoaccum.integrations.lightning_windows import Windows
from autoaccum.training.synonyms import elsewhere, meant_by, unknown_argument

# There are two packages with the same content, and each has a Callback of its own: that of the one that is in use.
if TYPE_CHECKING:
    Callback: Any = object
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    Callback = import_module("pytorch_lightning").Callback
else:
    Callback = import_module("lightning.pytorch").Callback

_STEPS = ("validation_step", "test_step", "predict_step")


class AutoAccum(Callback):  # type: ignore[misc]
    """A callback by which each batch of Lightning's loop is one optimizer step, in as many micro-batches as it takes.

    ::

        trainer = Trainer(callbacks=[AutoAccum(effective_batch=256)])

    Lightning's loop sees one batch for each step of the optimizer, and stays on the host with it. Where Lightning would
    run ``training_step`` on all of it, it is run on micro-batches, and leaves the gradient of the whole batch; memory
    that runs out has it run again in smaller ones. Clipping, stepping, schedules, checkpoints and hooks are Lightning's
    own, once for each batch, and what ``self.log`` was told of its micro-batches is logged as one value.

    A batch of validation, test or prediction in which memory runs out is run again in two halves, and those after it
    in pieces of that size; training hears nothing of it.
    """

    def __init__(self, effective_batch: int | None = None, **options: Any) -> None:
        """Set up.

        Args:
            effective_batch: samples of one optimizer step, over all ranks: the train DataLoader is made anew with so
                many in a batch. Left out, its batches are taken as they are.
            options: arguments of ``Accumulator``: micro_batch, max_micro_batch, memory_limit, num_items and others,
                but those that the LightningModule and the Trainer have themselves.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        if effective_batch is not None:
            positive_int("effective_batch", effective_batch)
        for name, value in options.items():
            if name not in OPTIONS:
                names = ("effective_batch", *OPTIONS)
                cure = _of_trainer(name) or elsewhere(name) or meant_by(name, names)
                raise unknown_argument("AutoAccum", name, value, cure or f"It has {', '.join(names)}.")
        self.effective_batch = effective_batch
        self._options = options
        self._windows: Windows | None = None
        self._epochs = ShortEpochs()
        self._found: dict[str, Any] = {}  # what a checkpoint had, until there is somebody to take it
        self._wiring = ExitStack()  # what is to be undone at the end of a run

    @property
    def accumulator(self) -> Any:
        """Return the ``Accumulator`` that runs the windows; None before the first."""
        return None if self._windows is None else self._windows.accumulator

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return the sizes of the micro-batches of the last window."""
        return () if self.accumulator is None else tuple(self.accumulator.micro_batches)

    # Lightning's hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of what runs a batch, until ``teardown``."""
        # A run that was killed by an error of another callback may have left something.
        self._unwire()
        strategy = trainer.strategy
        if stage == "fit":
            refuse_trainer(trainer)
            refuse_module(pl_module)
            # There is no hook between a batch and its optimizer step: what makes the closure of that step is replaced,
            # on this one object. What is counted and saved stays where Lightning looks for it.
            self._windows = Windows(trainer, self._options, self._epochs.events)
            self._put(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", self._windows.make_closure)
            self._remake_data(trainer)
            self._hold_batches(strategy, self._windows, trainer)
        for name in _STEPS:
            evaluation = Evaluation(trainer, name, getattr(strategy, name), self._options)
            self._put(strategy, name, evaluation.step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the trainer as it was."""
        self._unwire()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the trainer as it was."""
        self._unwire()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, now that weights and optimizers are those to go on from."""
        # Not in setup: there optimizers are not made yet, nor is their state read from a checkpoint.
        if self._windows is not None:
            self._windows.begin(self._found)

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out about the loss, memory and time, so that a resumed run does not search again."""
        return self._found if self._windows is None else self._windows.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep what ``state_dict`` returned for the run that begins."""
        self._found = dict(state_dict)

    # How it is wired.

    def _remake_data(self, trainer: Any) -> None:
        """Have the train DataLoader made anew, with a window in each batch."""
        if self.effective_batch is None:
            return
        source, size = trainer.fit_loop._data_source, self.effective_batch
        stock = source.dataloader

        # Where it is asked for, for a hook may make a new one each epoch, and its length is read at once.
        def of_windows() -> Any:
            loader = remade(stock(), size, trainer.world_size)
            self._epochs.look(size, loader.dataset, loader.sampler)
            return loader

        self._put(source, "dataloader", of_windows)

    def _hold_batches(self, strategy: Any, windows: Windows, trainer: Any) -> None:
        """Have batches of training stay on the host while they are whole."""
        windows.to_device = stock = strategy.batch_to_device

        # On the object, for any strategy; batches of validation are moved as ever, for callbacks look at them.
        def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            return batch if trainer.training else stock(batch, device=device, dataloader_idx=dataloader_idx)

        self._put(strategy, "batch_to_device", batch_to_device)

    def _put(self, owner: Any, name: str, value: Any) -> None:
        """Put something in the place of a method of one object."""
        if name in vars(owner):  # what somebody else has put there
            self._wiring.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._wiring.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _unwire(self) -> None:
        if self._windows is not None:
            self._found = self._windows.state_dict()
        self._wiring.close()


def _of_trainer(name: str) -> str:
    """Return who has an argument of ``Accumulator`` that a callback has not; empty where it is none."""
    return {
        "precision": "Pass it to the Trainer: precision='bf16-mixed'.",
        "clip_norm": "Pass gradient_clip_val to the Trainer.",
        "training_step": "It is the LightningModule's.",
        "loss_fn": "The loss is what the LightningModule's training_step returns.",
        "collate_fn": "It is the DataLoader's.",
    }.get(name, "")
