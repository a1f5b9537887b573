"""What a run is told of the form of its data: a list that is read as samples, a DataLoader that leaves samples out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from autoaccum.data import batches, lists
from autoaccum.events import Notice
from autoaccum.training.options import FitArguments
from autoaccum.window.batch_norm import count_batch_norms

_MOST_TOLD = 4
"""Entries in which two batches differ, of which as many are told."""


def heeding(arguments: FitArguments) -> FitArguments:
    """Return arguments with the ``drop_last`` of a DataLoader: a short batch there is a short window here."""
    return replace(arguments, drop_last=True) if _loader_drops(arguments.data) else arguments


def of_data(arguments: FitArguments, epoch_samples: int | None, asked: Callable[[], int]) -> list[Notice]:
    """Return what is to be said of the data.

    Args:
        arguments: of the run.
        epoch_samples: samples of an epoch, where that is known.
        asked: () -> samples of the next window.
    """
    said = []
    is_said = arguments.split is not None or arguments.batch_dim != 0
    for argument in ("data", "validation_data"):
        data = getattr(arguments, argument)
        # Whoever collates has samples, and whoever says how batches are cut has batches.
        if isinstance(data, list) and data and not is_said and arguments.collate_fn is None:
            said += [lists.notice(argument)] if lists.read(data, argument).is_new else []
    if epoch_samples is not None and _ends_in_one(arguments, epoch_samples, asked):
        said.append(_ONE_SAMPLE)
    # Where both leave out as many nothing is other than in a loop over the loader.
    if _loader_drops(arguments.data) and epoch_samples is not None:
        size, window = _batch_size(arguments.data), asked()
        if epoch_samples % size != epoch_samples % window:
            said.append(_of_loader(size, epoch_samples % size, window, epoch_samples % window))
    return said


def of_validation(trained: Any, validated: Any) -> list[Notice]:
    """Return what is to be said of a micro-batch of validation data beside one of data: whether it is of another kind.

    Of another size it may be for good reasons, such as pictures that are not cropped.
    """
    ours, theirs = (
        {path: leaf for path, leaf in batches.leaves_by_path(each).items() if leaf is not None}
        for each in (trained, validated)
    )
    differ = [f"has no batch{path}" for path in ours if path not in theirs]
    differ += [f"has batch{path} besides" for path in theirs if path not in ours]
    both = [path for path in ours if path in theirs and not _are_alike(ours[path], theirs[path])]
    differ += [f"has {_kind(theirs[path])} for batch{path}, where data has {_kind(ours[path])}" for path in both]
    if not differ:
        return []
    return [
        Notice(
            cause=f"validation_data {', '.join(differ[:_MOST_TOLD])}",
            consequence="A validation may end the run by an error, or tell of something else than what is trained",
            cure="Let its samples be like those of data; autoaccum.evaluate tells before training whether they can be "
            "computed",
        )
    ]


def _ends_in_one(arguments: FitArguments, epoch_samples: int, asked: Callable[[], int]) -> bool:
    """Return whether the run comes to a window of one sample with BatchNorm layers that normalise by it."""
    # A schedule is a function of the user's: it is asked where something depends on that.
    if arguments.drop_last or not count_batch_norms(arguments.modules()):
        return False
    window = asked()
    budgets = (arguments.samples, None if arguments.steps is None else arguments.steps * window)
    return epoch_samples % window == 1 and all(budget is None or budget >= epoch_samples for budget in budgets)


def _are_alike(ours: Any, theirs: Any) -> bool:
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return type(ours) is type(theirs)
    # Classes may be numbers here and shares of all classes there, as where samples are mixed in training alone.
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return True
    return ours.dtype is theirs.dtype and ours.ndim == theirs.ndim


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return f"{leaf.dtype} of {leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"


def _loader_drops(data: object) -> bool:
    """Return whether data is a DataLoader that leaves out a short batch."""
    if not isinstance(data, DataLoader):
        return False
    # One that is given a BatchSampler says False itself. Of other batch samplers the batches are taken as they are.
    batch_sampler = data.batch_sampler
    return bool(data.drop_last or (type(batch_sampler) is BatchSampler and batch_sampler.drop_last))


def _batch_size(loader: DataLoader[Any]) -> int:
    # That of a BatchSampler, where the loader was given one and has no size itself.
    return int(getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1)


_ONE_SAMPLE = Notice(
    cause="The last window of an epoch has one sample, and the model has BatchNorm layers",
    consequence="They normalise by that sample alone, or, where it has one value per channel, end the run by an error",
    cure="Pass drop_last=True, or an effective_batch that does not leave a single sample",
)


def _of_loader(batch_size: int, of_loader: int, window: int, of_windows: int) -> Notice:
    return Notice(
        cause=f"The DataLoader has drop_last=True, and batches of {batch_size} where a step has {window} samples",
        consequence=f"What is left out of an epoch is the short window at its end, {of_windows} samples, where the "
        f"loader leaves out {of_loader}",
        cure="Make the DataLoader without drop_last to train on all of them",
    )
