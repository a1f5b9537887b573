"""Opens whatever a user passes as data: each kind has a source of windows of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from autoaccum._checks import no_class
from autoaccum._units import shown
from autoaccum.data import foreign, graphs, lists, objects
from autoaccum.data.arrays import opened
from autoaccum.data.base import Collate, Source
from autoaccum.data.datasets import DatasetSource
from autoaccum.data.dims import AtDim
from autoaccum.data.lazy import LazyRows, has_lazy
from autoaccum.data.orders import Order, count_in_batches
from autoaccum.data.splits import Automatic, is_said
from autoaccum.data.streams import StreamSource
from autoaccum.data.tensors import TensorSource
from autoaccum.errors import ArgumentTypeError, ConflictingArgumentsError, DataError, EmptyDatasetError

_ACCEPTED = "a Dataset, a DataLoader, a tuple or dict of tensors, or an iterable of batches"
# What a user's DataLoader says of its workers, and the one that we start instead is to say too.
_LOADER_OPTIONS = ("worker_init_fn", "prefetch_factor", "multiprocessing_context", "timeout")


def open_source(
    data: Any,
    *,
    seed: int,
    shuffle: bool,
    device: torch.device,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    budget_bytes: int | None = None,
    argument: str = "data",
    split: Any = None,
) -> Source:
    """Open whatever ``data`` is, as the kind of source that serves it.

    Args:
        data: what the user passed: see ``autoaccum.fit``.
        seed: of the order of samples, and of what reading them draws.
        shuffle: whether each epoch has an order of its own; a DataLoader and an iterable say so themselves.
        device: where micro-batches go.
        collate_fn: makes a batch of a list of samples.
        num_workers: processes that read ahead.
        budget_bytes: most to keep of the samples of a window; None: keep all.
        argument: what errors call ``data``.
        split: what cuts batches, where data are some; as they are read where it is None.

    Raises:
        ArgumentTypeError: it is nothing that can be read.
        ConflictingArgumentsError: a DataLoader, and what it would bring.
        EmptyDatasetError: it holds no sample.
        RaggedBatchError: its tensors disagree on dim 0.
    """
    no_class(argument, data, _ACCEPTED)
    data = opened(data)
    foreign.refuse(argument, data)
    if has_lazy(data):
        if is_said(split):
            raise DataError(
                f"{argument}: split= and batch_dim= are for what is in memory, and an array in a file is read by rows. "
                f"Pass what is in it, array[:], or leave them out."
            )
        data = LazyRows(data, argument)
    if isinstance(data, DataLoader):
        for name, value in (("collate_fn", collate_fn), ("num_workers", num_workers)):
            if value:
                cure = "The DataLoader brings its own."
                raise ConflictingArgumentsError(name, value, f"a DataLoader as {argument}", cure)
        return _open_loader(data, seed=seed, device=device, budget_bytes=budget_bytes, argument=argument, split=split)
    # An IterableDataset is a Dataset too, by PyTorch's classes, without indices: it comes first.
    if isinstance(data, IterableDataset):
        stream: Any = DataLoader(data, batch_size=None, num_workers=num_workers) if num_workers else data
        # Of one that nobody says a collate_fn for, what it yields tells whether it makes batches itself.
        return StreamSource(
            stream,
            collate=collate_fn or default_collate,
            is_told=collate_fn is not None,
            seed=seed,
            device=device,
            argument=argument,
            split=split,
        )
    # Tensors with a row for each sample, though a tuple and a mapping have indices and a length as a dataset has.
    if isinstance(data, torch.Tensor | tuple | Mapping) or objects.is_collection(data):
        if collate_fn is not None:
            cure = "Tensors are batches already; wrap them in a Dataset to have a collate_fn called on their samples."
            raise ConflictingArgumentsError("collate_fn", collate_fn, f"tensors as {argument}", cure)
        # By its names: a TensorDict has the length of its rows.
        if not isinstance(data, torch.Tensor) and not (data if isinstance(data, tuple) else data.keys()):
            raise EmptyDatasetError(argument, f"it is an empty {type(data).__name__}.")
        if is_said(split) and not isinstance(split, AtDim):  # of what is no rows, one batch that is cut in its order
            return StreamSource([data], collate=None, seed=seed, device=device, argument=argument, split=split)
        # A dict of lists is data as well, of which one entry is a sample's.
        split = Automatic() if split is None else split
        order = _plain_order(split.count(data, argument), seed, shuffle, argument)
        return TensorSource(data, order=order, device=device, split=split)
    if is_said(split) and graphs.is_graphs(data):  # it has indices and a length as a dataset has, or likes another
        return StreamSource([data], collate=None, seed=seed, device=device, argument=argument, split=split)
    if isinstance(data, list) and not data:
        raise EmptyDatasetError(argument, "it is an empty list.")
    is_list = holds_samples(data, collate_fn=collate_fn, split=split, argument=argument)
    if is_list or isinstance(data, Dataset) or _is_dataset(data):
        return _open_dataset(
            data,
            order=_plain_order(_length(data, argument), seed, shuffle, argument),
            collate=collate_fn or default_collate,
            seed=seed,
            device=device,
            num_workers=num_workers,
            loader_options={},
            budget_bytes=budget_bytes,
        )
    # Whatever else can be iterated yields batches: a loader of another library, a list of them.
    if hasattr(data, "__iter__") and not isinstance(data, str | bytes):
        if collate_fn is not None:
            cure = "An iterable is one of batches; make a list of samples of it, list(data), or an IterableDataset."
            raise ConflictingArgumentsError("collate_fn", collate_fn, f"an iterable as {argument}", cure)
        return StreamSource(data, collate=None, seed=seed, device=device, argument=argument, split=split)
    raise ArgumentTypeError(
        argument,
        data,
        _ACCEPTED,
        "Wrap what you have in a torch.utils.data.Dataset.",
    )


def _open_loader(
    loader: DataLoader[Any], *, seed: int, device: torch.device, budget_bytes: int | None, argument: str, split: Any
) -> Source:
    """Open a DataLoader: its parts, where windows can be cut from the samples of its dataset, else what it yields."""
    # A stream, or without a batch_sampler a dataset whose samples are batches already: what it yields is cut.
    # So is that of a subclass which iterates in its own way: it may filter, repeat or fetch what its dataset has not.
    is_own = any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    if is_own or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return StreamSource(loader, collate=None, seed=seed, device=device, argument=argument, split=split)
    # A sampler without a length may never end, and cannot be drawn for a whole epoch in advance. Nor can one whose
    # batches hold too many samples to be counted by drawing them.
    order = None
    if hasattr(_sampler(loader), "__len__") and hasattr(loader.batch_sampler, "__len__"):
        order = _loader_order(loader, seed, argument)
    if order is None:
        return StreamSource(
            _SamplerStream(loader), collate=loader.collate_fn, seed=seed, device=device, argument=argument
        )
    # Of any other DataLoader the parts are taken, and not its batches: a window is cut from samples.
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS} if loader.num_workers else {}
    return _open_dataset(
        loader.dataset,
        order=order,
        collate=loader.collate_fn,
        seed=seed,
        device=device,
        num_workers=loader.num_workers,
        loader_options=options,
        budget_bytes=budget_bytes,
    )


def holds_samples(data: Any, *, collate_fn: Any, split: Any, argument: str = "data") -> bool:
    """Return whether data is a list of samples: whoever collates has these, and whoever says a split has batches.

    Raises:
        AmbiguousBatchError: its entries may be images, or as many samples as these have channels.
        DataError: they are the parts of one batch.
    """
    # Of an empty one nothing can be told: it is refused as that.
    if not isinstance(data, list) or not data or is_said(split):
        return False
    return collate_fn is not None or lists.read_list(data, argument).are_samples


def _is_dataset(data: object) -> bool:
    """Return whether data is map-style without saying so, like the datasets of Hugging Face.

    A list is not: it may be one of batches.
    """
    has_indices = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    return has_indices and hasattr(data, "__len__") and not isinstance(data, list | str | bytes)


def _open_dataset(
    dataset: Any, *, order: Order, collate: Collate, device: torch.device, num_workers: int, **options: Any
) -> Source:
    """Open a map-style dataset; one of tensors as the tensors that it holds, whose rows are gathered at once."""
    # type(), not isinstance: a subclass may have its own __getitem__.
    if type(dataset) is TensorDataset and collate is default_collate and not num_workers:
        return TensorSource(tuple(dataset.tensors), order=order, device=device)
    if objects.is_collection(dataset):  # of which a collate_fn gets rows, and not a list of samples
        dataset, collate = _CollectionRows(dataset), _JoinedRows(collate)
    return DatasetSource(dataset, order=order, collate=collate, device=device, num_workers=num_workers, **options)


class _CollectionRows:
    """The rows of a TensorDict, or the like, each as one of one row."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def __len__(self) -> int:
        return objects.count(self._collection)

    def __getitem__(self, index: int) -> Any:
        return objects.cut(self._collection, index, index + 1)


