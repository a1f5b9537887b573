"""Law 4 for what concerns whole windows: shares that may not be small, recorded plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tests.distributed.launching import launch
from tests.faults import sizes
from tests.laws.test_laws_ranks import Trained, data, fit
from tests.processes import in_turn

pytestmark = in_turn


def all_runs() -> dict[str, Trained]:
    plain = {"loss_fn": cross_entropy}
    return {
        "three for each": fit(min_micro_batch=3, **plain),
        "windows smaller than there are ranks": fit(effective_batch=3, micro_batch="auto", epochs=2, **plain),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


@sizes(4)
def test_ranks_train_what_one_does(size: int, alone: dict[str, Trained]) -> None:
    found = launch(all_runs, size)
    for name, one in alone.items():
        of_ranks = [of_rank[name] for of_rank in found]
        assert all(torch.equal(of_ranks[0].weights, each.weights) for each in of_ranks), name
        torch.testing.assert_close(of_ranks[0].weights, one.weights, rtol=1e-10, atol=1e-12)
        assert of_ranks[0].losses == pytest.approx(one.losses, rel=1e-10), name
    assert min(min(plan) for plan in found[0]["three for each"].plans) >= 3


def of_few() -> tuple[list[tuple[int, ...]], list[float]]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double()
    found = fit(model=model, loss_fn=cross_entropy, data=data(21), effective_batch=7, epochs=2, micro_batch=2)
    return found.plans, found.losses


def test_a_model_that_needs_two_samples_gets_two_on_each_rank_that_has_any() -> None:
    first, *others = launch(of_few, 4)
    assert first[0] == [(3, 2, 2)] * 6
    assert all(other == first for other in others)


def recorded(plans: Any) -> Trained:
    return fit(loss_fn=cross_entropy, micro_batch=plans)


def test_a_recorded_run_is_repeated_by_as_many_ranks_and_by_others() -> None:
    first, *_ = launch(recorded, 3, "auto")
    again, *_ = launch(recorded, 3, first.plans)
    assert torch.equal(again.weights, first.weights)
    assert again.plans == first.plans
    other, *_ = launch(recorded, 2, first.plans)
    torch.testing.assert_close(other.weights, first.weights, rtol=1e-10, atol=1e-12)
    assert other.plans != first.plans
    assert max(max(plan) for plan in other.plans) <= max(max(plan) for plan in first.plans)


class Noted(Dataset[Any]):
    """Notes which samples are read."""

    def __init__(self) -> None:
        self.rows, self.read = list(zip(*data(), strict=True)), list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        inputs, label = self.rows[index]
        return inputs + 0.1 * torch.randn(6, dtype=torch.float64), label


def reading(**options: Any) -> tuple[Trained, list[int]]:
    dataset = Noted()
    return fit(data=dataset, loss_fn=cross_entropy, epochs=2, micro_batch=3, **options), dataset.read


def read_in_turn() -> tuple[tuple[Trained, list[int]], Trained]:
    return reading(verify=False), reading()[0]


def test_a_sample_is_read_by_the_rank_that_computes_it() -> None:
    ((one, _), verified), *_ = launch(read_in_turn, 1)
    found = launch(read_in_turn, 3)
    for (of_rank, _), other in found:
        torch.testing.assert_close(of_rank.weights, one.weights, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other.weights, verified.weights, rtol=1e-10, atol=1e-12)
    assert all(indices[0] == indices[1] for (_, indices), _ in found), "the first one tells that samples draw"
    read = [indices[1:] for (_, indices), _ in found]
    assert sorted(index for of_rank in read for index in of_rank) == sorted(2 * list(range(len(data()[0]))))
    assert max(map(len, read)) - min(map(len, read)) <= 10, "one of each of ten windows"
