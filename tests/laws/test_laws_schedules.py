"""Schedules of the effective batch: windows are what was asked for, to the sample, whatever memory and data are like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autoaccum
from autoaccum.events import Notice, Replanned, Started, StepReport
from autoaccum.schedules import Progress, Schedule, parse
from autoaccum.testing import simulated_memory
from tests.devices import DEVICE

batches = st.integers(1, 40) | st.sampled_from([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])


@st.composite
def texts(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["constant", "milestones", "linear", "geometric"]))
    suffix, most = draw(st.sampled_from([("", 12), ("s", 150), ("e", 3)]))
    first, second = draw(batches), draw(batches)
    if kind == "constant":
        return str(first)
    if kind == "milestones":
        points = sorted(draw(st.sets(st.integers(1, most), min_size=1, max_size=4)))
        return ", ".join([str(first), *(f"{point}{suffix}:{draw(batches)}" for point in points)])
    over = draw(st.integers(1, most))
    return f"{kind} {first}:{second} over {over}{suffix}"


budgets = st.sampled_from(["epochs", "steps", "samples"]).flatmap(
    lambda name: st.integers(1, {"epochs": 3, "steps": 20, "samples": 200}[name]).map(lambda value: {name: value})
)


def expected_windows(
    schedule: Schedule, num_samples: int, drop_last: bool, budget: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """(first sample's position in its epoch, size) of every window, by the rules in words of docs/schedules.md."""
    step = epoch = seen = 0
    while epoch < budget.get("epochs", 10_000):
        position = 0
        while position < num_samples:
            asked = schedule.at(Progress(step=step, epoch=epoch, samples=seen))
            size = min(asked, budget["samples"] - seen) if "samples" in budget else asked
            if position + size > num_samples:
                if drop_last:
                    break
                size = num_samples - position
            yield position, size
            position, step, seen = position + size, step + 1, seen + size
            if step == budget.get("steps") or seen == budget.get("samples"):
                return
        epoch += 1


class Wide(nn.Module):
    """Remembers which samples it saw; its activations fill a small device."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs[:, 0].int().tolist()
        return self.net(inputs)  # type: ignore[no-any-return]


def numbered(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.stack([torch.arange(num_samples), torch.ones(num_samples)], dim=1).float()
    return inputs, torch.zeros(num_samples, 1)


class Numbered(Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.rows = list(zip(*numbered(num_samples), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return iter(Numbered(self.num_samples).rows)


def run(data: Any, **options: Any) -> tuple[autoaccum.FitResult, list[list[int]]]:
    """And the samples of each window that committed, in order."""
    model = options.pop("model", None) or Wide()
    committed: list[list[int]] = []

    def take(record: object) -> None:
        if isinstance(record, StepReport):
            committed.append(model.seen[-record.effective_batch :])
            model.seen.clear()

    arguments = {"loss_fn": mse_loss, "shuffle": False, "progress": False, "cache": False, "device": DEVICE}
    if isinstance(data, DataLoader):
        del arguments["shuffle"]
    return autoaccum.fit(model, data, callbacks=[take], **{**arguments, **options}), committed


def check_windows(text: str, num_samples: int, budget: dict[str, int], drop_last: bool, room: int | None) -> None:
    schedule = parse(text)
    if drop_last:
        num_samples += schedule.largest or 0  # else an epoch may have no window at all
    expected = list(expected_windows(schedule, num_samples, drop_last, budget))
    limit = 40_000 + (10_000 if room is None else room) * 4 * 300  # model, gradients and moments; a row of activations
    with simulated_memory(limit):
        result, committed = run(numbered(num_samples), effective_batch=text, drop_last=drop_last, **budget)
    assert [report.effective_batch for report in result.history] == [size for _, size in expected]
    assert committed == [list(range(start, start + size)) for start, size in expected]
    started = result.events[0]
    assert isinstance(started, Started)
    assert (started.num_steps, started.num_samples) == (len(expected), sum(size for _, size in expected))
    assert all(sum(report.micro_batches) == report.effective_batch for report in result.history)


@pytest.mark.filterwarnings("ignore:.*is more than the data's")
@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_windows_are_those_of_the_schedule(examples: int) -> None:
    check = given(
        text=texts(),
        num_samples=st.integers(1, 90),
        budget=budgets,
        drop_last=st.booleans(),
        room=st.integers(0, 60) | st.none(),
    )(check_windows)
    settings(max_examples=examples, deadline=None)(check)()


@pytest.mark.device(every=2)
@pytest.mark.parametrize("kind", ["tensors", "dataset", "workers", "own collate", "loader", "stream"])
def test_samples_stay_in_order_across_changes(kind: str) -> None:
    """None is lost or repeated, also where workers have collated for windows of another size."""
    num_samples, text = 101, "linear 3:29 over 150s"
    options: dict[str, Any] = {}
    data: Any = Numbered(num_samples)
    if kind == "tensors":
        data = numbered(num_samples)
    elif kind in ("workers", "own collate"):
        options["num_workers"] = 2
        if kind == "own collate":
            options["collate_fn"] = lambda rows: tuple(map(torch.stack, zip(*rows, strict=True)))
    elif kind == "loader":
        data = DataLoader(data, batch_size=7, num_workers=1)
    elif kind == "stream":
        data = Stream(num_samples)
    result, committed = run(data, effective_batch=text, epochs=3, micro_batch=8, **options)
    expected = list(expected_windows(parse(text), num_samples, False, {"epochs": 3}))
    assert committed == [list(range(start, start + size)) for start, size in expected]
    assert [report.effective_batch for report in result.history] == [size for _, size in expected]


def test_workers_collate_for_windows_to_come() -> None:
    """What they make ahead of time is what training takes: with a collate_fn of its own anything else is made again."""
    made: list[int] = []

    def collate(rows: list[Any]) -> Any:
        made.append(len(rows))  # in the main process: only what the workers' would not do
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    run(Numbered(200), effective_batch="linear 5:40 over 10", micro_batch=8, num_workers=1, collate_fn=collate)
    assert made == []


@pytest.mark.device
def test_windows_are_foreseen_that_follow_the_one_before() -> None:
    """Also when that was short: a schedule is told in advance what it will be told in training."""
    told: list[int | None] = []

    def grow(progress: Progress) -> int:
        told.append(progress.effective_batch)
        return (progress.effective_batch or 3) + 1

    result, _ = run(numbered(20), effective_batch=grow, epochs=3)
    assert [report.effective_batch for report in result.history] == [4, 5, 6, 5, 8, 9, 3, 11, 9]
    assert told[-9:] == [None, 4, 5, 6, 7, 8, 9, 10, 11]
    started = result.events[0]
    assert isinstance(started, Started)
    assert started.num_steps == 9


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("budget", [{"epochs": 1}, {"steps": 4}, {"samples": 18}])
def test_nothing_is_asked_beyond_the_last_window(num_workers: int, budget: dict[str, int]) -> None:
    """A function may know the windows of its run alone; workers, that read ahead, ask for no more."""
    windows = [4, 5, 6, 5]

    def listed(progress: Progress) -> int:
        return windows[progress.step]

    data = Numbered(20 if "epochs" in budget else 50)
    result, _ = run(data, effective_batch=listed, num_workers=num_workers, **budget)
    assert [report.effective_batch for report in result.history] == [4, 5, 6, 5 if "samples" not in budget else 3]


def test_what_would_come_after_the_last_window_is_not_announced() -> None:
    result, _ = run(numbered(24), effective_batch="8, 3:64")
    assert not [event for event in result.events if isinstance(event, Notice)]


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:effective_batch=30 is more than the data's 20")
def test_a_stream_may_have_more_in_one_epoch_than_in_another() -> None:
    """What it had in the last one cuts no window of the next, and is what a rate goes by only while it is all."""

    class Varying(IterableDataset[Any]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter(Numbered([20, 20, 40, 20][self.epoch]).rows)

    scaling: dict[str, Any] = {"lr": 0.01, "lr_scaling": "linear", "base_batch": 10}
    result, committed = run(Varying(), effective_batch="8, 1e:30", epochs=4, **scaling)
    assert [report.effective_batch for report in result.history] == [8, 8, 4, 20, 30, 10, 20]
    assert committed[-3:] == [list(range(30)), list(range(30, 40)), list(range(20))]
    assert [round(1000 * report.lr) for report in result.history] == [8, 8, 8, 20, 30, 30, 30]


def test_a_stream_whose_rest_is_dropped_is_not_taken_for_shorter() -> None:
    result, committed = run(Stream(20), effective_batch="8, 1e:18", epochs=2, drop_last=True)
    assert [report.effective_batch for report in result.history] == [8, 8, 18]
    assert committed[-1] == list(range(18))


def test_the_largest_window_is_searched_when_it_comes() -> None:
    """A run that begins with windows that fit whole finds out what fits of larger ones; each change is told."""
    with simulated_memory(500_000):
        result, _ = run(numbered(4000), effective_batch="8, 10:1000, 13:8", samples=3200)
    sizes = [max(report.micro_batches) for report in result.history]
    assert sizes[9] == 8
    largest = max(sizes[10:13])
    assert 8 < largest < 1000
    assert sizes[13] == 8
    changes = [event for event in result.events if isinstance(event, Replanned) and "effective batch" in event.reason]
    assert [(event.step, sum(event.old), sum(event.new)) for event in changes] == [(11, 8, 1000), (14, 1000, 8)]
    assert not any(report.replays for report in result.history)


def test_a_schedule_goes_on_from_any_point() -> None:
    """The windows after any point are those of a run that was there all along: a schedule remembers nothing."""
    schedule = parse("geometric 3:50 over 300s")
    windows = list(expected_windows(schedule, 70, False, {"epochs": 6}))
    seen = 0
    for step, (_, size) in enumerate(windows):
        at = Progress(step=step, epoch=seen // 70, samples=seen)
        assert size in (parse(str(schedule)).at(at), 70 - seen % 70)
        seen += size
