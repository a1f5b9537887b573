"""What every source of data promises: windows in an order of (seed, epoch) alone, readable again in other sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from autoaccum.data.base import Source
from autoaccum.data.sources import open_source
from autoaccum.errors import ArgumentTypeError, DataError, EmptyDatasetError, RaggedBatchError

CPU = torch.device("cpu")
N = 23


class Numbers(Dataset[Any]):
    """Sample i is (i, a random number drawn while it is read), from each of the three generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor(index), torch.tensor(drawn, dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(N):
            yield torch.tensor(index), torch.rand(3, dtype=torch.float64)


class Batches:
    """An iterable of batches of 7, the last short."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, N, 7):
            index = torch.arange(start, min(start + 7, N))
            yield index, torch.rand(len(index), 3, dtype=torch.float64)


def padding(samples: list[Any]) -> Any:
    """Collate as a function of a user's own would, and say how many samples there were."""
    index, drawn = zip(*samples, strict=True)
    return torch.stack(index), torch.stack(drawn), torch.full((len(samples),), len(samples))


def tensors() -> Any:
    return torch.arange(N), torch.rand(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"data": tensors()},
    "dict of tensors": lambda: {"data": dict(zip("xy", tensors(), strict=True))},
    "TensorDataset": lambda: {"data": TensorDataset(*tensors())},
    "dataset": lambda: {"data": Numbers()},
    "dataset, nothing kept": lambda: {"data": Numbers(), "budget_bytes": 0},
    "dataset, workers": lambda: {"data": Numbers(), "num_workers": 2},
    "dataset, workers, nothing kept": lambda: {"data": Numbers(), "num_workers": 2, "budget_bytes": 0},
    "dataset, collate_fn": lambda: {"data": Numbers(), "collate_fn": padding},
    "dataset, collate_fn, workers": lambda: {"data": Numbers(), "collate_fn": padding, "num_workers": 2},
    "loader": lambda: {"data": DataLoader(Numbers(), batch_size=5, shuffle=True)},
    "loader, workers": lambda: {"data": DataLoader(Numbers(), batch_size=5, shuffle=True, num_workers=2)},
    "loader, sampler": lambda: {
        "data": DataLoader(Numbers(), batch_size=4, sampler=torch.utils.data.RandomSampler(range(N), num_samples=N))
    },
    "stream": lambda: {"data": Stream()},
    "loader of a stream": lambda: {"data": DataLoader(Stream(), batch_size=4)},
    "loader of a stream, workers": lambda: {"data": DataLoader(Stream(), batch_size=4, num_workers=1)},
    "batches": lambda: {"data": Batches()},
}
_SLOW = ("dataset, workers, nothing kept", "dataset, collate_fn, workers", "loader of a stream, workers")
"""Begin processes, as others do that are here."""


def kinds(names: Iterable[str]) -> pytest.MarkDecorator:
    found = [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in names]
    return pytest.mark.parametrize("kind", found)


every_kind = kinds(KINDS)
SHUFFLED = [kind for kind in KINDS if "stream" not in kind and kind != "batches"]


def source_of(kind: str, seed: int = 0) -> Source:
    return open_source(**{"seed": seed, "shuffle": True, "device": CPU, **KINDS[kind]()})


def leaves(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, drawn)."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return values[0], values[1]


def read(source: Source, epoch: int, effective_batch: int, micro_batch: int) -> list[list[tuple[int, list[float]]]]:
    """Windows of (index, drawn) pairs."""
    reader = source.read(epoch, lambda position: [micro_batch] * 3)
    windows = []
    while (window := reader.window(effective_batch)) is not None:
        windows.append(read_window(window, micro_batch))
    return windows


def read_window(window: Any, micro_batch: int) -> list[tuple[int, list[float]]]:
    pairs: list[tuple[int, list[float]]] = []
    position = 0
    while position < window.num_samples:
        size = min(micro_batch, window.num_samples - position)
        index, drawn = leaves(window.micro_batch(position, size))
        assert len(index) == len(drawn) == size
        pairs += zip(index.tolist(), drawn.tolist(), strict=True)
        position += size
    return pairs


@every_kind
def test_each_sample_once_in_windows_of_the_effective_batch(kind: str) -> None:
    windows = read(source_of(kind), 0, 8, 3)
    assert [len(window) for window in windows] == [8, 8, 7]
    assert sorted(index for window in windows for index, _ in window) == list(range(N))


@every_kind
def test_what_is_read_never_depends_on_the_plan(kind: str) -> None:
    """Find the same samples in the same order, with the same random augmentation, whatever the micro-batch."""
    expected = read(source_of(kind), 1, 8, 8)
    for micro_batch in (1, 3, 5):
        assert read(source_of(kind), 1, 8, micro_batch) == expected


