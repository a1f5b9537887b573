"""Samples of different lengths: served longest first, each once, the same whatever the plan, the workers, the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autoaccum.data.base import Source
from autoaccum.data.sources import open_source

CPU = torch.device("cpu")
N = 45
GENERATOR = torch.Generator().manual_seed(4)
LENGTHS = torch.randint(1, 40, (N,), generator=GENERATOR).tolist()


class Texts(Dataset[Any]):
    """Sample i is (as many tokens as LENGTHS says, i, a random number drawn while it is read)."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        self.reads += 1
        return torch.full((LENGTHS[index],), index + 1), index, torch.rand(()).item()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(N):
            yield torch.full((LENGTHS[index],), index + 1), index, torch.rand(()).item()


class Forever:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Padded to the longest, with a random number of the collate_fn's own."""
    tokens, index, drawn = zip(*samples, strict=True)
    return {
        "tokens": pad_sequence(list(tokens), batch_first=True),
        "index": torch.tensor(index),
        "drawn": torch.tensor(drawn, dtype=torch.float64),
        "noise": torch.full((len(samples),), random.random(), dtype=torch.float64),
    }


def pad_to_40(samples: list[Any]) -> dict[str, torch.Tensor]:
    batch = pad(samples)
    missing = 40 - batch["tokens"].shape[1]
    return {**batch, "tokens": torch.nn.functional.pad(batch["tokens"], (0, missing))}


def truncate_to_20(samples: list[Any]) -> dict[str, torch.Tensor]:
    return pad([(tokens[:20], index, drawn) for tokens, index, drawn in samples])


def fails_alone(samples: list[Any]) -> dict[str, torch.Tensor]:
    if len(samples) == 1:
        raise ValueError("contrasts samples")
    return pad(samples)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "dataset": lambda collate: {"data": Texts(), "collate_fn": collate},
    "nothing kept": lambda collate: {"data": Texts(), "collate_fn": collate, "budget_bytes": 0},
    "workers": lambda collate: {"data": Texts(), "collate_fn": collate, "num_workers": 2},
    "loader": lambda collate: {"data": DataLoader(Texts(), batch_size=5, shuffle=True, collate_fn=collate)},
    "stream": lambda collate: {"data": Stream(), "collate_fn": collate},
    "endless sampler": lambda collate: {
        "data": DataLoader(Texts(), batch_size=4, sampler=Forever(), collate_fn=collate)  # type: ignore[arg-type]
    },
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def source_of(kind: str, collate: Any = pad) -> Source:
    return open_source(**{"seed": 0, "shuffle": True, "device": CPU, **KINDS[kind](collate)})


def serve(window: Any, plan: Callable[[], int]) -> list[tuple[int, float]]:
    """Return (index, drawn) of each sample; check that what is said of its length is true."""
    found: list[tuple[int, float]] = []
    while (position := len(found)) < window.num_samples:
        size = min(plan(), window.num_samples - position)
        batch = window.micro_batch(position, size)
        there = (batch["tokens"] != 0).sum(1).tolist()
        if window.lengths is not None:
            assert there == list(window.lengths[position : position + size])
            assert batch["tokens"].shape == (size, there[0]), "no more padding than the longest of them needs"
        found += zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)
    return found


def read(source: Source, plan: Callable[[], int], effective_batch: int = 16, epoch: int = 0) -> list[Any]:
    """Windows, each replayed in other sizes now and then."""
    reader = source.read(epoch, lambda position: [plan() for _ in range(3)])
    windows = []
    while (window := reader.window(effective_batch)) is not None:
        windows.append(serve(window, plan))
        for start in (0, 3):
            again = window.micro_batch(start, min(5, window.num_samples - start))
            assert again["index"].tolist() == [index for index, _ in windows[-1][start : start + 5]]
        assert serve(window, plan) == windows[-1]
    return windows


def constant(size: int) -> Callable[[], int]:
    return lambda: size


@every_kind
def test_longest_first_whatever_the_plan(kind: str) -> None:
    """Serve each once, with its own augmentation, which is that of its place in the epoch and not in the window."""
    expected = read(source_of(kind), constant(16))
    assert sorted(index for window in expected for index, _ in window) == list(range(N))
    assert len({drawn for window in expected for _, drawn in window}) == N
    for window in expected:
        lengths = [LENGTHS[index] for index, _ in window]
        assert lengths == sorted(lengths, reverse=True)
    if kind != "workers":  # the plan of which has to be known when they start
        draw = random.Random(0)
        for _ in range(3):
            assert read(source_of(kind), lambda: draw.randint(1, 9)) == expected
    else:
        assert read(source_of(kind), constant(5)) == expected == read(source_of("dataset"), constant(3))


@every_kind
def test_lengths_are_the_samples_in_the_order_served(kind: str) -> None:
    window = source_of(kind).read(0, lambda position: [4] * 4).window(16)
    assert window is not None
    assert window.lengths is not None
    assert len(window.lengths) == window.num_samples == 16
    assert list(window.lengths) == [LENGTHS[index] for index, _ in serve(window, constant(16))]


