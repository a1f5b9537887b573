"""Orders of epochs: a function of (seed, epoch); a sampler's draws are listed where they are few."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

from autoaccum.data import orders
from autoaccum.data.orders import Draws, Order, count_in_batches
from autoaccum.data.randomness import mix
from autoaccum.data.sources import open_source
from autoaccum.errors import DataError

CPU = torch.device("cpu")
HUGE = 3 * 10**7


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Global:
    """A sampler that draws from the global generators of torch, Python and NumPy in turn."""

    def __init__(self, count: int, most: int = 100) -> None:
        self.count, self.most = count, most

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(0, self.count, 3):
            yield int(torch.randint(self.most, ()))
            yield random.randrange(self.most)
            yield int(np.random.randint(self.most))


class Batches(Global):
    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        for _ in range(self.count):
            yield torch.randint(self.most, (10,)).tolist()


def read(source: Any, window: int, windows: int, passed: tuple[int, ...] = ()) -> list[int]:
    """Return the samples of some windows, each of which is read twice, in two sizes."""
    reader = source.read(3, lambda position: [window // 2] * 2, passed)
    found: list[int] = []
    for _ in range(windows):
        served = reader.window(window)
        whole = served.micro_batch(0, window)
        again = [served.micro_batch(0, window // 2), served.micro_batch(window // 2, window - window // 2)]
        assert torch.equal(flat(whole), torch.cat([flat(part) for part in again]))
        found += flat(whole).tolist()
    return found


def flat(batch: Any) -> torch.Tensor:
    return batch[0] if isinstance(batch, tuple | list) else batch


class TestListed:
    """Bit for bit as all versions have drawn them."""

    @pytest.mark.parametrize("seed", [0, 7])
    def test_a_shuffled_order_is_torchs(self, seed: int) -> None:
        expected = torch.randperm(1000, generator=torch.Generator().manual_seed(mix(seed, 2) >> 1))
        found = Order(1000, seed=seed, shuffle=True)(2)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)

    def test_a_samplers_draws_are_all_that_it_yields_under_one_seed(self) -> None:
        for sampler in (RandomSampler(range(50), replacement=True, num_samples=300), Global(300)):
            state = torch.get_rng_state()
            with torch.random.fork_rng():
                seed = mix(5, 1) >> 1
                torch.manual_seed(seed), random.seed(seed), np.random.seed(seed & 0xFFFFFFFF)
                expected = list(sampler)
            assert Order(300, seed=5, sampler=sampler)(1) == expected
            assert torch.equal(torch.get_rng_state(), state)

    def test_more_than_was_promised_is_served(self) -> None:
        assert Order(2, seed=0, sampler=[4, 5, 6])(0) == [4, 5, 6]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take 100 samples for too many to list."""
    monkeypatch.setattr(orders, "LARGEST_LISTED", 100)


