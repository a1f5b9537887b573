"""Where a run stands: what it asks for, of whom, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoaccum.data.sources import open_source
from autoaccum.errors import EmptyDatasetError
from autoaccum.events import Notice
from autoaccum.planning.budget import Budget
from autoaccum.schedules import Progress, schedule_of
from autoaccum.training.run_position import Pace


class Counts:
    """A step that only counts."""

    def __init__(self) -> None:
        self.number = 0
        self.tuner = self.announcer = self
        self.announced: list[Notice] = []

    def say_once(self, notice: Notice) -> None:
        self.announced.append(notice)

    def plan(self, num_samples: int) -> tuple[int, ...]:
        return (num_samples,)


def pace(
    asks: int | str | Callable[[Progress], int], num_samples: int | None = 20, plans: Any = (), **budget: int
) -> Pace:
    step: Any = Counts()
    drop_last = bool(budget.pop("drop_last", 0))
    return Pace(
        schedule_of(asks), Budget(**budget), num_samples=num_samples, drop_last=drop_last, plans=plans, step=step
    )


def walk(pace: Pace, data: Any, epochs: int = 10) -> list[tuple[int, int]]:
    """(samples, samples that were asked for) of each window until the budget is spent."""
    source = open_source(data, seed=0, shuffle=False, device=torch.device("cpu"))
    found = []
    while not pace.is_spent and pace.epoch < epochs:
        reader = source.read(pace.epoch, pace.sizes_ahead(), pace.windows)
        while not pace.is_spent:
            if (window := pace.next_window(reader)) is None:
                pace.end_epoch()
                break
            found.append((window[0].num_samples, window[1]))
            pace.passed(window[0].num_samples)
            pace._step.number += 1
    return found


def test_windows_to_the_end_of_the_budget() -> None:
    assert walk(pace(8, epochs=2), torch.randn(20, 2)) == [(8, 8), (8, 8), (4, 8)] * 2
    assert walk(pace(8, samples=26), torch.randn(20, 2)) == [(8, 8), (8, 8), (4, 8), (6, 8)]
    assert walk(pace(8, steps=2), torch.randn(20, 2)) == [(8, 8)] * 2


def test_what_is_more_than_the_data_has_is_said() -> None:
    made = pace("8, 1:50", epochs=2)
    assert walk(made, torch.randn(20, 2)) == [(8, 8), (12, 20), (20, 20)]
    assert "effective_batch=50 is more than the data's 20 samples" in str(made._step.announced[0])  # type: ignore[attr-defined]


def test_recorded_plans_say_the_sizes() -> None:
    assert walk(pace(8, plans=[(3, 2), (4,)], epochs=1), torch.randn(20, 2)) == [(5, 8), (4, 8), (8, 8), (3, 8)]


def test_what_is_read_ahead_is_what_training_will_ask_for() -> None:
    made = pace("linear 2:6 over 4", epochs=1)
    ahead, position, sizes = made.sizes_ahead(), 0, []
    while position < 20:
        sizes.append(ahead(position)[0])
        position += sizes[-1]
    assert sizes == [size for size, _ in walk(made, torch.randn(20, 2))] == [2, 3, 4, 5, 6]


def test_it_goes_on_from_the_midst_of_an_epoch() -> None:
    whole = walk(pace("3, 2:7", epochs=2), torch.randn(20, 2))
    made = pace("3, 2:7", epochs=2)
    made.windows, made.epoch_seen, made.samples_seen, made._step.number = [3, 3], 6, 6, 2
    assert walk(made, torch.randn(20, 2)) == whole[2:]


def test_a_stream_tells_in_its_first_pass_how_much_there_is() -> None:
    made = pace(50, num_samples=None, epochs=3)
    assert walk(made, [torch.randn(12, 2), torch.randn(8, 2)]) == [(20, 50), (20, 20), (20, 20)]


def test_an_epoch_without_a_window_is_an_error() -> None:
    with pytest.raises(EmptyDatasetError, match="epoch 0 has no window"):
        walk(pace(8, num_samples=None, epochs=1), iter([]))


def test_windows_of_an_epoch_are_kept_as_runs_of_equal_sizes() -> None:
    made = pace(8, num_samples=29)
    for size in (8, 8, 5, 8):
        made.passed(size)
    state = made.state_dict()
    assert state["windows"] == [(8, 2), (5, 1), (8, 1)]
    other = pace(8, num_samples=29)
    other.load_state_dict(state)
    assert (list(other.windows), other.epoch_seen) == ([8, 8, 5, 8], 29)
