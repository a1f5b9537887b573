"""The samples that are measured differ as much as they can; the cuts of them are three, and all different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import autoaccum
from autoaccum.data.randomness import collation, preserved_randomness, seed_host
from autoaccum.data.sources import open_source
from autoaccum.step.measured_samples import (
    _FIRST,
    Parts,
    _takes_few_values,
    choose,
    cuts_of,
    numbers_of,
    without_padding,
)
from autoaccum.step.measurement import Measurement
from autoaccum.training.setup import GivenBatch
from tests.devices import DEVICE
from tests.step.measuring import HERE, job_of, plain

pytestmark = pytest.mark.measured

CPU = torch.device("cpu")


def window(batch: Any, num_samples: int) -> Any:
    return GivenBatch(batch, num_samples, CPU)


class TestChoose:
    def test_the_one_that_differs_is_among_them(self) -> None:
        """One ignored label of sixty, one sample of zeros, one long text: each is found wherever it lies."""
        for place in (0, 17, 59):
            labels = torch.ones(60, dtype=torch.long)
            labels[place] = -100
            assert place in choose(window((torch.randn(60, 4), labels), 60), 60, 6)
            inputs = torch.randn(60, 4)
            inputs[place] = 0
            assert place in choose(window((inputs, torch.ones(60)), 60), 60, 6)
            texts = [[1] * (9 if index == place else 3) for index in range(60)]
            assert place in choose(window(Listed(texts), 60), 60, 6)

    def test_they_are_different_ones_of_both_kinds(self) -> None:
        labels = torch.arange(40) % 2
        chosen = choose(window((torch.randn(40, 4), labels), 40), 40, 6)
        assert len(set(chosen)) == 6
        assert set(labels[chosen].tolist()) == {0, 1}

    def test_some_are_two_of_a_kind(self) -> None:
        """What compares samples of a kind with each other does nothing where there is one of each."""
        inputs = torch.arange(30.0).floor_divide(2)[:, None] + 0.001 * torch.rand(30, 1)
        chosen = choose(window(inputs * 10, 30), 30, 6)
        pairs = [place // 2 for place in chosen]
        assert len(set(pairs)) < len(pairs)

    def test_the_two_that_differ_the_most_come_first_and_last(self) -> None:
        """So that in some cut each of them is a part by itself."""
        inputs = torch.zeros(20, 1)
        inputs[4], inputs[13] = 100.0, -100.0
        chosen = choose(window(inputs + torch.randn(20, 1), 20), 20, 6)
        assert {chosen[0], chosen[-1]} == {4, 13}

    def test_of_a_small_window_all_are_taken(self) -> None:
        assert choose(window(torch.randn(5, 2), 5), 5, 6) == [0, 1, 2, 3, 4]

    def test_those_that_were_chosen_before_come_only_where_there_are_no_others(self) -> None:
        inputs = torch.randn(50, 2)
        first = choose(window(inputs, 50), 50, 6)
        second = choose(window(inputs, 50), 50, 6, first)
        assert len({*first, *second}) == 12
        assert choose(window(inputs[:8], 8), 8, 6, [7, 0, 1, 2, 3, 4]) == [5, 6, 7, 0, 1, 2]
        texts = window(Listed(["a"] * 50, whole=True), 50)  # whose samples tell nothing
        assert len({*choose(texts, 50, 6), *choose(texts, 50, 6, choose(texts, 50, 6))}) == 12

    def test_of_a_large_window_few_are_looked_at(self) -> None:
        asked: list[int] = []

        class Wide(GivenBatch):
            def samples(self, positions: Sequence[int]) -> Any:
                asked.append(len(positions))
                return super().samples(positions)

        chosen = choose(Wide(torch.randn(1000, 2), 1000, CPU), 1000, 6)
        assert max(asked) <= 128
        assert max(chosen) > 500, "spread over the window"

    def test_where_rows_are_no_samples_one_is_as_good_as_another(self) -> None:
        assert choose(window(Listed(["a"] * 30, whole=True), 30), 30, 4) == [0, 9, 19, 29]

    def test_what_is_not_finite_does_no_harm(self) -> None:
        inputs = torch.randn(20, 2)
        inputs[3] = float("nan")
        assert len(set(choose(window(inputs, 20), 20, 6))) == 6


class Listed(list[Any]):
    """A batch that is a list with an entry a sample, cut by its window as such."""

    def __init__(self, entries: list[Any], *, whole: bool = False) -> None:
        super().__init__(entries)
        self.whole = whole


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed, and let a window of a list be cut."""
    torch.manual_seed(0)
    plain = GivenBatch.samples

    def samples(self: GivenBatch, positions: Sequence[int]) -> Any:
        if isinstance(self.batch, Listed):
            return object() if self.batch.whole else {"texts": [self.batch[position] for position in positions]}
        return plain(self, positions)

    monkeypatch.setattr(GivenBatch, "samples", samples)


