"""What of a Lightning run is refused before it begins, and its train DataLoader with a window in each batch."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.training.accumulator import Accumulator
from autoaccum.training.declarations import arguments_of

_OF_OTHERS = (
    *("model", "optimizer", "loss_fn", "training_step", "collate_fn"),  # the LightningModule's and its loader's
    *("precision", "clip_norm"),  # the Trainer's
    "ranks",
)
OPTIONS = tuple(name for name in arguments_of(Accumulator) if name not in _OF_OTHERS)
"""Arguments of ``Accumulator`` that are passed on."""

# By their names, for each of the two packages has classes of its own.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_CALLBACKS = {
    "GradientAccumulationScheduler": "Leave it out: micro-batches are found, and effective_batch is the batch.",
    "BatchSizeFinder": "Leave it out: what fits is found by AutoAccum, and the batch of a step stays what it is.",
}


def refuse_trainer(trainer: Any) -> None:
    """Refuse a Trainer that cuts batches itself, or whose ranks share what one of them computes.

    Raises:
        ArgumentError: it names what is in the way, and the cure.
    """
    # It would have Lightning step on every so-manieth window alone.
    if trainer.accumulate_grad_batches != 1:
        times = trainer.accumulate_grad_batches
        cure = f"Leave it out, and pass AutoAccum(effective_batch=...), {times} times the batch size of the loader."
        raise ConflictingArgumentsError("accumulate_grad_batches", times, "AutoAccum", cure)
    # By the very class: what is derived from one may do anything in a backward.
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        cure = "Parts of a model that lie on other ranks are run by autoaccum.fit, under torchrun."
        raise ArgumentError("strategy", strategy, "one of one device, or DDP", cure)
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if name in _CALLBACKS:
            raise ConflictingArgumentsError("callbacks", name, "AutoAccum", _CALLBACKS[name])


def refuse_module(module: Any) -> None:
    """Refuse a LightningModule whose batches are not run as one loss and one backward.

    Raises:
        ArgumentError: it names what is in the way, and the cure.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        cure = "In a training_step that steps itself make an autoaccum.Accumulator, and call its step(batch)."
        raise ArgumentError("automatic_optimization", False, f"True: {name} is stepped by Lightning", cure)
    # It fetches what it wants, so that there is no batch to cut.
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ArgumentError(
            "training_step", f"{name}.training_step(dataloader_iter)", "one that takes a batch, which can be cut"
        )
    # Defined by Lightning itself where nobody has written another.
    if not _is_lightnings(type(module).backward):
        cure = "What it does to a gradient do in on_after_backward, which has that of the whole batch."
        raise ArgumentError("backward", f"{name}.backward", "the one of LightningModule", cure)


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Refuse several optimizers, or none.

    Raises:
        ArgumentError: there is not exactly one.
    """
    if len(optimizers) != 1:
        cure = "Let configure_optimizers return one, with a group of parameters for each rate."
        raise ArgumentError("configure_optimizers", len(optimizers), "one optimizer", cure)


def _is_lightnings(method: Any) -> bool:
    """Return whether a method comes from Lightning itself."""
    module: str = getattr(method, "__module__", "")
    return module.split(".")[0] in ("lightning", "pytorch_lightning")


_CURE = "Leave it out, and let the loader yield batches of as many samples: they are the windows then."


def remade(loader: Any, effective_batch: int, num_ranks: int) -> Any:
    """Return a loader like that one whose batches are a rank's part of a window.

    Args:
        loader: of the run.
        effective_batch: samples of one step, over all ranks.
        num_ranks: how many there are.

    Raises:
        ArgumentError: its batches are not cut by a size.
    """
    if effective_batch % num_ranks:
        cure = "Each rank's loader yields as many samples as any other's."
        raise ArgumentError("effective_batch", effective_batch, f"a multiple of the {num_ranks} ranks", cure)
    # How batches of another kind are made is not known, and so neither how larger ones would be.
    size, why = effective_batch // num_ranks, ""
    if not isinstance(loader, DataLoader):
        why = f"train_dataloader is a {type(loader).__name__}, and no DataLoader"
    elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        why = "what makes the batches of the train DataLoader is a sampler, or a dataset, of its own"
    if why:
        raise ArgumentError("effective_batch", effective_batch, f"None, for {why}", _CURE)
    # A copy, for its class may take other arguments than DataLoader does, and the user may go on with the loader.
    made = copy.copy(loader)
    kept = vars(made)  # a DataLoader refuses to be changed by its attributes
    kept |= {"batch_size": size, "batch_sampler": BatchSampler(loader.sampler, size, loader.drop_last)}
    kept["_iterator"] = None  # of workers that stay, which have the other batches
    # By what it was made Lightning would make it again, where ranks need samplers; else it goes by the attributes.
    for name in [name for name in kept if name.startswith("__pl_saved_")]:
        del kept[name]
    return made