@every_kind
def test_a_window_can_be_read_again_in_other_sizes(kind: str) -> None:
    source = source_of(kind)
    reader = source.read(0, lambda position: [4] * 2)
    windows = []
    while (window := reader.window(8)) is not None:
        first = read_window(window, 4)
        position_only = window.micro_batch(0, 2)
        assert leaves(position_only)[0].tolist() == [index for index, _ in first[:2]]
        assert read_window(window, 3) == first
        windows.append(first)
    assert windows == read(source_of(kind), 0, 8, 4)


@every_kind
def test_editing_a_batch_does_not_reach_what_is_kept(kind: str) -> None:
    window = source_of(kind).read(0, lambda position: [8]).window(8)
    assert window is not None
    first = read_window(window, 8)
    for leaf in leaves(window.micro_batch(0, 8)):
        leaf.zero_()
    assert read_window(window, 8) == first


@every_kind
def test_reading_leaves_the_random_states_alone(kind: str) -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    source = source_of(kind)
    read(source, 0, 8, 3)
    source.example(4)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@kinds(SHUFFLED)
def test_order_is_a_function_of_seed_and_epoch(kind: str) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [index for window in read(source_of(kind, seed), epoch, 8, 3) for index, _ in window]

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@every_kind
def test_whole_windows_only(kind: str) -> None:
    reader = source_of(kind).read(0, lambda position: [4])
    assert reader.window(8, whole=True) is not None
    assert reader.window(8, whole=True) is not None
    assert reader.window(8, whole=True) is None


@every_kind
def test_example_has_any_size_and_takes_nothing(kind: str) -> None:
    source = source_of(kind)
    for size in (1, 5, 50):
        assert len(leaves(source.example(size))[0]) == size
    assert read(source, 0, 8, 3) == read(source_of(kind), 0, 8, 3)


def test_collate_fn_sees_the_final_micro_batch() -> None:
    """See the size that was asked for, also when workers had collated it in another one."""
    for num_workers in (0, 2):
        source = open_source(Numbers(), seed=0, shuffle=True, device=CPU, collate_fn=padding, num_workers=num_workers)
        window = source.read(0, lambda position: [4, 4]).window(8)
        assert window is not None
        assert window.micro_batch(0, 4)[2].tolist() == [4] * 4
        assert window.micro_batch(0, 3)[2].tolist() == [3] * 3
        assert window.micro_batch(3, 5)[2].tolist() == [5] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_replay_collates_whole_samples_also_where_collating_takes_parts_out(stream: bool) -> None:
    class Dicts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"value": float(index), "label": index}

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (Dicts()[index] for index in range(len(Dicts())))

    def pops(samples: list[Any]) -> Any:
        return torch.tensor([sample.pop("label") for sample in samples])

    source = open_source(Stream() if stream else Dicts(), seed=0, shuffle=False, device=CPU, collate_fn=pops)
    window = source.read(0, lambda position: [4]).window(8)
    assert window is not None
    for _ in range(2):
        assert window.micro_batch(0, 8).tolist() == list(range(8))


