"""A DataLoader of a Lightning run with a whole window in each batch."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from autoaccum.errors import ArgumentError

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