class TestCuts:
    @pytest.mark.parametrize("smallest", [1, 2])
    @pytest.mark.parametrize("count", range(2, 8))
    def test_each_is_all_of_them_once_in_parts_of_enough(self, count: int, smallest: int) -> None:
        cuts = cuts_of(count, smallest)
        assert bool(cuts) is (count >= 2 * smallest)
        for cut in cuts:
            assert sorted(index for part in cut for index in part) == list(range(count))
            assert len(cut) > 1
            assert min(map(len, cut)) >= smallest

    def test_those_of_six_are_all_different_in_sizes_and_order(self) -> None:
        sizes = [tuple(map(len, cut)) for cut in cuts_of(6, 1)]
        assert sizes == [(1, 2, 3), (3, 2, 1), (2, 2, 2)]
        assert [tuple(map(len, cut)) for cut in cuts_of(6, 2)] == [(2, 4), (4, 2), (2, 2, 2)]
        (first, second, third) = cuts_of(6, 1)
        assert {frozenset(part) for part in third}.isdisjoint({frozenset(part) for part in (*first, *second)})


def test_numbers_that_take_few_values_do_so_to_the_end() -> None:
    few = (torch.arange(2 * _FIRST) % 16).double()
    assert _takes_few_values(few.reshape(-1, 2))
    assert not _takes_few_values(torch.cat([few, torch.arange(20.0, 40.0).double()]))
    assert not _takes_few_values(torch.arange(17.0))


@pytest.mark.parametrize("is_behind", [True, False])
def test_padding_is_cut_off_on_the_side_on_which_it_is(is_behind: bool) -> None:
    ids, targets = (
        torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]),
        torch.tensor([[1, 2, 3, -9, -9], [4, -9, -9, -9, -9]]),
    )
    rows = {"ids": ids, "targets": targets, "weights": torch.tensor([1.0, 2.0])}
    if not is_behind:
        rows |= {"ids": ids.flip(1), "targets": targets.flip(1)}
    alone = {"ids": torch.zeros(2, 3), "targets": torch.zeros(2, 3), "weights": torch.zeros(2)}
    found = without_padding(rows, alone, alone)
    assert all(tensor.is_contiguous() for tensor in found.values())
    there = slice(0, 3) if is_behind else slice(2, 5)
    assert [found[name].tolist() for name in rows] == [
        rows["ids"][:, there].tolist(),
        rows["targets"][:, there].tolist(),
        [1.0, 2.0],
    ]


@pytest.mark.parametrize(
    "alone",
    [
        {"ids": torch.zeros(2, 2)},  # what would be cut off is a sample's own
        {"ids": torch.zeros(2, 6)},
        {"ids": torch.zeros(2)},
        {"ids": torch.zeros(1, 3)},
        {"ids": torch.zeros(2, 3), "more": torch.zeros(2)},
    ],
)
def test_what_may_be_no_padding_stays(alone: Any) -> None:
    rows = {"ids": torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 0, 0]])}
    assert without_padding(rows, alone, alone) is rows


def test_what_draws_decide_the_length_of_is_left_as_it_is() -> None:
    """One that is cut by one token more has lost one number, which is all one number."""
    rows = {"ids": torch.tensor([[1, 2, 3]])}
    shorter, longer = {"ids": torch.zeros(1, 2)}, {"ids": torch.zeros(1, 3)}
    assert without_padding(rows, shorter, longer) is rows


TEXTS = [torch.arange(1, length + 1) + 10 * length for length in (7, 2, 4, 3)]


class Texts:
    """Ten texts, of which four are chosen, padded to the longest of a batch, with noise or without."""

    def __init__(self, collate: Callable[[list[torch.Tensor]], Any]) -> None:
        self._collate = collate

    def samples(self, positions: Sequence[int]) -> Any:
        with preserved_randomness():
            seed_host(collation.get())
            return self._collate([TEXTS[position - 5] for position in positions])


def parts_of(collate: Callable[[list[torch.Tensor]], Any]) -> Parts:
    return Parts(job_of(), Texts(collate), [5, 6, 7, 8])


