"""Streams: who makes the batches, where a run goes on in them, and data that are others than those trained on."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

import autoaccum
from autoaccum.data.sources import open_source
from autoaccum.errors import DataError

CPU = torch.device("cpu")
N = 48
ROWS = torch.cat([torch.arange(N)[:, None], torch.ones(N, 4)], dim=1)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> torch.Tensor:
        return ROWS[index]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Drawing(Sampler[int]):
    """Draws by a generator of its own, somewhere within."""

    def __init__(self, made: Any) -> None:
        self.held = {"generators": [made]}

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        (made,) = self.held["generators"]
        order = list(range(N))
        if isinstance(made, torch.Generator):
            order = torch.randperm(N, generator=made).tolist()
        else:
            made.shuffle(order)
        return iter(order)


class OfSampler(IterableDataset[Any]):
    def __init__(self, sampler: Any) -> None:
        self.inner = sampler

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (ROWS[index] for index in self.inner)


class Counting(IterableDataset[Any]):
    """Counts its epochs, and tells nobody."""

    def __init__(self, batch: int = 0) -> None:
        self.count, self.batch = 0, batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.count += 1
        order = np.random.RandomState(self.count).permutation(N)
        step = self.batch or 1
        return (ROWS[order[at : at + step]] if self.batch else ROWS[order[at]] for at in range(0, N, step))


class CountingSampler(Drawing):
    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(np.random.RandomState(self.count).permutation(N).tolist())


class Epochs(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.count = epoch


class Stateful(Counting):
    """Can be put where it was; ``reads`` counts what it has yielded, and ``forgets`` is what its state leaves out."""

    def __init__(self, batch: int = 0, forgets: str = "") -> None:
        super().__init__(batch)
        self.place, self.forgets, self.reads, self.loaded = 0, forgets, 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.loaded:
            self.loaded = False
        else:
            self.count, self.place = self.count + 1, 0
        order = np.random.RandomState(self.count).permutation(N)
        step = self.batch or 1
        while self.place < N:
            found = order[self.place : self.place + step]
            self.place += step
            self.reads += 1
            yield ROWS[found] + torch.rand(()) * 0.1 if self.batch else ROWS[found[0]] + torch.rand(()) * 0.1

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("count", "place") if name != self.forgets}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state.get("place", 0) > 0
        vars(self).update(state)


class Begins(Stateful):
    """Begins to iterate in order to tell its state; the next loop goes on with that, whatever was loaded in between."""

    is_begun = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.loaded &= self.is_begun is not None
        self.is_begun = True
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        if self.is_begun is False:
            self.is_begun = None  # type: ignore[assignment]
        return super().state_dict()


class Overwrites(Stateful):
    """Takes the place where it stands for the one that was loaded, if it is asked in between."""

    def state_dict(self) -> dict[str, int]:
        if self.loaded:
            self.place = 0
        return super().state_dict()


class OfALoader(Epochs):
    """Has a state that its loader has to count for, as the streams of some libraries do."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


GOES_ON: dict[str, Callable[[], Any]] = {
    "sampler, generator of torch": lambda: DataLoader(Rows(), batch_size=12, sampler=Drawing(generator())),
    "sampler, generator of NumPy": lambda: DataLoader(Rows(), batch_size=12, sampler=Drawing(np.random.default_rng(3))),
    "sampler, RandomState": lambda: DataLoader(Rows(), batch_size=12, sampler=Drawing(np.random.RandomState(3))),
    "sampler, Random": lambda: DataLoader(Rows(), batch_size=12, sampler=Drawing(random.Random(3))),
    "sampler of batches": lambda: DataLoader(
        Rows(), sampler=BatchSampler(RandomSampler(range(N), generator=generator()), 5, False), batch_size=None
    ),
    "stream, generator of torch": lambda: OfSampler(Drawing(generator())),
    "stream, generator of NumPy": lambda: OfSampler(Drawing(np.random.default_rng(3))),
    "stream, RandomState": lambda: OfSampler(Drawing(np.random.RandomState(3))),
    "stream, Random": lambda: OfSampler(Drawing(random.Random(3))),
    "loader of a stream": lambda: DataLoader(OfSampler(Drawing(np.random.default_rng(3))), batch_size=5),
    "loader of a stream, worker": lambda: DataLoader(OfSampler(Drawing(generator())), batch_size=5, num_workers=1),
    "stream that is told the epoch": Epochs,
    "state of a loader": OfALoader,
    "state, samples": Stateful,
    "state, begins to tell it": Begins,
    "state, overwrites what was loaded": Overwrites,
    "state, batches": lambda: DataLoader(Stateful(5), batch_size=None).dataset,
}
REFUSED: dict[str, Callable[[], Any]] = {
    "stream": Counting,
    "loader of a stream": lambda: DataLoader(Counting(), batch_size=5),
    "batches": lambda: DataLoader(Counting(5), batch_size=None),
    "sampler": lambda: DataLoader(Rows(), batch_size=5, sampler=CountingSampler()),
    "sampler of batches": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(CountingSampler(), 5, False)
    ),
    "state without its epoch": lambda: Stateful(forgets="count"),
}  # fmt: skip


