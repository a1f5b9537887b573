"""The kinds of data of ``loaders.py``, library by library."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of data."""

    make: Callable[[int, int], Any]
    """(samples, size of batches) -> data; anew, as in a new process"""
    plain: Callable[[Any, int], Iterable[Any]] = lambda data, batch: data
    """(data, size of batches) -> batches, as a loop without autoaccum would have them"""
    order: str = "same"
    """same: that of the plain loop; own: another one each epoch; draws: with repetitions"""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``fit``."""
    is_endless: bool = False


def loaded(data: Any, batch: int) -> Iterable[Any]:
    return DataLoader(data, batch_size=batch)


IN_ORDER = {"shuffle": False}


# Samples: an id and four numbers each.


def table(samples: int) -> torch.Tensor:
    features = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.arange(samples)[:, None].float(), features], 1)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.rows = table(samples)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class PairRows(Rows):
    """Rows that are read a batch at a time, with targets."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        return [{"x": row, "y": row[1]} for row in self.rows[indices]]


class Stream(IterableDataset[torch.Tensor]):
    """Rows one after the other, each worker its own; in batches or in another order each epoch where asked for."""

    def __init__(self, samples: int, batch: int | None = None, order: Callable[[int], Any] = range) -> None:
        self.rows, self.batch, self.order = table(samples), batch, order

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        rows = self.rows[torch.as_tensor(list(self.order(len(self.rows))))]
        mine = rows if worker is None else rows[worker.id :: worker.num_workers]
        yield from mine.split(self.batch) if self.batch else mine


class CountsEpochs(Stream):
    """Keeps count itself, and in nothing that can be saved."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, order=self._permuted)
        self.epoch = 0

    def _permuted(self, samples: int) -> Any:
        self.epoch += 1
        return np.random.RandomState(self.epoch).permutation(samples)


class Doubling(DataLoader[torch.Tensor]):
    """A loader that makes other batches than its parts say."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from batch.split(4)


