"""The processes that train together, and what they tell each other."""

from __future__ import annotations

from typing import Any

import torch

from autoaccum.errors import RankError
from autoaccum.ranks.group import join
from tests.processes import in_turn
from tests.ranks.launching import launch

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