def test_a_window_holds_the_samples_it_held() -> None:
    """Serve the same samples in another order; those of equal length in the order of the epoch."""
    grouped = read(source_of("dataset"), constant(16))
    natural = read(source_of("dataset", pad_to_40), constant(16))
    assert [sorted(window) for window in grouped] == [sorted(window) for window in natural]
    assert grouped != natural
    for found, order in zip(grouped, natural, strict=True):
        place = {index: position for position, (index, _) in enumerate(order)}
        keys = [(-LENGTHS[index], place[index]) for index, _ in found]
        assert keys == sorted(keys)


def test_less_is_padded() -> None:
    def numel(collate: Any) -> int:
        reader = source_of("dataset", collate).read(0, lambda position: [4])
        total = 0
        while (window := reader.window(16)) is not None:
            for start in range(0, window.num_samples, 4):
                total += window.micro_batch(start, min(4, window.num_samples - start))["tokens"].numel()
        return total

    assert sum(LENGTHS) <= numel(pad) < 1.25 * sum(LENGTHS)
    assert numel(pad_to_40) == 40 * N > 1.9 * sum(LENGTHS)


@pytest.mark.parametrize("kind", ["dataset", "nothing kept", "workers", "stream"])
@pytest.mark.parametrize("collate", [pad_to_40, fails_alone])
def test_no_lengths_where_they_are_of_no_use(kind: str, collate: Any) -> None:
    source = source_of(kind, collate)
    reader = source.read(0, lambda position: [8] * 2)
    count = 0
    while (window := reader.window(16)) is not None:
        assert window.lengths is None
        drawn = serve(window, constant(13))
        if kind == "stream":
            assert [index for index, _ in drawn] == list(range(count, count + window.num_samples))
        count += window.num_samples
    assert count == N


@pytest.mark.parametrize("kind", ["dataset", "nothing kept", "stream"])
def test_what_is_truncated_is_as_long_as_it_becomes(kind: str) -> None:
    """Count all that are truncated as long as the shortest of them that there is."""
    reader = source_of(kind, truncate_to_20).read(0, lambda position: [8] * 2)
    while (window := reader.window(16)) is not None:
        assert window.lengths is not None
        found = [LENGTHS[index] for index, _ in read_order(window)]
        assert found == sorted(found, reverse=True), (
            "those that are truncated too, so that the order is the data's alone"
        )
        cap = window.lengths[0]
        assert 20 <= cap < 25
        assert list(window.lengths) == [min(length, cap) for length in found]


def read_order(window: Any) -> list[tuple[int, float]]:
    batch = window.micro_batch(0, window.num_samples)
    return list(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))


class Same(Texts):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        return torch.full((7,), index + 1), index, torch.rand(()).item()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_one_length_are_read_as_they_are_asked_for(num_workers: int) -> None:
    """Serve them in the order of the epoch, and read no further than that."""
    dataset = Same()
    source = open_source(dataset, seed=0, shuffle=False, device=CPU, collate_fn=pad, num_workers=num_workers)
    window = source.read(0, lambda position: [8] * 2).window(16)
    assert window is not None
    assert window.lengths is None
    before = dataset.reads
    assert window.micro_batch(0, 4)["index"].tolist() == [0, 1, 2, 3]
    assert dataset.reads - before <= 4


class Other(Texts):
    """Texts of which those in the first windows are of one length."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        return torch.full((7 + index // 40,), index + 1), index, torch.rand(()).item()


def test_windows_of_one_length_have_lengths_too() -> None:
    source = open_source(Other(), seed=0, shuffle=False, device=CPU, collate_fn=pad)
    reader = source.read(0, lambda position: [8] * 2)
    found = []
    while (window := reader.window(16)) is not None:
        found.append(window.lengths)
    assert found == [(7,) * 16, (7,) * 16, (8,) * 5 + (7,) * 8]


@pytest.mark.parametrize(("budget_bytes", "first", "second"), [(None, 0, 0), (0, 16, 32), (100, 16, 32)])
def test_past_the_budget_samples_are_read_again(budget_bytes: int | None, first: int, second: int) -> None:
    dataset = Texts()
    source = open_source(dataset, seed=0, shuffle=True, device=CPU, collate_fn=pad, budget_bytes=budget_bytes)
    source.read(0, lambda position: [4]).window(1)  # looks at a few, once
    dataset.reads = 0
    window = source.read(0, lambda position: [4]).window(16)
    assert window is not None
    again = dataset.reads - 16  # to collate a few alone
    assert again <= (8 if budget_bytes is not None else 0)
    expected = serve(window, constant(4))
    assert dataset.reads == 16 + again + first
    assert serve(window, constant(3)) == expected
    assert dataset.reads == 16 + again + second


def test_what_fits_the_budget_is_kept() -> None:
    dataset = Texts()
    source = open_source(dataset, seed=0, shuffle=True, device=CPU, collate_fn=pad, budget_bytes=8 * sum(LENGTHS))
    window = source.read(0, lambda position: [4]).window(40)
    assert window is not None
    dataset.reads = 0
    serve(window, constant(4))
    assert dataset.reads == 0


@every_kind
def test_reading_leaves_the_random_states_alone(kind: str) -> None:
    torch.manual_seed(5), random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    source = source_of(kind)
    read(source, constant(4))
    source.example(4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_collating_is_seeded_by_the_first_of_the_batch() -> None:
    windows = [source_of("dataset").read(0, lambda position: [8]).window(16) for _ in range(2)]
    assert windows[0] is not None
    assert windows[1] is not None
    noise = windows[0].micro_batch(4, 5)["noise"][0]
    assert windows[1].micro_batch(4, 3)["noise"][0] == noise
    assert windows[1].micro_batch(5, 3)["noise"][0] != noise


@every_kind
def test_an_example_is_of_the_longest(kind: str) -> None:
    longest = max(LENGTHS[:32])
    source = source_of(kind)
    for size in (1, 4, 50):
        assert source.example(size)["tokens"].shape == (size, longest)
    assert read(source, constant(4)) == read(source_of(kind), constant(4))


class Once(Texts):
    """Memory runs out at the n-th read."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth = nth

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        self.nth -= 1
        if self.nth == 0:
            raise MemoryError
        return super().__getitem__(index)


