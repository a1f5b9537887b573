"""What keeps the ranks of a run the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.training import rank_sync
from autoaccum.training.rank_sync import Followed


class Alone:
    """A group of one, and of another that wishes and has moved what is said."""

    size = 2

    def __init__(self, rank: int = 0, heard: Any = (None, set())) -> None:
        self.rank, self.heard = rank, heard
        self.spread_tensors: list[torch.Tensor] = []

    def exchange(self, told: Any) -> list[Any]:
        return [told, self.heard]

    def spread(self, tensors: list[torch.Tensor]) -> None:
        self.spread_tensors = list(tensors)


def draws(rank: int, step: int, of_run: int = 0) -> list[float]:
    rank_sync.seed(Alone(rank), torch.device("cpu"), of_run, step)  # type: ignore[arg-type]
    return torch.rand(3).tolist()  # type: ignore[no-any-return]


def test_ranks_draw_apart_and_each_the_same_again() -> None:
    assert draws(0, 1) == draws(0, 1)
    assert len({tuple(draws(*where)) for where in [(0, 1), (1, 1), (0, 2), (1, 2), (0, 1, 1)]}) == 5


@pytest.mark.parametrize("heard", [None, "interrupted"])
@pytest.mark.parametrize("wish", [None, "stopped"])
def test_the_first_wish_of_any_rank_is_all_of_theirs(wish: str | None, heard: str | None) -> None:
    group = Alone()
    assert rank_sync.agreed(group, [(wish, []), (heard, [])], Followed([])) == (wish or heard)  # type: ignore[arg-type]