def padded(texts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(texts, batch_first=True)


def masked(texts: list[torch.Tensor]) -> Any:
    ids = padded(texts)
    return ids, torch.rand(ids.shape) * (ids > 0)


@pytest.mark.device
def test_what_is_made_alike_each_time_is_made_by_the_window() -> None:
    put_back: list[int] = []
    parts = parts_of(padded)
    assert not parts.collates_anew(lambda: put_back.append(1))
    assert len(put_back) == 3
    made = parts.make((3, 1))
    assert made.device.type == HERE.type
    assert made.tolist() == [[31, 32, 33], [21, 22, 0]], "padded to the longest of the two"


@pytest.mark.device
def test_parts_of_what_is_drawn_anew_are_rows_of_one_batch_padded_as_they_are_alone() -> None:
    parts = parts_of(masked)
    before = parts.make((0, 1, 2, 3))
    assert parts.collates_anew(lambda: None)
    assert not parts.collates_anew(lambda: None), "it is known"
    ids, noise = parts.make((0, 1, 2, 3))
    assert torch.equal(ids, before[0])
    assert not torch.equal(noise, before[1])
    for part in ((3, 1), (2,), (1, 2, 3)):
        of_part, of_noise = parts.make(part)
        longest = max(len(TEXTS[index]) for index in part)
        assert torch.equal(of_part, ids[list(part), :longest])
        assert torch.equal(of_noise, noise[list(part), :longest])


@pytest.mark.device
def test_what_is_computed_with_is_converted() -> None:
    parts = parts_of(padded)
    with parts.converting(lambda batch: batch.double()):
        assert parts.make((1,)).dtype == torch.float64
    assert parts.make((1,)).dtype == torch.int64


class Read(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are moved a little whenever they are read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator) + 0.1 * torch.rand(8)
        return inputs, torch.randint(0, 3, (), generator=generator)


def test_what_data_draw_while_they_are_read_again_is_none_of_the_models() -> None:
    """Of samples that are dropped, for the budget has no room for them, beside a dropout in the model."""
    source = open_source(Read(), seed=0, shuffle=True, device=HERE, budget_bytes=0)
    window = source.read(0, lambda position: [4] * 6).window(24)
    assert window is not None
    for start in range(0, 24, 4):
        window.micro_batch(start, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Dropout(0.4), nn.Linear(9, 3))
    with Measurement(job_of(plain, model), window, range(6)) as measurement:
        measurement.run_whole()
        assert measurement.run(cuts_of(6, 1), "items").error < measurement.tolerance


ROWS = [[1.0, -2.0], [0.0, 3.0]]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(ROWS),
        torch.tensor(ROWS, dtype=torch.bfloat16),
        torch.tensor(ROWS, dtype=torch.int8),
        torch.tensor(ROWS, requires_grad=True),
        torch.tensor(ROWS).to(torch.float8_e4m3fn),
        np.array(ROWS),
        np.array(ROWS, dtype=">f4"),
        np.array(ROWS)[:, ::-1][:, ::-1],
        np.array(ROWS, dtype=np.float16),
    ],
)
def test_numbers_are_those_of_the_rows_in_64_bits(leaf: Any) -> None:
    numbers = numbers_of(leaf)
    assert numbers is not None
    assert torch.equal(numbers, torch.tensor(ROWS, dtype=torch.float64))


def test_they_are_a_copy() -> None:
    leaf = torch.tensor(ROWS, dtype=torch.float64)
    numbers = numbers_of(leaf)
    assert numbers is not None
    numbers.zero_()
    assert leaf.any()


@pytest.mark.parametrize("leaf", [torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), np.array([1 + 2j])])
def test_complex_ones_become_pairs(leaf: Any) -> None:
    numbers = numbers_of(leaf)
    assert numbers is not None
    assert numbers.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        None,
        3.0,
        torch.tensor(3.0),
        np.array(["a", "b"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([1], dtype=np.longdouble),
        np.array([None]),
        torch.eye(2).to_sparse(),
    ],
)
def test_what_has_no_rows_of_numbers_is_left_alone(leaf: Any) -> None:
    assert numbers_of(leaf) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, for what is in beta, or not to be used any more
def test_nor_what_lies_otherwise(make: Any) -> None:
    assert numbers_of(make()) is None


class Samples(torch.utils.data.Dataset[Any]):
    """Rows beside what cannot be compared."""

    def __init__(self, others: Any) -> None:
        self.inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).double()
        self.others = others

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], index


@pytest.mark.parametrize("micro_batch", [4, "auto"])
@pytest.mark.parametrize(
    "others",
    [
        lambda indices: np.array([f"id {index}" for index in indices]),
        lambda indices: np.array(indices, dtype="datetime64[s]"),
        lambda indices: np.stack([np.array([index, 1.0]) for index in indices])[:, ::-1],
        lambda indices: np.array(indices, dtype=">i4"),
        lambda indices: torch.tensor(indices, dtype=torch.complex128),
        lambda indices: torch.eye(32)[indices].to_sparse(),
        lambda indices: torch.eye(32)[indices].to_sparse_csr(),
        lambda indices: torch.nested.nested_tensor([torch.ones(1 + index % 3) for index in indices]),
        lambda indices: torch.tensor(indices, dtype=torch.uint16 if len(indices) % 2 else torch.int64),
    ],
    ids=[
        "texts",
        "dates",
        "backwards",
        "big-endian",
        "complex",
        "sparse",
        "rows of sparse",
        "nested",
        "types that vary",
    ],
)
@pytest.mark.filterwarnings("ignore:.*in prototype stage", "ignore:Sparse.*beta")
def test_a_run_is_exact_beside_it(others: Any, micro_batch: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([inputs for inputs, _ in samples]), others([index for _, index in samples])

    def step(model: Any, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True))

    trained = []
    for size in (8, micro_batch):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
        autoaccum.fit(
            model, Samples(others), effective_batch=8, micro_batch=size, training_step=step, steps=3, device=DEVICE,
            collate_fn=collate, progress=False,
        )  # fmt: skip
        trained.append(model.weight.detach())
    torch.testing.assert_close(*trained, rtol=1e-12, atol=1e-14)
