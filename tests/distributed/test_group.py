"""The processes that train together, and what they tell each other."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from autoaccum.distributed.group import _packed, join
from autoaccum.errors import RankError
from tests.distributed.launching import launch
from tests.processes import in_turn

pytestmark = in_turn


def told(fails: bool) -> tuple[list[Any], Any]:
    found = join(torch.device("cpu"))
    assert found is not None
    heard = [found.exchange({"rank": found.rank}), found.from_first(lambda: "of the first")]
    if fails and found.rank == 1:
        found.fail(ValueError("no such token"))
        found.fail(ValueError("and another"))  # of which nobody hears: they have ended
        return heard, None
    try:
        return heard, found.exchange("more")
    except RankError as error:
        found.fail(error)
        return heard, (error.rank, str(error))


def test_what_is_told_is_heard_by_all_of_them() -> None:
    expected = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], "of the first"]
    assert launch(told, 3, False) == [(expected, ["more"] * 3)] * 3


def test_an_error_is_heard_in_the_place_of_what_would_have_been_told() -> None:
    first, second, third = launch(told, 3, True)
    assert second[1] is None
    for _, (rank, text) in (first, third):
        assert rank == 1
        assert "rank 1 has failed: ValueError: no such token" in text


def spread() -> list[list[float]]:
    found = join(torch.device("cpu"))
    assert found is not None
    tensors = [torch.full((3,), float(found.rank + 1)), torch.tensor(found.rank), torch.ones(2, 2)[:, :1] * found.rank]
    found.spread(tensors)
    return [tensor.flatten().tolist() for tensor in tensors]


def test_the_first_ranks_values_are_given_to_all() -> None:
    assert launch(spread, 2) == [[[1.0] * 3, [0], [0.0, 0.0]]] * 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1, dtype=torch.float64),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.arange(12.0).reshape(4, 3)[:, 1],
        torch.arange(12.0).reshape(4, 3)[1:2, 1],
        torch.arange(5, dtype=torch.bfloat16)[::2],
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.tensor([1.5, -2.0]).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
)
def test_tensors_are_told_with_their_values_shapes_and_types(tensor: torch.Tensor) -> None:
    found = pickle.loads(_packed({"here": [tensor]}))["here"][0]
    kinds = [(each.dtype, each.shape, each.layout, type(each)) for each in (found, tensor)]
    assert kinds[0] == kinds[1]
    values = [each.detach().to_dense() for each in (found, tensor)]
    assert torch.equal(*values)
