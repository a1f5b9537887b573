"""The ranks of an Accumulator: what is told before a step, and what comes of an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, EmptyDatasetError, RankError
from autoaccum.training.accumulator_sync import Meeting

CPU = torch.device("cpu")


class Two:
    """A group of the first rank, and of another that tells the same but for what is said."""

    size, rank, is_first = 2, 0, True

    def __init__(self, **other: Any) -> None:
        self.other = other
        self.is_over = False
        self.failed: list[BaseException] = []

    def exchange(self, told: Any) -> list[Any]:
        if not isinstance(told, tuple):  # what is compared once
            return [told, told]
        call, num_samples, settings = told
        other = (
            self.other.get("call", call),
            self.other.get("samples", num_samples),
            self.other.get("settings", settings),
        )
        return [told, other]

    def from_first(self, function: Any) -> Any:
        return function()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.is_over = True


class Rows:
    """A window of so many samples."""

    lengths = None

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def micro_batch(self, start: int, size: int) -> Any:
        return list(range(start, start + size))

    def samples(self, positions: Any) -> Any:
        return list(positions)


def meeting(group: Two) -> Meeting:
    model = nn.Linear(3, 1)
    return Meeting(group, [model], torch.optim.SGD(model.parameters(), lr=0.1), CPU)  # type: ignore[arg-type]


def part(group: Two, num_samples: int = 3) -> Any:
    window: Window = Rows(num_samples)
    return meeting(group).part(window, {}, "step 1")


@pytest.mark.parametrize(("own", "other"), [(3, 4), (0, 4), (3, 0)])
def test_a_part_knows_how_many_samples_all_have(own: int, other: int) -> None:
    found = part(Two(samples=other), own)
    assert (found.num_samples, found.num_of_all) == (own, own + other)


def test_no_sample_on_any_rank() -> None:
    with pytest.raises(EmptyDatasetError, match="no rank was given any"):
        part(Two(samples=0), 0)


def test_another_call_is_named() -> None:
    with pytest.raises(ArgumentError, match="ranks='backward 1 of Accumulator 1': expected step 1 of Accumulator"):
        part(Two(call="backward 1 of Accumulator 1"))


def test_another_rate_is_named() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    settings = [f"{name}={value!r} of group 0" for name, value in optimizer.param_groups[0].items() if name != "params"]
    others = [text.replace("lr=0.1", "lr=0.2") for text in settings if "None" not in text]
    with pytest.raises(ArgumentError, match=r"optimizer='lr=0.2 of group 0': expected lr=0.1 of group 0 as on rank 0"):
        part(Two(settings=others))


def test_an_error_is_told_and_nothing_is_run_after_it() -> None:
    group = Two()
    own = meeting(group)
    error = ValueError("no such token")
    with pytest.raises(ValueError, match="no such token"), own.telling():
        raise error
    assert group.failed == [error]
    with pytest.raises(RankError, match="an earlier step has failed"), own.telling():
        raise AssertionError("nothing is run")
    assert group.failed == [error]