@pytest.mark.usefixtures("short")
class TestDraws:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: RandomSampler(range(50), replacement=True, num_samples=9000),
            lambda: RandomSampler(range(50), replacement=True, num_samples=9000, generator=torch.Generator()),
            lambda: WeightedRandomSampler(torch.rand(50).tolist(), 9000),
            lambda: Global(9000),
        ],
    )
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_they_are_those_that_are_listed(self, make: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In windows, whatever is drawn in between, and from the midst of an epoch."""
        torch.manual_seed(0)
        loader = DataLoader(Numbers(100), batch_size=4, sampler=make(), num_workers=num_workers)
        source = open_source(loader, seed=0, shuffle=False, device=CPU)
        assert source.num_samples == 9000
        found = read(source, 700, 2)
        torch.rand(3), random.random(), np.random.rand()
        rest = read(source, 7300, 1, passed=(700, 700))
        with monkeypatch.context() as patch:
            patch.setattr(orders, "LARGEST_LISTED", 10**7)
            assert isinstance(source._order(3), list)  # type: ignore[attr-defined]
            assert found + rest == read(source, 8700, 1)

    def test_of_tensors_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = TensorDataset(torch.arange(50))
        loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=900))
        source = open_source(loader, seed=0, shuffle=False, device=CPU)
        found = read(source, 90, 10)
        monkeypatch.setattr(orders, "LARGEST_LISTED", 1000)
        assert found == read(source, 90, 10)

    def test_the_samplers_generator_is_left_as_it_was(self) -> None:
        generator = torch.Generator().manual_seed(4)
        state, outside = generator.get_state(), torch.get_rng_state()
        sampler = RandomSampler(range(50), replacement=True, num_samples=9000, generator=generator)
        found = Order(9000, seed=0, sampler=sampler)(0)
        assert isinstance(found, Draws)
        first = found.at(range(50))
        generator.manual_seed(9)
        assert found.at(range(50)) == first
        found.forget(8000)
        assert torch.equal(torch.get_rng_state(), outside)
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(9).get_state())
        assert not torch.equal(generator.get_state(), state)

    def test_one_that_ends_too_soon(self) -> None:
        sampler = Global(120)
        sampler.__class__ = type("Short", (Global,), {"__len__": lambda self: 200})
        loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=4, sampler=sampler)
        reader = open_source(loader, seed=0, shuffle=False, device=CPU).read(0, lambda position: [60])
        reader.window(100)
        with pytest.raises(DataError, match="its sampler promised 200 indices and ended after 120"):
            reader.window(100).micro_batch(0, 100)  # type: ignore[union-attr]

    def test_batches_of_too_many_samples_are_a_stream(self) -> None:
        few = open_source(DataLoader(Numbers(100), batch_sampler=Batches(10)), seed=0, shuffle=False, device=CPU)
        many = open_source(DataLoader(Numbers(100), batch_sampler=Batches(11)), seed=0, shuffle=False, device=CPU)
        assert (few.num_samples, many.num_samples) == (100, None)
        assert len(read(many, 50, 2)) == 100


HUGE_DATA = {
    "in turn": lambda: {"data": Numbers(10**12)},
    "draws": lambda: {
        "data": DataLoader(
            Numbers(100), batch_size=5, sampler=RandomSampler(Numbers(100), replacement=True, num_samples=10**10)
        )
    },
}


@pytest.mark.parametrize("kind", HUGE_DATA)
def test_huge_data_take_no_more_memory_than_a_window(kind: str) -> None:
    arguments = {"shuffle": False, **HUGE_DATA[kind]()}
    tracemalloc.start()
    try:
        source = open_source(seed=0, device=CPU, **arguments)
        source.description()
        reader = source.read(0, lambda position: [10])
        for _ in range(20):
            window = reader.window(10)
            assert window is not None
            window.micro_batch(0, 10)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert source.num_samples is not None
    assert source.num_samples >= HUGE
    order: Any = source._order(0)  # type: ignore[attr-defined]
    assert isinstance(order, range | Draws)  # what torch would have taken is not traced


def test_the_sampler_of_a_batch_sampler_is_the_one_that_draws() -> None:
    """Beside it a DataLoader has a sequential one, which it does not ask."""
    for sampler in (Global(99), RandomSampler(Numbers(99)), iter(range(99))):
        batches: Any = BatchSampler(sampler, 4, False)  # type: ignore[arg-type]
        source = open_source(DataLoader(Numbers(100), batch_sampler=batches), seed=0, shuffle=False, device=CPU)
        assert source.num_samples == (99 if hasattr(sampler, "__len__") else None)
        expected = list(range(99))
        assert (read(source, 99, 1) == expected) == (not hasattr(sampler, "__len__"))


class Growing:
    """Batches of as many samples as the epoch has been told to have, and one."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [*range(self.epoch)]])


def test_samples_of_batches_are_counted_in_the_first_epoch() -> None:
    assert count_in_batches(Growing(), seed=0) == 1