class Batches:
    """An iterable of batches that is no class of PyTorch's."""

    def __init__(self, samples: int, batch: int, times: Iterable[Any] = (1,)) -> None:
        self.samples, self.batch, self.times = samples, batch, times

    def __iter__(self) -> Iterator[Any]:
        for _ in self.times:
            for rows in table(self.samples).split(self.batch):
                yield {"x": rows, "y": rows[:, 1]}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def in_torch() -> dict[str, Kind]:
    def kind(make: Callable[[int, int], Any], **said: Any) -> Kind:
        return Kind(make=make, **said)

    def data(make: Callable[[int], Any], **said: Any) -> Kind:
        """Return a kind without batches, whose plain loop is a DataLoader's."""
        return Kind(make=lambda n, b: make(n), **{"plain": loaded, "options": IN_ORDER, **said})

    def loader(make: Callable[[int], Any] = Rows, order: str = "same", **options: Any) -> Kind:
        return Kind(make=lambda n, b: DataLoader(make(n), **{"batch_size": b, **options}), order=order)

    def sampled(sampler: Callable[[int], Any], order: str = "own") -> Kind:
        return Kind(make=lambda n, b: DataLoader(Rows(n), batch_size=b, sampler=sampler(n)), order=order)

    def weights(n: int) -> list[float]:
        return [1.0 + i % 3 for i in range(n)]

    def batch_sampler(n: int, b: int) -> Any:
        return DataLoader(Rows(n), batch_sampler=BatchSampler(RandomSampler(range(n), generator=seeded()), b, False))

    def in_workers(**options: Any) -> Kind:
        return loader(num_workers=2, **options)

    return {
        "tuple of tensors": data(
            lambda n: (table(n), torch.zeros(n)), plain=lambda data, b: loaded(TensorDataset(*data), b)
        ),
        "tuple of tensors, shuffled": data(
            lambda n: (table(n), torch.zeros(n)),
            plain=lambda data, b: loaded(TensorDataset(*data), b),
            order="own",
            options={"shuffle": True},
        ),
        "dict of tensors": data(
            lambda n: {"x": table(n), "y": torch.zeros(n)}, plain=lambda data, b: loaded(TensorDataset(data["x"]), b)
        ),
        "tuple of NumPy arrays": data(
            lambda n: (table(n).numpy(), np.zeros(n)), plain=lambda data, b: loaded([*data[0]], b)
        ),
        "numpy.memmap": data(of_memmap, plain=lambda data, b: loaded([*np.array(data)], b)),
        "numpy.load of an .npz": data(of_npz, plain=lambda data, b: loaded([*data["x"]], b)),
        "list of pairs": data(lambda n: [(row, i) for i, row in enumerate(table(n))]),
        "list of batches": kind(lambda n, b: [*Batches(n, b)]),
        "TensorDataset": data(lambda n: TensorDataset(table(n))),
        "Dataset": data(Rows),
        "Dataset with __getitems__": data(PairRows),
        "Subset": data(lambda n: Subset(Rows(2 * n), range(n))),
        "ConcatDataset": data(lambda n: ConcatDataset([Subset(Rows(n), range(9)), Subset(Rows(n), range(9, n))])),
        "StackDataset": data(lambda n: StackDataset(x=Rows(n), y=Rows(n))),
        "DataLoader": loader(),
        "DataLoader, shuffled": loader(shuffle=True, order="own"),
        "DataLoader, shuffled by a generator": Kind(
            make=lambda n, b: DataLoader(Rows(n), batch_size=b, shuffle=True, generator=seeded()), order="own"
        ),
        "DataLoader(batch_size=None) of batches": loader(lambda n: [*table(n).split(6)], batch_size=None),
        "DataLoader with a collate_fn": loader(collate_fn=lambda rows: {"x": torch.stack(rows)}),
        "DataLoader, 2 workers": in_workers(),
        "DataLoader, 2 persistent workers, shuffled": in_workers(persistent_workers=True, shuffle=True, order="own"),
        "RandomSampler with a generator": sampled(lambda n: RandomSampler(range(n), generator=seeded())),
        "SubsetRandomSampler": sampled(lambda n: SubsetRandomSampler(range(n), generator=seeded())),
        "WeightedRandomSampler": sampled(lambda n: WeightedRandomSampler(weights(n), n), order="draws"),
        "WeightedRandomSampler, a generator": sampled(
            lambda n: WeightedRandomSampler(weights(n), n, generator=seeded()), order="draws"
        ),
        "DistributedSampler": sampled(lambda n: DistributedSampler(range(n), num_replicas=1, rank=0)),
        "batch_sampler": Kind(make=batch_sampler, order="own"),
        "BatchSampler as sampler": Kind(
            make=lambda n, b: DataLoader(Rows(n), batch_size=None, sampler=batch_sampler(n, b).batch_sampler),
            order="own",
        ),
        "IterableDataset of samples": data(Stream, options={"collate_fn": default_collate}),
        "IterableDataset of samples, not said": data(lambda n: ChainDataset([Stream(n)]), options={}),
        "IterableDataset of batches": kind(lambda n, b: DataLoader(Stream(n, b), batch_size=None)),
        "IterableDataset of batches, not said": kind(lambda n, b: Stream(n, 8)),
        "DataLoader of an IterableDataset": loader(Stream),
        "DataLoader of an IterableDataset, 2 workers": loader(Stream, num_workers=2),
        "DataLoader of one that draws an order": loader(lambda n: Stream(n, order=torch.randperm), order="own"),
        "DataLoader of one that counts epochs": loader(CountsEpochs, order="own"),
        "the same, 2 persistent workers": loader(CountsEpochs, order="own", num_workers=2, persistent_workers=True),
        "subclass of DataLoader with its own __iter__": kind(lambda n, b: Doubling(Rows(n), batch_size=b)),
        "iterable of batches": kind(lambda n, b: Batches(n, b)),
        "generator": kind(lambda n, b: iter(Batches(n, b, range(EPOCHS))), is_endless=True),
        "generator function": kind(lambda n, b: lambda: iter(Batches(n, b)), plain=lambda data, b: data()),
        "endless iterable": kind(lambda n, b: Batches(n, b, itertools.count()), is_endless=True),
        "endless sampler": kind(lambda n, b: DataLoader(Rows(n), batch_size=b, sampler=Endless(n)), is_endless=True),
    }


class Endless(Sampler[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self.samples))


def of_memmap(samples: int) -> Any:
    np.save("rows.npy", table(samples).numpy())
    return np.load("rows.npy", mmap_mode="r")


def of_npz(samples: int) -> Any:
    np.savez("rows.npz", x=table(samples).numpy(), y=np.zeros(samples))
    return np.load("rows.npz")


