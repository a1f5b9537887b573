"""Datasets that read several samples together; micro-batches whose samples a collate_fn leaves out, which are empty."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, default_collate

from autoaccum import Accumulator, fit
from autoaccum.data import pieces
from autoaccum.data.pieces import batch_of_none, reads_together
from autoaccum.data.sources import open_source
from autoaccum.errors import DataError
from tests.data.test_sources import CPU, N, Numbers

LENGTHS = [3 + 7 * index % 11 for index in range(N)]


class Together(Dataset[Any]):
    """Pads samples to the longest of those that are read with them, and draws for all of them."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return N

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        longest = max(LENGTHS[index] for index in indices)
        drawn = torch.rand(len(indices))
        return [(torch.full((longest,), index), drawn[at]) for at, index in enumerate(indices)]


class OnlyThat:
    """No Dataset by class."""

    def __len__(self) -> int:
        return N

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor(index) for index in indices]


def batch(data: Any, start: int, size: int, **options: Any) -> Any:
    window = open_source(data, seed=0, shuffle=False, device=CPU, **options).read(0, lambda position: [8, 8]).window(16)
    assert window is not None
    return window.micro_batch(start, size)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_micro_batch_is_read_as_one(num_workers: int) -> None:
    """Whatever was read before it: a replay in smaller ones has what a run in smaller ones has."""
    data = Together()
    source = open_source(data, seed=0, shuffle=False, device=CPU, num_workers=num_workers)
    window = source.read(0, lambda position: [8, 8]).window(16)
    assert window is not None
    for start, size in ((0, 8), (0, 8), (0, 4), (4, 4), (6, 4), (8, 8), (2, 5), (0, 16)):
        found, drawn = window.micro_batch(start, size)
        assert found.shape == (size, max(LENGTHS[start : start + size]))
        assert found[:, 0].tolist() == list(range(start, start + size))
        expected = batch(Together(), start, size)
        assert found.equal(expected[0])
        assert drawn.equal(expected[1])
    assert not num_workers or not data.calls[0][1:] or len(data.calls[0]) < 16
    if not num_workers:
        assert data.calls[:3] == [[*range(8)], [*range(4)], [*range(4, 8)]], "once where it is asked for again"


def test_a_collate_fn_pads_on() -> None:
    def pad(samples: list[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True, padding_value=-1)

    assert sorted(batch(Together(), 0, 16, collate_fn=pad)[:, 0].tolist()) == list(range(16))


def test_it_needs_no_other_way_to_read() -> None:
    assert batch(OnlyThat(), 4, 4).tolist() == [4, 5, 6, 7]


def test_subsets_read_as_what_they_are_of() -> None:
    plain, together = Numbers(), Together()
    assert not any(map(reads_together, (plain, Subset(plain, [0]), StackDataset(plain), StackDataset(a=plain))))
    assert all(map(reads_together, (together, Subset(Subset(together, [0]), [0]), StackDataset(plain, together))))
    whole, parts = batch(Subset(plain, range(N)), 0, 4), batch(Subset(plain, range(N)), 2, 2)
    assert whole[1][2:].equal(parts[1]), "each sample of its own draws under a seed of its own"


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "Python, normal": lambda: random.gauss(0, 1),
    "NumPy": lambda: float(np.random.rand()),
    "NumPy, normal": lambda: float(np.random.randn()),
}


class DrawsLate(Dataset[Any]):
    """Samples from the eleventh on have something drawn in them; those before it have nothing."""

    def __init__(self, draw: Callable[[], float], first: int = 10) -> None:
        self.draw, self.first = draw, first
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> float:
        self.read.append(index)
        return self.draw() if index >= self.first else float(index)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sample_that_draws_does_so_under_a_seed_of_its_own(draw: Callable[[], float]) -> None:
    """Also where none before it has drawn, and so none was seeded: they are read again."""
    random.gauss(0, 1)  # leaves one that waits
    np.random.randn()
    always = DrawsLate(draw, first=0)
    expected = batch(always, 0, 16)
    assert sorted(always.read) == [0, *range(16)], "the first of all tells that samples draw"
    for sizes in ([16], [4] * 4, [1] * 16, [9, 7], [12, 4]):
        data = DrawsLate(draw)
        source = open_source(data, seed=0, shuffle=False, device=CPU)
        window = source.read(0, lambda position, sizes=sizes: sizes).window(16)
        assert window is not None
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        found = torch.cat([window.micro_batch(*piece) for piece in zip(starts, sizes, strict=True)])
        assert found[:10].tolist() == [*range(10)]
        assert found[10:].equal(expected[10:])
        assert len(data.read) < 2 * 16


def test_a_sample_that_fails_by_what_was_drawn_is_read_under_its_seed() -> None:
    class Fails(DrawsLate):
        def __getitem__(self, index: int) -> float:
            value = super().__getitem__(index)
            if index == 12 and value != drawn:
                raise ValueError(index)
            return value

    drawn = float(batch(DrawsLate(random.random), 12, 1))
    assert batch(Fails(random.random), 4, 12)[8] == drawn, "the first of them draws nothing"


