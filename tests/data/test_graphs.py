"""Batches of graphs keep, micro-batch by micro-batch, what was set on them after they were collated, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoaccum import Accumulator, splits
from autoaccum.data import batches, objects
from autoaccum.errors import DataError
from tests.graphs import GraphBatch, graphs

COUNT = 7


class _Uncuttable(GraphBatch):
    """One whose graphs cannot be made without arguments, as those of MACE."""

    def to_data_list(self) -> Any:
        raise TypeError("__init__() missing 10 required positional arguments")


def test_a_batch_that_does_not_give_its_graphs_is_refused_with_what_works() -> None:
    batch = _Uncuttable.from_data_list(graphs(3))
    assert objects.cut(batch, 0, 3) is batch
    with pytest.raises(DataError, match="cannot be split: .*missing 10.*split=autoaccum.splits.graphs"):
        batches.take(batch, 0, 2)


def test_what_a_batch_without_slices_was_given_is_not_lost() -> None:
    batch: Any = GraphBatch.from_data_list(graphs(3))
    batch.weight = torch.rand(3)
    with pytest.raises(DataError, match="nothing tells which rows of 'weight'"):
        batches.take(batch, 0, 2)


def data(seed: int = 0) -> list[Any]:
    """Graphs of 1 to 4 nodes, and of another number of edges."""
    pyg = pytest.importorskip("torch_geometric.data")
    drawn = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=drawn, dtype=torch.float64)

    found = []
    for index in range(COUNT):
        nodes, edges = 1 + index % 4, 2 + index % 3
        edge_index = torch.randint(0, nodes, (2, edges), generator=drawn)
        found.append(
            pyg.Data(x=random(nodes, 3), edge_index=edge_index, y=random(1, 2), name=f"graph {index}", num_nodes=nodes)
        )
    return found


def batch_of(found: list[Any], **options: Any) -> Any:
    from torch_geometric.data import Batch  # type: ignore[import-not-found]

    return Batch.from_data_list(found, **options)


ADDED: dict[str, Callable[[Any], Any]] = {
    "weight": lambda batch: torch.arange(batch.num_graphs, dtype=torch.float64),
    "force": lambda batch: torch.arange(batch.num_nodes, dtype=torch.float64)[:, None].expand(-1, 3).clone(),
    "edge_weight": lambda batch: torch.arange(batch.edge_index.shape[1], dtype=torch.float64),
    "file": lambda batch: [f"{index}.xyz" for index in range(batch.num_graphs)],
    "array": lambda batch: torch.arange(batch.num_graphs).numpy() / 2,
    "temperature": lambda batch: 0.5,
    "scale": lambda batch: torch.tensor(2.0),
    "mask": lambda batch: torch.arange(batch.num_nodes) % 2 == 0,
}


def same(first: Any, second: Any) -> bool:
    """Whether two batches hold the same, by all of their names."""
    one, other = first.to_dict(), second.to_dict()
    assert one.keys() == other.keys()
    return all(
        torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k]))
        if not isinstance(one[k], list | str)
        else one[k] == other[k]
        for k in one
    )


def on_each(found: list[Any]) -> list[Any]:
    """The same set on each graph, before these are collated: what cutting is compared with."""
    whole = batch_of(found)
    added = {name: make(whole) for name, make in ADDED.items()}
    edges = whole._slice_dict["edge_index"].tolist()
    nodes = whole.ptr.tolist()
    for index, graph in enumerate(found):
        graph.weight = added["weight"][index : index + 1]
        graph.force = added["force"][nodes[index] : nodes[index + 1]]
        graph.edge_weight = added["edge_weight"][edges[index] : edges[index + 1]]
        graph.mask = added["mask"][nodes[index] : nodes[index + 1]]
        graph.file = added["file"][index]
    return found


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 5), (4, 9), (0, COUNT)])
def test_what_is_set_on_a_batch_is_cut_by_graphs_nodes_and_edges(start: int, stop: int) -> None:
    whole = batch_of(data(), follow_batch=["x"])
    for name, make in ADDED.items():
        whole[name] = make(whole)
    part = objects.cut(whole, start, stop)
    right = batch_of(on_each(data())[start:stop], follow_batch=["x"])
    for name in ("x", "edge_index", "y", "batch", "ptr", "x_batch", "x_ptr", "weight", "force", "edge_weight", "mask"):
        assert torch.equal(part[name], right[name]), name
    assert (part.file, part.name) == (right.file, right.name)
    assert part.array.tolist() == [index / 2 for index in range(start, min(stop, COUNT))]
    assert (part.temperature, part.scale.item()) == (0.5, 2.0)
    assert part.num_nodes == right.num_nodes


def test_a_batch_that_is_not_split_stays_the_object_that_it_was() -> None:
    whole = batch_of(data())
    assert objects.cut(whole, 0, COUNT) is whole


def test_parts_are_joined_with_what_was_set_on_them() -> None:
    whole = batch_of(data(), follow_batch=["x"])
    for name, make in ADDED.items():
        whole[name] = make(whole)
    parts = [objects.cut(whole, start, stop) for start, stop in ((0, 1), (1, 4), (4, COUNT))]
    assert same(objects.join(parts), whole)
    # And cut again, as a micro-batch is of what several batches of a loader came to.
    again = objects.cut(objects.join(parts), 2, 5)
    assert same(again, objects.cut(whole, 2, 5))
    parts[1].scale = torch.tensor(3.0)
    with pytest.raises(ValueError, match="'scale' belongs to a whole batch of graphs"):
        objects.join(parts)
    del parts[1].scale
    with pytest.raises(ValueError, match="other attributes"):
        objects.join(parts)


def _without_edges(batch: Any) -> None:
    batch.edge_index = batch.edge_index[:, 1:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_edges, "'edge_index' has other rows than those that were collated"),
        (lambda batch: setattr(batch, "classes", torch.ones(COUNT + 30)), "nothing tells which rows of 'classes'"),
        (lambda batch: setattr(batch, "views", [torch.ones(2)] * 3), "nothing tells which rows of 'views'"),
        (lambda batch: setattr(batch, "more", {"z": torch.ones(COUNT)}), "nothing tells which rows of 'more'"),
        (lambda batch: setattr(batch, "pair_index", torch.zeros(2, COUNT, dtype=torch.long)), "may number its nodes"),
        (lambda batch: setattr(batch, "adj_t", torch.eye(batch.num_nodes).to_sparse()), "'adj_t'"),
    ],
)
def test_what_nothing_tells_the_rows_of_is_refused(change: Callable[[Any], None], reason: str) -> None:
    batch = batch_of(data())
    change(batch)
    with pytest.raises(DataError, match=f"{reason}.*splits.graphs"):
        batches.take(batch, 0, 2)


def test_several_kinds_of_nodes_are_cut_each_by_its_own() -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    found = []
    for index in range(4):
        one = pyg.HeteroData()
        one["paper"].x = torch.full((index + 1, 2), float(index))
        one["author"].x = torch.full((2 * index + 1, 2), float(index))
        one["author", "writes", "paper"].edge_index = torch.zeros(2, index + 2, dtype=torch.long)
        found.append(one)
    whole = batch_of(found, follow_batch=["x"])
    whole["author"].h = torch.arange(whole["author"].num_nodes)
    whole["author", "writes", "paper"].w = torch.arange(14)
    whole.weight = torch.arange(4.0)
    part = objects.cut(whole, 1, 3)
    assert part["author"].h.tolist() == list(range(1, 9))
    assert part["author", "writes", "paper"].w.tolist() == list(range(2, 9))
    assert part.weight.tolist() == [1, 2]
    assert part["paper"].x_batch.tolist() == [0, 0, 1, 1, 1]


def model_and_optimizer() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    errors = (model(batch.x) - batch.y[batch.batch]).pow(2).sum(1) * batch.force[:, 0]
    found: torch.Tensor = (
        torch.zeros(batch.num_graphs).double().index_add(0, batch.x_batch, errors) * batch.weight
    ).mean()
    return found


def test_a_window_of_such_a_batch_has_the_gradient_of_the_full_batch() -> None:
    whole = batch_of(data(), follow_batch=["x"])
    whole.weight = torch.rand(COUNT, dtype=torch.float64)
    whole.force = torch.rand(whole.num_nodes, 1, dtype=torch.float64)
    model, optimizer = model_and_optimizer()
    loss_of(model, whole).backward()
    right = model.weight.grad.clone()
    for micro_batch in (2, COUNT):
        Accumulator(model, optimizer, training_step=loss_of, micro_batch=micro_batch).step(whole)
        assert float((model.weight.grad - right).norm()) <= 1e-12 * float(right.norm())


def test_the_route_of_the_refusal_works() -> None:
    found = data()
    whole = batch_of(found)
    model, optimizer = model_and_optimizer()

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (model(batch.x) - batch.y[batch.batch]).pow(2).mean()
        return loss

    step(model, whole).backward()
    right = model.weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accumulator(
            model,
            optimizer,
            split=splits.graphs,
            training_step=lambda model, batch: step(model, type(whole).from_data_list(batch)),
            micro_batch=2,
        ).step(found)
    assert float((model.weight.grad - right).norm()) <= 1e-12 * float(right.norm())


def test_a_mean_over_nodes_is_weighted_by_its_nodes_and_nothing_runs_twice() -> None:
    whole = batch_of(data())
    model, optimizer = model_and_optimizer()

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (model(batch.x) - batch.y[batch.batch]).pow(2).mean()
        return loss

    step(model, whole).backward()
    right = model.weight.grad.clone()
    accumulator = Accumulator(model, optimizer, training_step=step, micro_batch=2)
    for _ in range(3):
        accumulator.step(whole)
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    accumulator.step(whole)
    assert sum(calls) == whole.num_nodes
    assert float((model.weight.grad - right).norm()) <= 1e-12 * float(right.norm())


def test_tensors_of_a_batch_are_seen() -> None:
    whole = batch_of(data())
    assert {id(whole.x), id(whole.y)} <= set(map(id, batches.leaves_within({"graphs": whole})))
    wide = objects.mapped(whole, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    assert (wide.x.dtype, whole.x.dtype, wide.edge_index.dtype) == (torch.float32, torch.float64, torch.int64)