def train(directory: Path, data: Any, steps: int, called: Callable[[], None] = lambda: None) -> list[list[float]]:
    """Return the first numbers of the samples of each step, in which a function is called."""
    torch.manual_seed(0)
    found: list[list[float]] = []

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found.append(batch[:, 0].tolist())
        called()
        return (model(batch / 50) ** 2).mean()  # type: ignore[no-any-return]

    autoaccum.fit(
        torch.nn.Linear(5, 1), data, effective_batch=12, training_step=step, accumulate="joined", micro_batch=5,
        steps=steps, progress=False, run_dir=directory, verify=False,
    )  # fmt: skip
    return found


class Batched(Stateful):
    """The same, and says that it makes batches."""

    def __init__(self) -> None:
        super().__init__(5)
        self.batch_size = 5


@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_in_the_order_that_it_had(name: str, tmp_path: Path) -> None:
    make = Batched if name == "state, batches" else GOES_ON[name]
    whole = train(tmp_path / "whole", make(), 11)
    assert [sorted(int(one) for part in whole[at : at + 4] for one in part) for at in (0, 4)] == [list(range(N))] * 2
    assert whole[:4] != whole[4:8]
    for stop in (4, 7):  # at the end of an epoch, and in the midst of one
        first = train(tmp_path / str(stop), make(), stop)
        data = make()
        assert first + train(tmp_path / str(stop), data, 11) == whole
        if isinstance(data, Stateful):  # one piece more than is left
            size = data.batch or 1
            assert data.reads * size <= (11 - stop) * 12 + max(12, 2 * size)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stop", [6, 8])
def test_other_samples_are_refused(name: str, stop: int, tmp_path: Path) -> None:
    """In the midst of an epoch and at its end."""
    train(tmp_path, REFUSED[name](), stop)
    with pytest.raises(DataError, match=r"epoch 1 differ from those .* set_epoch\(epoch\), or state_dict\(\)"):
        train(tmp_path, REFUSED[name](), 11)


class Threaded:
    """Draws in a thread that reads ahead: an order before its first batch, another one behind the last, as samplers do.

    It begins to iterate in order to tell its state, and whoever iterates again ends the thread before.
    """

    def __init__(self) -> None:
        self.generator = generator()
        self.start, self.begun, self.thread = 0, None, None  # type: ignore[var-annotated]

    def _begin(self) -> Iterator[torch.Tensor]:
        if self.thread is not None:
            self.asked.set()
            self.end()
        self.asked, self.late, ahead = threading.Event(), threading.Event(), queue.Queue[Any]()
        self.place, self.start = self.start, 0

        def read(asked: threading.Event, late: threading.Event, place: int) -> None:
            asked.wait()
            order = torch.randperm(N, generator=self.generator)
            for at in range(place, N, 12):
                ahead.put(ROWS[order[at : at + 12]])
            late.wait()
            torch.randperm(N, generator=self.generator)
            ahead.put(None)

        self.thread = threading.Thread(target=read, args=(self.asked, self.late, self.place), daemon=True)
        self.thread.start()
        return self._batches(ahead)

    def _batches(self, ahead: Any) -> Iterator[torch.Tensor]:
        self.asked.set()
        while self.place < N:
            batch = ahead.get()
            self.place += 12
            yield batch
        self.end()

    def end(self) -> None:
        """Let it draw what is left."""
        self.late.set()
        self.thread.join()

    def __iter__(self) -> Iterator[torch.Tensor]:
        found, self.begun = self.begun or self._begin(), None
        return found

    def state_dict(self) -> dict[str, int]:
        if self.thread is None:
            self.begun = self._begin()
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.begun = state["place"], None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_thread_may_draw_whenever_it_runs(is_late: bool, tmp_path: Path) -> None:
    """Its generator is the run's own only while something is read, and begins each epoch by the seed."""

    def run(name: str, steps: int) -> list[list[float]]:
        data = Threaded()
        return train(tmp_path / name, data, steps, data.end if is_late else lambda: None)

    whole = run("whole", 11)
    assert [sorted(int(one) for part in whole[at : at + 4] for one in part) for at in (0, 4)] == [list(range(N))] * 2
    assert whole[:4] != whole[4:8]
    assert whole == train(tmp_path / "other", Threaded(), 11)
    for stop in (4, 7):  # at the end of an epoch, and in the midst of one
        assert run(str(stop), stop) + run(str(stop), 11) == whole