@pytest.mark.parametrize("nth", [5, 32 + 7, 32 + 16 + 1, 32 + 16 + 3])
def test_an_oom_while_looking_ahead_changes_nothing(nth: int) -> None:
    """Fail among the few that are looked at, those of the window, or those that are collated alone."""

    def windows(dataset: Any) -> list[Any]:
        source = open_source(dataset, seed=0, shuffle=True, device=CPU, collate_fn=pad, budget_bytes=0)
        reader = source.read(0, lambda position: [4])
        found = []
        while (window := reader.window(16)) is not None:
            found.append((window.lengths, window.num_samples))
        return found

    dataset = Once(nth)
    found = windows(dataset)
    assert dataset.nth < 0
    assert found == windows(Texts())


class Rising(Texts):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        return torch.full((index + 1,), index + 1), index, 0.0


def test_where_all_is_truncated_all_are_as_long() -> None:
    source = open_source(Rising(), seed=0, shuffle=False, device=CPU, collate_fn=truncate_to_20)
    reader = source.read(0, lambda position: [4])
    found = []
    while (window := reader.window(16)) is not None:
        found.append(window.lengths)
    assert found == [tuple(range(16, 0, -1)), (20,) * 13 + (19, 18, 17), (20,) * 13]


def pops(samples: list[Any]) -> dict[str, torch.Tensor]:
    return pad([(sample.pop("tokens"), sample.pop("index"), 0.0) for sample in samples])


def test_a_collate_fn_may_take_parts_out_of_its_samples() -> None:
    class Dicts(Texts):
        def __getitem__(self, index: int) -> Any:
            tokens, index, _ = super().__getitem__(index)
            return {"tokens": tokens, "index": index}

    source = open_source(Dicts(), seed=0, shuffle=True, device=CPU, collate_fn=pops)
    assert source.example(4)["tokens"].shape[0] == 4
    window = source.read(0, lambda position: [4]).window(16)
    assert window is not None
    assert window.lengths is not None
    assert len(serve(window, constant(4))) == 16


class Opened(Texts):
    """Opens a file at its first read, which must be a worker's own."""

    file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or torch.utils.data.get_worker_info()
        return super().__getitem__(index)


def test_what_workers_open_is_not_opened_before_they_start() -> None:
    dataset = Opened()
    source = open_source(dataset, seed=0, shuffle=True, device=CPU, collate_fn=pad, num_workers=1)
    window = source.read(0, lambda position: [8] * 2).window(16)
    assert window is not None
    assert window.lengths is not None
    assert dataset.file is None
    assert dataset.reads == 0


def test_whole_windows_only() -> None:
    for kind in ("dataset", "stream"):
        reader = source_of(kind).read(0, lambda position: [4])
        assert reader.window(30, whole=True) is not None
        assert reader.window(30, whole=True) is None


def test_other_data_has_no_lengths() -> None:
    tokens = torch.arange(1, N + 1)[:, None]
    for data in ((tokens, tokens), [tokens], Numbers(), Texts()):  # none of Texts fits default_collate but alone
        window = open_source(data, seed=0, shuffle=True, device=CPU).read(0, lambda position: [4]).window(16)
        assert window is not None
        assert window.lengths is None


class Numbers(Dataset[Any]):
    """Samples for default_collate, to which texts of different lengths are alike."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), "a" * LENGTHS[index]


def test_default_collates_example_is_of_the_first() -> None:
    index, _ = open_source(Numbers(), seed=0, shuffle=True, device=CPU).example(5)
    assert index.tolist() == [0, 1, 2, 3, 4]
