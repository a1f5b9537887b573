"""Buffers and frozen parameters that forwards write to: seen to move, and made the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.training.rank_sync import Followed
from tests.training.test_rank_sync import Alone


class TestFollowed:
    """What forwards write to."""

    def test_running_statistics_are_seen_to_move_which_raise_no_version(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        followed = Followed([model, model])
        before = followed.marks()
        model(torch.randn(8, 2))
        moved = [one != other for one, other in zip(before, followed.marks(), strict=True)]
        assert moved == [True, True, True], "the mean, the variance, and the number of batches"

    def test_a_buffer_that_is_replaced_is_followed(self) -> None:
        model = nn.BatchNorm1d(2)
        followed = Followed([model])
        before = followed.marks()
        model.running_mean = model.running_mean + 1
        assert [one != other for one, other in zip(before, followed.marks(), strict=True)] == [True, False, False]

    def test_of_frozen_parameters_those_that_have_moved(self) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        followed = Followed([model])
        assert followed.marks() == [None, None]
        with torch.no_grad():
            model.bias.add_(1)
        (weight, bias), again = followed.marks(), followed.marks()
        assert weight is None
        assert bias is not None
        assert again == [None, None]

    def test_what_is_not_the_same_becomes_the_first_ranks(self) -> None:
        model = nn.BatchNorm1d(2)
        followed = Followed([model])
        marks = followed.marks()
        group = Alone()
        followed.make_same(group, [marks, [((2,), "another"), *marks[1:]]])  # type: ignore[arg-type]
        assert [id(tensor) for tensor in group.spread_tensors] == [id(model.running_mean)]

    @pytest.mark.parametrize("others", [[], [((3,), ""), ((2,), ""), ((), "")]])
    def test_other_buffers_are_refused(self, others: Any) -> None:
        followed = Followed([nn.BatchNorm1d(2)])
        with pytest.raises(ArgumentError, match="the same buffers on all ranks"):
            followed.make_same(Alone(), [followed.marks(), others])  # type: ignore[arg-type]