def test_what_a_state_leaves_out_is_read_again(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Stateful(forgets="place"), 4)
    first = train(tmp_path / "part", Stateful(forgets="place"), 2)
    # Their noise is drawn place by place, so that it is the same in a stream that is read again.
    assert first + train(tmp_path / "part", Stateful(forgets="place"), 4) == whole


class Loader(IterableDataset[Any]):
    """A loader by what it does, and a stream by its class."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, says: bool = True) -> None:
        self.loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
        if not says:
            self.loader = [self.loader]  # type: ignore[assignment]
            self.loader = self.loader.__iter__  # type: ignore[assignment, union-attr]

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader if isinstance(self.loader, DataLoader) else next(self.loader())  # type: ignore[operator]


class Texts(IterableDataset[Any]):
    """Yields tokens and labels of one text."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": torch.full((7,), at), "labels": torch.full((7,), at)} for at in range(N))


def first_window(data: Any, size: int = 12, **options: Any) -> Any:
    source = open_source(data, seed=0, shuffle=False, device=CPU, **options)
    window = source.read(0, lambda position: [size]).window(size)
    assert window is not None
    assert window.num_samples == size
    return window.micro_batch(0, size)


class TestWhoMakesBatches:
    def test_a_loader_by_what_it_yields(self) -> None:
        inputs, targets = first_window(Loader(ROWS, ROWS[:, :1]))
        assert inputs.equal(ROWS[:12])
        assert targets.equal(ROWS[:12, :1])

    def test_samples_by_what_they_are(self) -> None:
        assert first_window(Texts())["input_ids"].shape == (12, 7)
        assert first_window(OfSampler(range(N))).equal(ROWS[:12])

    def test_what_cannot_be_told_is_asked(self) -> None:
        data = Loader(ROWS, ROWS[:, :1], says=False)
        for _ in range(2):
            with pytest.raises(
                DataError, match=r"shape \(4, 5\) and shape \(4, 1\)\) may be one sample or a batch of 4"
            ):
                first_window(data)
        assert first_window(DataLoader(data, batch_size=None))[0].equal(ROWS[:12])
        assert first_window(DataLoader(data, batch_size=32))[0].shape == (12, 4, 5)

    @pytest.mark.parametrize("name", ["__iter__", "_get_iterator"])
    def test_a_loader_iterates_as_it_likes(self, name: str) -> None:
        def twice(self: Any) -> Iterator[Any]:
            for batch in getattr(DataLoader, name)(self):
                yield batch
                yield -batch

        kind = type("Own", (DataLoader,), {name: twice})
        found = first_window(kind(Rows(), batch_size=3), 12)
        assert found.equal(torch.cat([ROWS[:3], -ROWS[:3], ROWS[3:6], -ROWS[3:6]]))


class Restarting(IterableDataset[Any]):
    """Its own iterator, which begins anew for each loop."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.place = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == N:
            raise StopIteration
        self.place += 1
        return ROWS[self.place - 1]


def test_a_stream_that_is_its_own_iterator_begins_anew(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Restarting(), 8)
    assert whole[:4] == whole[4:]
    assert train(tmp_path / "part", Restarting(), 6) + train(tmp_path / "part", Restarting(), 8) == whole
    options: dict[str, Any] = {"effective_batch": 12, "micro_batch": 12, "progress": False}
    mean = lambda model, batch: model(batch).mean()  # noqa: E731
    assert autoaccum.fit(torch.nn.Linear(5, 1), Restarting(), training_step=mean, epochs=2, **options).num_steps == 8
