"""Graphs by the protocol of PyTorch Geometric, and nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Graph:
    """One graph: nodes (nodes, features), and a label."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return 2  # as PyTorch Geometric's has it: the number of its attributes

    def to(self, device: torch.device | str) -> Graph:
        return Graph(self.x.to(device), self.y.to(device))

    def clone(self) -> Graph:
        return Graph(self.x.clone(), self.y.clone())


class GraphBatch(Graph):
    """Several of them in one, with the graph that each node is of."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch: torch.Tensor) -> None:
        super().__init__(x, y)
        self.batch = batch

    @property
    def num_graphs(self) -> int:
        return len(self.y)

    @classmethod
    def from_data_list(cls, graphs: Sequence[Graph]) -> GraphBatch:
        nodes = torch.tensor([len(graph.x) for graph in graphs])
        of = torch.arange(len(graphs)).repeat_interleave(nodes).to(graphs[0].x.device)
        return cls(torch.cat([graph.x for graph in graphs]), torch.stack([graph.y for graph in graphs]), of)

    def to_data_list(self) -> list[Graph]:
        return [Graph(self.x[self.batch == index], self.y[index]) for index in range(self.num_graphs)]

    def to(self, device: torch.device | str) -> GraphBatch:
        return type(self)(self.x.to(device), self.y.to(device), self.batch.to(device))

    def clone(self) -> GraphBatch:
        return type(self)(self.x.clone(), self.y.clone(), self.batch.clone())


class DynamicBatch(GraphBatch):
    """A class that is made on the fly for a kind of graph, as PyTorch Geometric's metaclass does."""


def graphs(count: int, dtype: torch.dtype = torch.float64) -> list[Graph]:
    """Graphs of 1, 2, 3, 1, ... nodes."""
    drawn = torch.Generator().manual_seed(5)
    return [
        Graph(torch.randn(1 + index % 3, 3, generator=drawn, dtype=dtype), torch.randn(2, generator=drawn, dtype=dtype))
        for index in range(count)
    ]