def test_past_the_budget_samples_are_read_again() -> None:
    class Counting(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.reads += 1
            return super().__getitem__(index)

    for budget_bytes, again in ((None, 8), (3 * 32, 8 + 6), (0, 16)):  # a sample is 32 bytes
        dataset = Counting()
        source = open_source(dataset, seed=0, shuffle=True, device=CPU, budget_bytes=budget_bytes)
        window = source.read(0, lambda position: [2]).window(8)
        first = read_window(window, 2)
        assert dataset.reads == 1 + 8  # the first one tells that samples draw
        assert read_window(window, 2) == first
        assert dataset.reads == 1 + again


def test_loader_brings_its_sampler() -> None:
    weights = [0.0] * 20 + [1.0] * 3
    loader = DataLoader(Numbers(), batch_size=2, sampler=WeightedRandomSampler(weights, 12))
    drawn = [
        index for window in read(open_source(loader, seed=0, shuffle=False, device=CPU), 0, 8, 3) for index, _ in window
    ]
    assert len(drawn) == 12
    assert set(drawn) == {20, 21, 22}


def test_loader_brings_its_batch_sampler() -> None:
    loader = DataLoader(Numbers(), batch_sampler=[[3, 1], [4, 1, 5]])
    assert [
        [index for index, _ in window]
        for window in read(open_source(loader, seed=0, shuffle=True, device=CPU), 0, 4, 3)
    ] == [
        [3, 1, 4, 1],
        [5],
    ]


def test_a_list_without_tensors_is_cut_with_the_batch() -> None:
    batches = [
        {"x": torch.arange(4.0), "names": ["a", "b", "c", "d"], "scale": 2},
        {"x": torch.arange(2.0), "names": ["e", "f"], "scale": 2},
    ]
    window = open_source(batches, seed=0, shuffle=True, device=CPU).read(0, lambda position: [6]).window(6)
    assert window is not None
    batch = window.micro_batch(3, 2)
    assert batch["names"] == ["d", "e"]
    assert batch["scale"] == 2
    assert batch["x"].tolist() == [3.0, 0.0]


class Failing(Dataset[Any]):
    """Runs out of memory once, in whichever process reads sample 5 first."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            raise MemoryError
        return torch.tensor(index), torch.rand(3, dtype=torch.float64)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_oom_while_reading_loses_nothing(num_workers: int, tmp_path: Path) -> None:
    source = open_source(Failing(tmp_path / "mark"), seed=0, shuffle=False, device=CPU, num_workers=num_workers)
    reader = source.read(0, lambda position: [4] * 2)
    found = []
    while (window := reader.window(8)) is not None:
        try:
            found += read_window(window, 4)
        except MemoryError:
            found += read_window(window, 4)
    assert [index for index, _ in found] == list(range(N))


def test_an_oom_inside_an_iterator_is_no_end_of_data() -> None:
    def fails() -> Iterator[torch.Tensor]:
        yield torch.zeros(4, 1)
        raise MemoryError

    reader = open_source(fails(), seed=0, shuffle=False, device=CPU).read(0, lambda position: [4])
    with pytest.raises(DataError, match="ran out of memory"):
        reader.window(8)


def test_a_sampler_may_yield_tuples() -> None:
    class Pairs(Numbers):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return super().__getitem__(index[0] * index[1])

    loader = DataLoader(Pairs(), batch_size=4, sampler=[(3, 1), (4, 2)])  # type: ignore[arg-type]
    source = open_source(loader, seed=0, shuffle=False, device=CPU)
    assert source.num_samples == 2
    assert [index for window in read(source, 0, 8, 3) for index, _ in window] == [3, 8]


def test_a_sampler_may_never_end() -> None:
    class Forever:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from range(3)

    loader = DataLoader(Numbers(), batch_size=4, sampler=Forever())  # type: ignore[arg-type]
    source = open_source(loader, seed=0, shuffle=False, device=CPU)
    assert source.num_samples is None
    window = source.read(0, lambda position: [4]).window(8)
    assert window is not None
    assert [index for index, _ in read_window(window, 4)] == [0, 1, 2, 0, 1, 2, 0, 1]


class Opened(Numbers):
    """A dataset that each worker prepares for itself, as PyTorch's documentation shows."""

    file: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.file is not None
        return super().__getitem__(index)


def open_file(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.file = worker  # type: ignore[attr-defined]


def test_worker_init_fn_sees_the_users_dataset() -> None:
    loader = DataLoader(Opened(), batch_size=4, num_workers=1, worker_init_fn=open_file)
    windows = read(open_source(loader, seed=0, shuffle=False, device=CPU), 0, 8, 8)
    assert [len(window) for window in windows] == [8, 8, 7]


def test_texts_stay_with_their_samples_when_workers_batches_are_cut() -> None:
    class Named(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index), f"name {index}"

    source = open_source(Named(), seed=0, shuffle=False, device=CPU, num_workers=1)
    window = source.read(0, lambda position: [4] * 2).window(8)
    assert window is not None
    index, names = window.micro_batch(3, 3)
    assert index.tolist() == [3, 4, 5]
    assert list(names) == ["name 3", "name 4", "name 5"]


def test_arrays_and_texts_beside_tensors() -> None:
    data = {"x": np.arange(6.0), "name": [f"name {i}" for i in range(6)], "scale": 2, "zero": torch.tensor(0)}
    window = open_source(data, seed=0, shuffle=False, device=CPU).read(0, lambda position: [6]).window(6)
    assert window is not None
    batch = window.micro_batch(2, 2)
    assert batch["x"].tolist() == [2.0, 3.0]
    assert batch["name"] == ["name 2", "name 3"]
    assert (batch["scale"], batch["zero"].item()) == (2, 0)


class TestRefuses:
    def test_nothing_to_read(self) -> None:
        for data in ((torch.empty(0, 3), torch.empty(0)), TensorDataset(torch.empty(0)), []):
            with pytest.raises(EmptyDatasetError, match="data holds no sample"):
                open_source(data, seed=0, shuffle=True, device=CPU)

    def test_tensors_that_disagree(self) -> None:
        with pytest.raises(RaggedBatchError, match=r"\[0\]: 5, \[1\]: 4") as caught:
            open_source((torch.zeros(5), torch.zeros(4)), seed=0, shuffle=True, device=CPU)
        assert caught.value.sizes == {"[0]": 5, "[1]": 4}

    def test_batches_that_disagree(self) -> None:
        source = open_source([{"x": torch.zeros(5), "y": torch.zeros(4)}], seed=0, shuffle=True, device=CPU)
        with pytest.raises(RaggedBatchError, match=r"\['x'\]: 5, \['y'\]: 4"):
            source.read(0, lambda position: [4]).window(4)

    def test_batches_without_tensors(self) -> None:
        source = open_source(iter(["text"]), seed=0, shuffle=True, device=CPU)
        with pytest.raises(DataError, match="holds no tensor"):
            source.read(0, lambda position: [4]).window(4)

    def test_batches_that_cannot_be_joined(self) -> None:
        source = open_source([torch.zeros(2, 3), torch.zeros(3, 4)], seed=0, shuffle=True, device=CPU)
        window = source.read(0, lambda position: [4]).window(4)
        assert window is not None
        with pytest.raises(DataError, match="cannot be joined"):
            window.micro_batch(0, 4)

    @pytest.mark.parametrize("data", [3, None, "text"])
    def test_what_is_no_data(self, data: object) -> None:
        with pytest.raises(ArgumentTypeError, match="data="):
            open_source(data, seed=0, shuffle=True, device=CPU)

    def test_looking_at_an_iterator(self) -> None:
        source = open_source(iter([torch.zeros(2)]), seed=0, shuffle=True, device=CPU)
        with pytest.raises(DataError, match="read only once"):
            source.example(1)


class TestDescription:
    """Descriptions tell data from other data, in this process and the next."""

    @staticmethod
    def of(data: Any, **options: Any) -> dict[str, Any]:
        return open_source(data, **{"seed": 0, "shuffle": True, "device": CPU, **options}).description()

    def test_tensors_are_the_same_however_they_are_read(self) -> None:
        plain = self.of(tensors())
        assert plain == self.of(tensors(), seed=5, shuffle=False)
        assert plain == self.of(TensorDataset(*tensors()))
        assert plain == self.of(TensorDataset(*tensors()), num_workers=1)
        assert plain == self.of(DataLoader(TensorDataset(*tensors()), batch_size=4))
        assert plain["samples"] == N

    def test_other_tensors_differ(self) -> None:
        index, drawn = tensors()
        changed = drawn.clone()
        changed[-1, 0] += 1
        found = [
            self.of(data)
            for data in [(index, drawn), (index, changed), (index[:-1], drawn[:-1]), (index, drawn.float())]
        ]
        assert len({repr(one) for one in found}) == 4

    def test_objects_among_them_have_no_say(self) -> None:
        """Leave out texts of objects, which hold addresses."""
        one, other = ({"x": tensors()[0], "o": object(), "names": ["a", object()] * N} for _ in range(2))
        del one["names"][N:], other["names"][N:]
        assert self.of(one) == self.of(other)
        other["names"][0] = "b"
        assert self.of(one) != self.of(other)

    def test_types_of_all_kinds(self) -> None:
        for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8):
            assert self.of((torch.zeros(N, 2).to(dtype),)) != self.of((torch.ones(N, 2).to(dtype),))

    def test_datasets_by_class_and_length(self) -> None:
        assert self.of(Numbers()) == self.of(Numbers(), num_workers=2) == {"samples": N, "dataset": "Numbers"}
        assert self.of(DataLoader(Numbers(), batch_size=4, num_workers=1)) == self.of(Numbers())

    def test_splits_by_their_indices(self) -> None:
        parts = [[0, 1, 2], range(3), torch.tensor([0, 1, 2]), [0, 1, 3], [1, 0, 2]]
        found = [self.of(Subset(Numbers(), indices)) for indices in parts]  # type: ignore[arg-type]
        assert found[0] == found[1] == found[2]
        assert len({repr(one) for one in found}) == 3
        keys: Any = Subset({"a": torch.zeros(1)}, ["a"])  # type: ignore[arg-type]
        assert self.of(keys) == {"samples": 1, "dataset": "Subset"}, "which may be anything"

    def test_streams_by_class_and_the_workers_that_share_them(self) -> None:
        assert self.of(Stream()) == {"samples": None, "stream": "Stream"}
        assert self.of(DataLoader(Stream(), batch_size=4)) == self.of(Stream())
        assert self.of(Stream(), num_workers=2) == {"samples": None, "stream": "Stream", "workers": 2}
        assert self.of(DataLoader(Stream(), batch_size=4, num_workers=2)) == self.of(Stream(), num_workers=2)
        batches = self.of([tensors()])
        assert batches == {"samples": None, "stream": "list", "digest": batches["digest"]}
        numbers, rows = tensors()
        same, other = [(numbers, rows)] * 3, [(numbers, rows), (numbers, rows), (numbers, -rows)]
        assert self.of(same) != self.of(other), "of which the last differs"