class _JoinedRows:
    """A collate_fn that calls another one with the rows as one object, as a DataLoader does."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(objects.join(samples))


def _length(dataset: Any, argument: str) -> int:
    """Return the length of a dataset.

    Raises:
        DataError: it has none that is a number.
    """
    try:
        return len(dataset)
    except Exception as error:
        raise DataError(f"{argument}: its length cannot be read: {shown(error)}. Mend its __len__.") from error


def _plain_order(num_samples: int, seed: int, shuffle: bool, argument: str) -> Order:
    """Return the order of a dataset without a sampler; refuse an empty one."""
    if num_samples == 0:
        raise EmptyDatasetError(argument, "its length is 0.")
    return Order(num_samples, seed=seed, shuffle=shuffle)


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader was made with ``shuffle=True``, or draws as one that was."""
    return type(_sampler(loader)) is RandomSampler  # a subclass may yield any order


def _loader_order(loader: DataLoader[Any], seed: int, argument: str) -> Order | None:
    """Return the order of a DataLoader's samplers; what its own ``shuffle=`` made is replaced by a seeded one.

    It is None where batches are drawn of which only drawing tells how many samples they hold, and that takes too long.
    """
    # A plain sequential or random sampler is replaced by an order that is a function of (seed, epoch). Any other one
    # draws by itself, under a seed.
    size = len(loader.dataset)  # type: ignore[arg-type]
    # By type() throughout, for a subclass may draw otherwise. A BatchSampler itself only cuts what its sampler draws,
    # and windows are cut here.
    if type(loader.batch_sampler) is not BatchSampler:
        count = count_in_batches(loader.batch_sampler, seed)
        return None if count is None else Order(count, seed=seed, sampler=loader.batch_sampler, in_batches=True)
    sampler = _sampler(loader)
    if type(sampler) is SequentialSampler:
        return _plain_order(size, seed, False, argument)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return _plain_order(size, seed, True, argument)
    return Order(len(sampler), seed=seed, sampler=sampler)


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what draws the indices of a DataLoader."""
    # That of its batches: given a BatchSampler, a DataLoader makes a sequential sampler beside it that nothing asks.
    batch_sampler: Any = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else loader.sampler


class _SamplerStream:
    """The samples that a DataLoader's sampler, which may never end, asks of its dataset; read in this process."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self._in_batches = type(loader.batch_sampler) is not BatchSampler
        self.sampler: Any = loader.batch_sampler if self._in_batches else _sampler(loader)

    def __iter__(self) -> Iterator[Any]:
        for drawn in self.sampler:
            indices = drawn if self._in_batches else (drawn,)
            for index in indices:
                yield self.dataset[index]