def test_samples_that_draw_nothing_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.randn()  # leaves one that waits
    seeds: list[int] = []
    monkeypatch.setattr(pieces, "seed_host", seeds.append)
    data = DrawsLate(random.random, first=N)
    batch(data, 0, 16)
    assert data.read == [*range(16)]
    assert not seeds


def by_initial_seed() -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed())))


def forked() -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(()))


def by_numpys_state() -> float:
    return np.random.RandomState(np.random.get_state()[1][:4]).rand()  # type: ignore[index]


def forked_of_python() -> float:
    state = random.getstate()
    number = random.random()
    random.setstate(state)
    return number


@pytest.mark.parametrize(
    ("look", "num_workers"), [(by_initial_seed, 0), (forked, 0), (by_numpys_state, 2), (forked_of_python, 2)]
)
def test_what_looks_at_a_state_and_leaves_it_sees_the_same_in_every_micro_batch(
    look: Callable[[], float], num_workers: int
) -> None:
    found = []
    for sizes in ([16], [5, 4, 7], [1] * 16):
        torch.manual_seed(len(sizes))
        data = DrawsLate(look, first=0)
        source = open_source(data, seed=0, shuffle=False, device=CPU, num_workers=num_workers)
        readers = [source.read(epoch, lambda position, sizes=sizes: sizes) for epoch in range(2)]
        windows = [reader.window(size) for reader in readers for size in sizes]
        found.append([window.micro_batch(0, window.num_samples).tolist() for window in windows if window is not None])
    flat = [[number for part in parts for number in part] for parts in found]
    assert flat[0] == flat[1] == flat[2]
    assert [len({*flat[0][:16]}), len({*flat[0]})] == [1, 2], "one an epoch"


def test_as_many_samples_as_indices() -> None:
    class Fewer(OnlyThat):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return super().__getitems__(indices[1:])

    with pytest.raises(DataError, match="Fewer.__getitems__ returned 3 samples for 4 indices"):
        batch(Fewer(), 0, 4)


def without_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def none_of_none(samples: list[Any]) -> Any:
    return without_none(samples) if any(sample is not None for sample in samples) else None


def apart(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample is not None]
    assert kept, "nothing to collate"
    return [image for image, _ in kept], torch.tensor([label for _, label in kept])


def decoded(index: int) -> Any:
    return torch.full((2, 1 + index % 3), float(index)), index % 2


class TestBatchOfNone:
    @pytest.mark.parametrize("collate", [without_none, none_of_none])
    def test_it_has_no_rows(self, collate: Any) -> None:
        found = batch_of_none(collate, [None, None], [None, (torch.ones(3), 1)])
        assert [tuple(part.shape) for part in found] == [(0, 3), (0,)]

    def test_it_has_no_entries_in_lists(self) -> None:
        images, labels = batch_of_none(apart, [None], map(decoded, range(2)))
        assert (images, labels.tolist()) == ([], [])

    def test_what_fails_for_another_reason_is_no_such_batch(self) -> None:
        def broken(samples: list[Any]) -> Any:
            return default_collate([sample["x"] for sample in samples])

        def pairs(samples: list[Any]) -> Any:
            if len(samples) < 2:
                raise ValueError("needs pairs")
            return default_collate(samples)

        assert batch_of_none(broken, [{"y": 1}], [{"x": 1}]) is None
        assert batch_of_none(pairs, [1], [2, 3]) is None
        assert batch_of_none(without_none, [None], []) is None


MISSING = {0, 7, *range(30, 36)}


class Decoded(Dataset[Any]):
    """Samples that are None where they could not be decoded."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        self._x = torch.randn(48, 5, generator=drawn, dtype=torch.float64)
        self._y = torch.randn(48, 1, generator=drawn, dtype=torch.float64)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return None if index in MISSING else (self._x[index], self._y[index])


@pytest.mark.parametrize("micro_batch", ["auto", 1, 3])
@pytest.mark.parametrize("collate", [without_none, none_of_none])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_whose_collate_fn_leaves_samples_out_is_that_of_full_batches(
    micro_batch: Any, collate: Any, num_workers: int
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    copy = deepcopy(model)
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    for inputs, targets in DataLoader(Decoded(), batch_size=24, collate_fn=collate):
        optimizer.zero_grad()
        mse_loss(copy(inputs), targets).backward()
        optimizer.step()
    fit(
        model,
        DataLoader(Decoded(), batch_size=24, collate_fn=collate, num_workers=num_workers),
        loss_fn=mse_loss,
        effective_batch=24,
        micro_batch=micro_batch,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        progress=False,
    )
    for p, wanted in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-12, atol=1e-12)


def test_lists_of_samples_that_are_all_left_out_are_an_empty_micro_batch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    samples = [Decoded()[index] for index in (1, 2, 3, 30, 31, 32, 4)]
    inputs, targets = without_none(samples)
    mse_loss(model(inputs), targets).backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Accumulator(model, optimizer, loss_fn=mse_loss, micro_batch=3, collate_fn=without_none).step(samples)
    for p, wanted in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-12, atol=1e-12)
