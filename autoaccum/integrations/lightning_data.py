"""A DataLoader of a Lightning run, made anew with a whole window in each batch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from autoaccum.errors import ArgumentError

_FABRIC = {
    "lightning.pytorch": "lightning.fabric.utilities.data",
    "pytorch_lightning": "lightning_fabric.utilities.data",
}
"""Where each of the two packages has what makes loaders anew."""
_CURE = "Let the loader's own batches be the windows: leave effective_batch out."


def remade(loader: Any, effective_batch: int, num_ranks: int, package: str) -> Any:
    """Return a loader like that one whose batches are a rank's part of a window.

    Args:
        loader: of the run.
        effective_batch: samples of one step, over all ranks.
        num_ranks: how many there are.
        package: Lightning's, of which there are two.

    Raises:
        ArgumentError: its batches are not cut by a size.
    """
    if effective_batch % num_ranks:
        cure = "Each rank's loader yields as many samples as any other's."
        raise ArgumentError("effective_batch", effective_batch, f"a multiple of the {num_ranks} ranks", cure)
    size = effective_batch // num_ranks
    if not isinstance(loader, DataLoader):
        accepted = f"beside a DataLoader; train_dataloader is a {type(loader).__name__}"
        raise ArgumentError("effective_batch", effective_batch, accepted, _CURE)
    if loader.batch_size is None:
        # A sampler of batches of its own, or a dataset that yields batches: neither says how they are made.
        kind = "a batch sampler of its own" if type(loader.batch_sampler) is not BatchSampler else "batches of its own"
        kind = kind if loader.batch_sampler is not None else "no batch size"
        raise ArgumentError("effective_batch", effective_batch, f"beside a DataLoader that has not {kind}", _CURE)
    if loader.batch_size == size:
        return loader
    data, fabric = import_module(f"{package}.utilities.data"), import_module(_FABRIC[package])
    args, kwargs = data._get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    # What Lightning saves of a loader that a hook has made says by which names its arguments were passed.
    names = getattr(loader, "__pl_saved_arg_names", ())
    defaults = {"batch_size": 1}
    _, args, kwargs = fabric._replace_value_in_saved_args("batch_size", size, args, kwargs, defaults, names)
    if not hasattr(loader, "__pl_saved_args") or loader.drop_last:
        kwargs["drop_last"] = loader.drop_last
    return fabric._reinstantiate_wrapped_cls(loader, *args, **kwargs)


def package_of(trainer: Any) -> str:
    """Return the package of a trainer, or of the class that it is derived from: there are two with the same content."""
    own = (kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    return "pytorch_lightning" if any(name.startswith("pytorch_lightning.") for name in own) else "lightning.pytorch"
