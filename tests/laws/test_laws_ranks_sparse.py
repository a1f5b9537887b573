"""Law 4 for sparse gradients, which have other rows on each rank, or none, or are dense there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.launching import launch
from tests.faults import sizes, strides
from tests.laws.test_laws_ranks import Trained, at_every_operation, fit
from tests.processes import in_turn

pytestmark = in_turn


class Words(nn.Module):
    """Words of several kinds: one table is used in each micro-batch, one in few, and one in few as a matrix too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.few, self.tied = (nn.Embedding(40, 6, sparse=True) for _ in range(3))
        self.out = nn.Linear(6, 5)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        # By each sample's own words: what a sample gets is the same whatever it is cut with.
        hidden = self.all(words).mean(1)
        hidden = hidden + self.tied(words[:, 1:]).sum(1)
        is_rare = words[:, 0] < 3
        if is_rare.any():
            hidden = hidden + self.few(words[:, 0]) * is_rare[:, None]
            hidden = (
                hidden + 0.1 * F.linear(torch.tanh(hidden), self.tied.weight.T @ self.tied.weight) * is_rare[:, None]
            )
        return self.out(hidden)  # type: ignore[no-any-return]


class Table(nn.Module):
    """Nothing but a table, for an optimizer that takes no dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(40, 5, mode="sum", sparse=True).double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)  # type: ignore[no-any-return]


def words(samples: int = 101) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(3, 40, (samples, 4), generator=generator)
    found[::13, 0] = 1
    labels = torch.randint(0, 5, (samples,), generator=generator)
    labels[::7] = -100
    labels[::13] = 1  # a table that none but ignored samples use gets zeros or nothing, as the window is cut
    return found, labels


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def _sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.02)


RUNS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "SGD, clipped": (Words, {"optimizer": _sgd, "clip_norm": 0.3}),
    "SparseAdam": (Table, {"optimizer": _sparse_adam}),
}


def all_runs() -> dict[str, Trained]:
    given = {"data": words(), "loss_fn": F.cross_entropy}
    return {name: fit(**{"model": model(), **given, **options}) for name, (model, options) in RUNS.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


@sizes(2)
def test_sparse_gradients_are_added_up(size: int, alone: dict[str, Trained]) -> None:
    found = launch(all_runs, size)
    for name, one in alone.items():
        of_ranks = [of_rank[name] for of_rank in found]
        assert all(torch.equal(of_ranks[0].weights, each.weights) for each in of_ranks), name
        torch.testing.assert_close(of_ranks[0].weights, one.weights, rtol=1e-10, atol=1e-12)
        assert of_ranks[0].losses == pytest.approx(one.losses, rel=1e-10)


def oom_with_rows(of_rank: int, stride: int) -> tuple[int, list[float]]:
    options = {"model": Words, "optimizer": _sgd, "loss_fn": F.cross_entropy, "data": words(24)}
    return at_every_operation(of_rank, stride, **options)


@strides(97)
def test_an_oom_at_every_operation_of_a_rank_leaves_rows_as_they_are(stride: int) -> None:
    for operations, off in launch(oom_with_rows, 2, 1, stride):
        assert operations > 200
        assert max(off) < 1e-12