def in_datasets() -> dict[str, Kind]:
    import datasets

    def rows(n: int) -> Any:
        return datasets.Dataset.from_dict({"x": table(n).tolist()}).with_format("torch")

    def padded(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.tensor(batch["x"])}

    def stream(n: int, shards: int = 4) -> Any:
        return rows(n).to_iterable_dataset(num_shards=shards)

    def shuffled(n: int) -> Any:
        return stream(n).shuffle(seed=3, buffer_size=16)

    return {
        "Dataset": Kind(make=lambda n, b: rows(n), plain=loaded, options=IN_ORDER),
        "DataLoader, shuffled": Kind(make=lambda n, b: DataLoader(rows(n), batch_size=b, shuffle=True), order="own"),
        "with_transform": Kind(make=lambda n, b: rows(n).with_transform(padded), plain=loaded, options=IN_ORDER),
        "map-style, .batch(n)": Kind(make=lambda n, b: DataLoader(rows(n).batch(b), batch_size=None)),
        "column": Kind(make=lambda n, b: (rows(n)["x"],), plain=lambda data, b: loaded(data[0], b), options=IN_ORDER),
        "to_iterable_dataset": Kind(make=lambda n, b: stream(n), plain=loaded),
        "to_iterable_dataset, shuffled": Kind(make=lambda n, b: shuffled(n), plain=loaded, order="own"),
        "to_iterable_dataset, .batch(n)": Kind(make=lambda n, b: stream(n).batch(b)),
        "DataLoader of to_iterable_dataset": Kind(make=lambda n, b: DataLoader(stream(n), batch_size=b)),
        "the same, shuffled, 2 workers": Kind(
            make=lambda n, b: DataLoader(shuffled(n), batch_size=b, num_workers=2), order="own"
        ),
    }


def in_h5py() -> dict[str, Kind]:
    import h5py

    def file(n: int) -> Any:
        name = f"{next(COUNT)}.h5"
        with h5py.File(name, "w") as new:
            new["x"], new["y"] = table(n).numpy(), np.zeros(n)
        return h5py.File(name, "r")

    return in_files(file)


def in_zarr() -> dict[str, Kind]:
    import zarr

    def group(n: int) -> Any:
        found = zarr.open_group(f"{next(COUNT)}.zarr", mode="w")
        for name, array in (("x", table(n).numpy()), ("y", np.zeros(n))):
            found.create_array(name, data=array, chunks=(min(n, 256), *array.shape[1:]))
        return found

    return in_files(group)


COUNT = itertools.count()


def in_files(file: Callable[[int], Any]) -> dict[str, Kind]:
    """Return kinds of a file or group that holds the arrays x and y."""

    def plain(find: Callable[[Any], Any]) -> Any:
        return lambda data, batch: DataLoader(ArrayRows(find(data)), batch_size=batch)

    return {
        "array": Kind(make=lambda n, b: file(n)["x"], plain=plain(lambda data: data), options=IN_ORDER),
        "arrays in a tuple": Kind(
            make=lambda n, b: (file(n)["x"], torch.zeros(n)), plain=plain(lambda data: data[0]), options=IN_ORDER
        ),
        "file or group": Kind(make=lambda n, b: file(n), plain=plain(lambda data: data["x"]), options=IN_ORDER),
        "array, 2 workers": Kind(
            make=lambda n, b: file(n)["x"], plain=plain(lambda data: data), options={**IN_ORDER, "num_workers": 2}
        ),
    }


