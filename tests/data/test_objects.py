"""Packed sequences and batches of graphs are counted, cut, joined and copied, whatever class a batch of them is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from autoaccum import fit
from autoaccum.data import batches, objects
from tests.graphs import DynamicBatch, GraphBatch, graphs

CPU = torch.device("cpu")
LENGTHS = (2, 5, 3, 1, 4)


def packed(lengths: tuple[int, ...] = LENGTHS, *, is_sorted: bool = False) -> Any:
    """Sequence i holds i.0, i.1, ..."""
    rows = [torch.arange(length) / 10 + index for index, length in enumerate(lengths)]
    return pack_sequence(rows, enforce_sorted=is_sorted)


def sequences(found: Any) -> list[list[float]]:
    padded, lengths = pad_packed_sequence(found, batch_first=True)
    return [[round(value, 1) for value in row[:length].tolist()] for row, length in zip(padded, lengths, strict=True)]


def test_packed_sequences_are_cut_in_the_order_in_which_they_were_given() -> None:
    assert objects.count(packed()) == 5
    assert sequences(objects.cut(packed(), 1, 3)) == [[1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2]]
    assert sequences(objects.cut(packed(), 3, 4)) == [[3.0]]
    # Not with the steps of the longest of all: a model would see padding.
    assert objects.cut(packed(), 2, 4).batch_sizes.tolist() == [2, 1, 1]


def test_what_was_sorted_stays_without_indices() -> None:
    whole = packed((5, 3, 3, 1), is_sorted=True)
    part = objects.cut(whole, 1, 4)
    assert part.sorted_indices is None
    assert sequences(part) == [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [3.0]]
    # Out of order there is no way to do without.
    assert sequences(objects.join([objects.cut(whole, 3, 4), objects.cut(whole, 0, 1)])) == [
        [3.0],
        [0.0, 0.1, 0.2, 0.3, 0.4],
    ]


def test_packed_sequences_are_joined() -> None:
    parts = [objects.cut(packed(), index, index + 1) for index in (4, 1, 3)]
    assert sequences(objects.join(parts)) == [[4.0, 4.1, 4.2, 4.3], [1.0, 1.1, 1.2, 1.3, 1.4], [3.0]]
    whole = objects.join([objects.cut(packed(), 0, 2), objects.cut(packed(), 2, 5)])
    for one, other in zip(whole, packed(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cls", [GraphBatch, DynamicBatch])
def test_graphs_are_cut_and_joined_by_their_protocol(cls: type[GraphBatch]) -> None:
    whole = cls.from_data_list(graphs(5))
    assert objects.has_samples(whole)
    assert objects.count(whole) == 5  # and not 2, which is its length
    part = objects.cut(whole, 1, 3)
    assert part.batch.tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(part.x, torch.cat([graph.x for graph in graphs(5)[1:3]]))
    again = objects.join([part, objects.cut(whole, 0, 1)])
    assert torch.equal(again.y, torch.stack([graph.y for graph in (*graphs(5)[1:3], graphs(1)[0])]))


def test_a_single_graph_holds_no_samples() -> None:
    assert not objects.has_samples(graphs(1)[0])


class Unclonable:
    def __init__(self) -> None:
        self.rows = torch.ones(3)

    def to(self, device: Any) -> Unclonable:
        return self


class Uncopyable(Unclonable):
    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: DynamicBatch.from_data_list(graphs(3)), lambda batch: batch.x),
        (packed, lambda batch: batch.data),
        (Unclonable, lambda batch: batch.rows),
        (lambda: graphs(3), lambda batch: batch[1].x),
        (lambda: (graphs(3), torch.ones(3)), lambda batch: batch[0][1].x),
    ],
)
def test_what_moves_itself_is_copied_for_whoever_edits_it(make: Any, rows: Any) -> None:
    original = make()
    before = deepcopy(rows(original))
    moved = batches.to_device(original, CPU, copy=True)
    rows(moved).mul_(0)
    assert torch.equal(rows(original), before)
    assert type(moved) is type(original)


def test_what_cannot_be_copied_is_moved_as_it_is() -> None:
    original = Uncopyable()
    assert objects.moved(original, CPU, copy=True) is original
    assert not objects.can_move(torch.nn.Linear(1, 1))
    assert not objects.can_move(DynamicBatch)


@pytest.mark.gpu
def test_what_moves_itself_gets_to_an_accelerator() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    for batch in (DynamicBatch.from_data_list(graphs(3)), graphs(3)[0]):
        assert batches.to_device(batch, device, copy=True).x.device.type == device.type
    assert batches.to_device(packed(), device, copy=True).data.device.type == device.type


def test_bytes_of_what_can_be_seen() -> None:
    one = graphs(1)[0]
    assert batches.num_bytes(one) == 8 * (3 + 2)
    assert batches.num_bytes([one, one]) == 2 * 8 * (3 + 2)
    assert batches.num_bytes(packed()) == 4 * sum(LENGTHS)


def collection(count: int = 7) -> Any:
    """A TensorDict with a nested one, texts of each row, one text for all, and a name for its dim."""
    tensordict = pytest.importorskip("tensordict")
    rows = torch.arange(count, dtype=torch.float64)
    return tensordict.TensorDict(
        {
            "x": rows[:, None].expand(-1, 3).clone(),
            "y": rows.clone(),
            "next": tensordict.TensorDict({"x": rows + 100}, [count]),
            "texts": [str(row) for row in range(count)],
            "source": tensordict.NonTensorData("a file", batch_size=[count]),
        },
        [count],
        names=["time"],
    )


def holds(found: Any, rows: list[int]) -> bool:
    """Whether a TensorDict holds those rows and all else that it held."""
    assert found.names == ["time"]
    assert found["source"] == "a file"
    assert list(found["texts"]) == [str(row) for row in rows]
    assert found["next"].batch_size == found.batch_size == torch.Size([len(rows)])
    return bool(found["y"].tolist() == found["x"][:, 0].tolist() == (found["next", "x"] - 100).tolist() == rows)


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_collection_is_cut_and_joined_and_picked_with_all_that_it_holds(is_locked: bool) -> None:
    whole = collection().lock_() if is_locked else collection()
    assert objects.cut(whole, 0, 7) is whole
    assert batches.num_samples({"data": whole, "labels": torch.ones(7)}) == 7
    assert holds(objects.cut(whole, 2, 5), [2, 3, 4])
    assert holds(objects.join([objects.cut(whole, 4, 6), objects.cut(whole, 0, 1)]), [4, 5, 0])
    assert holds(batches.pick(whole, torch.tensor([3, 1])), [3, 1])
    part = batches.to_device(batches.take(whole, 1, 3), CPU, copy=True)
    part["x"].zero_()
    assert holds(whole, list(range(7)))


def test_a_tensorclass_is_one_and_so_are_rows_of_other_lengths() -> None:
    tensordict = pytest.importorskip("tensordict")
    made = tensordict.make_tensordict
    lazy = tensordict.LazyStackedTensorDict.lazy_stack([made({"x": torch.ones(1 + row)}) for row in range(4)])
    part = objects.join([objects.cut(lazy, 2, 4), objects.cut(lazy, 0, 1)])
    assert [row["x"].numel() for row in part.unbind(0)] == [3, 4, 1]
    assert sum(tensor.numel() for tensor in objects.tensors(lazy)) == 10

    class Pair:
        x: torch.Tensor
        text: str

    Pair.__annotations__ = {"x": torch.Tensor, "text": str}
    pair = tensordict.tensorclass(Pair)(x=torch.arange(4), text="all", batch_size=[4])
    part = batches.take(pair, 1, 3)
    assert (type(part), part.x.tolist(), part.text) == (type(pair), [1, 2], "all")


def test_one_without_rows_of_its_own_is_cut_tensor_by_tensor() -> None:
    tensordict = pytest.importorskip("tensordict")
    found = batches.take(tensordict.TensorDict({"x": torch.arange(4)}, []), 1, 3)
    assert found["x"].tolist() == [1, 2]


def weighted(model: Any, batch: Any) -> torch.Tensor:
    weights = torch.tensor([float(text) for text in batch["texts"]], dtype=torch.float64)
    loss: torch.Tensor = ((model(batch["x"]).squeeze(1) - batch["next", "x"]).pow(2) * weights).mean()
    return loss


@pytest.mark.parametrize("make", [lambda rows: rows, lambda rows: DataLoader(rows, 7, collate_fn=lambda rows: rows)])
def test_data_that_are_a_collection_are_read_by_rows(make: Any) -> None:
    seen: list[int] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        seen.extend(map(int, batch["texts"]))
        assert batch.names == ["time"]
        return weighted(model, batch)

    torch.manual_seed(0)
    model, copy = torch.nn.Linear(3, 1).double(), torch.nn.Linear(3, 1).double()
    copy.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    weighted(copy, collection()).backward()
    right = [p.detach() - 1e-4 * p.grad for p in copy.parameters() if p.grad is not None]
    fit(
        model,
        make(collection()),
        training_step=step,
        effective_batch=7,
        micro_batch=2,
        optimizer=optimizer,
        epochs=1,
        progress=False,
    )
    assert {*seen} == set(range(7))
    for p, wanted in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-12, atol=1e-12)