class ArrayRows(Dataset[torch.Tensor]):
    """What one writes to give a DataLoader an array in a file."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.array[index])


def in_pandas() -> dict[str, Kind]:
    import pandas

    return {"DataFrame": Kind(make=lambda n, b: pandas.DataFrame(table(n).numpy()))}


def in_pyarrow() -> dict[str, Kind]:
    import pyarrow

    return {"Table": Kind(make=lambda n, b: pyarrow.table({"x": table(n).tolist()}))}


def in_tensordict() -> dict[str, Kind]:
    from tensordict import TensorDict

    def rows(n: int) -> Any:
        return TensorDict({"x": table(n), "inner": {"y": torch.zeros(n)}}, batch_size=[n])

    def loader(n: int, b: int, **options: Any) -> Any:
        return DataLoader(rows(n), batch_size=b, collate_fn=lambda found: found, **options)

    return {
        "TensorDict": Kind(make=lambda n, b: rows(n), plain=lambda data, b: data.split(b), options=IN_ORDER),
        "DataLoader of a TensorDict": Kind(make=loader),
        "the same, shuffled": Kind(make=lambda n, b: loader(n, b, shuffle=True), order="own"),
        "batches that are TensorDicts": Kind(make=lambda n, b: [*rows(n).split(b)]),
    }


def in_torch_geometric() -> dict[str, Kind]:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as Loader
    from torch_geometric.loader import DenseDataLoader, NeighborLoader

    def graphs(n: int) -> list[Any]:
        return [Data(x=row[None], edge_index=torch.zeros(2, 1, dtype=torch.long)) for row in table(n)]

    def neighbours(n: int, b: int) -> Any:
        around = torch.stack([torch.arange(n), torch.arange(n).roll(1)])
        return NeighborLoader(Data(x=table(n), edge_index=around), num_neighbors=[1], batch_size=b)

    def dense(n: int, b: int) -> Any:
        return DenseDataLoader([Data(x=row) for row in table(n)], batch_size=b)

    return {
        "list of Data": Kind(make=lambda n, b: graphs(n), plain=Loader, options=IN_ORDER),
        "DataLoader": Kind(make=lambda n, b: Loader(graphs(n), batch_size=b)),
        "DataLoader, shuffled": Kind(make=lambda n, b: Loader(graphs(n), batch_size=b, shuffle=True), order="own"),
        "DenseDataLoader": Kind(make=dense),
        "NeighborLoader": Kind(make=neighbours),
    }


def in_torchdata() -> dict[str, Kind]:
    from torchdata import nodes
    from torchdata.stateful_dataloader import StatefulDataLoader

    def stateful(make: Callable[[int], Any] = Rows, order: str = "same", **options: Any) -> Kind:
        return Kind(make=lambda n, b: StatefulDataLoader(make(n), batch_size=b, **options), order=order)

    def node(n: int, b: int, order: Callable[[int], Any] = range, parallel: bool = False) -> Any:
        def of(indices: Any) -> torch.Tensor:
            return rows[indices]

        rows, sampler = table(n), nodes.SamplerWrapper(order(n))
        batches = nodes.Batcher(sampler, b, drop_last=False)
        mapped = (
            nodes.ParallelMapper(batches, of, num_workers=2, method="thread") if parallel else nodes.Mapper(batches, of)
        )
        return nodes.Loader(nodes.Prefetcher(mapped, 2) if parallel else mapped)

    def random(n: int) -> Any:
        return RandomSampler(range(n), generator=seeded())

    return {
        "StatefulDataLoader": stateful(),
        "StatefulDataLoader, shuffled": stateful(shuffle=True, order="own"),
        "the same, 2 workers": stateful(shuffle=True, order="own", num_workers=2),
        "StatefulDataLoader of an IterableDataset": stateful(Stream),
        "StatefulDataLoader of one, 2 workers": stateful(Stream, num_workers=2),
        "nodes": Kind(make=node),
        "nodes, a RandomSampler": Kind(make=lambda n, b: node(n, b, random), order="own"),
        "nodes, in threads, prefetched": Kind(make=lambda n, b: node(n, b, random, True), order="own"),
    }


def in_webdataset() -> dict[str, Kind]:
    import webdataset

    def rows(n: int) -> Any:
        name = f"{next(COUNT)}.tar"
        with webdataset.TarWriter(name) as writer:
            for i, row in enumerate(table(n)):
                writer.write({"__key__": f"{i:05}", "x.npy": row.numpy()})
        return webdataset.WebDataset(name, shardshuffle=False, empty_check=False).decode().to_tuple("x.npy")

    def loader(n: int, b: int, **options: Any) -> Any:
        return webdataset.WebLoader(rows(n).batched(b), batch_size=None, **options)

    def told(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        return lambda n, b: DataLoader(make(n, b), batch_size=None)

    return {
        "WebDataset": Kind(make=lambda n, b: rows(n), plain=loaded),
        "WebDataset, .batched(n)": Kind(make=lambda n, b: rows(n).batched(b)),
        "WebDataset, .shuffle(n)": Kind(make=lambda n, b: rows(n).shuffle(16), plain=loaded, order="own"),
        "WebLoader": Kind(make=lambda n, b: webdataset.WebLoader(rows(n), batch_size=b)),
        "DataLoader(batch_size=None) of a WebLoader of batches": Kind(make=told(loader)),
        "the same, a worker": Kind(make=told(lambda n, b: loader(n, b, num_workers=1))),
        "the same, unbatched and shuffled": Kind(
            make=told(lambda n, b: loader(n, b).unbatched().shuffle(16).batched(b)), order="own"
        ),
        "the same, .repeat()": Kind(make=told(lambda n, b: rows(n).batched(b).repeat()), is_endless=True),
    }


def in_litdata() -> dict[str, Kind]:
    import litdata
    from litdata.streaming.writer import BinaryWriter

    def rows(n: int, **options: Any) -> Any:
        folder = f"lit{n}"
        if not os.path.exists(folder):
            writer = BinaryWriter(folder, chunk_size=16)
            for i, row in enumerate(table(n)):
                writer[i] = {"x": row}
            writer.done()
            writer.merge(1)
        return litdata.StreamingDataset(folder, **options)

    def loader(n: int, b: int, num_workers: int = 0, **options: Any) -> Any:
        return litdata.StreamingDataLoader(rows(n, **options), batch_size=b, num_workers=num_workers)

    return {
        "StreamingDataset": Kind(make=lambda n, b: rows(n), plain=loaded),
        "StreamingDataset, shuffled": Kind(make=lambda n, b: rows(n, shuffle=True), plain=loaded, order="own"),
        "DataLoader of it": Kind(make=lambda n, b: DataLoader(rows(n), batch_size=b)),
        "StreamingDataLoader": Kind(make=loader),
        "StreamingDataLoader, shuffled": Kind(make=lambda n, b: loader(n, b, shuffle=True), order="own"),
        "the same, 2 workers": Kind(make=lambda n, b: loader(n, b, 2, shuffle=True), order="own"),
    }


def in_streaming() -> dict[str, Kind]:
    def rows(n: int, b: int, **options: Any) -> Any:
        import streaming

        folder = f"mds{n}"
        if not os.path.exists(folder):
            with streaming.MDSWriter(out=folder, columns={"x": "ndarray:float32:5"}, size_limit=1024) as writer:
                for row in table(n):
                    writer.write({"x": row.numpy()})
        return streaming.StreamingDataset(local=folder, batch_size=b, **{"shuffle": False, **options})

    def loader(n: int, b: int, **options: Any) -> Any:
        import streaming

        return streaming.StreamingDataLoader(rows(n, b, **options), batch_size=b)

    return {
        "StreamingDataset": Kind(make=rows, plain=loaded),
        "DataLoader of it": Kind(make=lambda n, b: DataLoader(rows(n, b), batch_size=b)),
        "DataLoader of it, shuffled": Kind(
            make=lambda n, b: DataLoader(rows(n, b, shuffle=True), batch_size=b), order="own"
        ),
        "StreamingDataLoader": Kind(make=loader),
        "StreamingDataLoader, shuffled": Kind(make=lambda n, b: loader(n, b, shuffle=True), order="own"),
    }


def in_monai() -> dict[str, Kind]:
    from monai import data as monai

    def cached(n: int) -> Any:
        return monai.CacheDataset([{"x": row} for row in table(n)], transform=as_meta, progress=False)

    def as_meta(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": monai.MetaTensor(sample["x"])}

    return {
        "CacheDataset": Kind(
            make=lambda n, b: cached(n), plain=lambda d, b: monai.DataLoader(d, batch_size=b), options=IN_ORDER
        ),
        "DataLoader": Kind(make=lambda n, b: monai.DataLoader(cached(n), batch_size=b)),
        "DataLoader, shuffled": Kind(
            make=lambda n, b: monai.DataLoader(cached(n), batch_size=b, shuffle=True), order="own"
        ),
        "ThreadDataLoader": Kind(make=lambda n, b: monai.ThreadDataLoader(cached(n), batch_size=b, num_workers=0)),
        "ThreadDataLoader(repeats=2)": Kind(
            make=lambda n, b: monai.ThreadDataLoader(cached(n), batch_size=b, num_workers=0, repeats=2)
        ),
    }


LIBRARIES = {
    "torch": in_torch,
    "datasets": in_datasets,
    "h5py": in_h5py,
    "zarr": in_zarr,
    "pandas": in_pandas,
    "pyarrow": in_pyarrow,
    "tensordict": in_tensordict,
    "torch_geometric": in_torch_geometric,
    "torchdata": in_torchdata,
    "webdataset": in_webdataset,
    "litdata": in_litdata,
    "streaming": in_streaming,
    "monai": in_monai,
}
DISTRIBUTIONS = {"streaming": "mosaicml-streaming"}
