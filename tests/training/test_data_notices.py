"""A list that is read as samples is announced once; a DataLoader's drop_last is that of windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, AutoaccumWarning, DataError
from autoaccum.events import Notice, StepReport

INPUTS, TARGETS = torch.randn(22, 4), torch.arange(22) % 3
DATASET = TensorDataset(INPUTS, TARGETS)
SAMPLES = [(INPUTS[row], int(TARGETS[row])) for row in range(22)]


def run(data: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoaccumWarning)
        given = {"effective_batch": 8, "loss_fn": cross_entropy, "progress": False, "verify": False}
        return autoaccum.fit(**{"model": nn.Linear(4, 3), "data": data, **given, **options})


def told(result: Any) -> list[str]:
    return [event.cause for event in result.events if isinstance(event, Notice)]


def test_a_list_of_samples_is_the_dataset_of_them() -> None:
    result = run(SAMPLES, epochs=2, validation_data=SAMPLES[:6])
    expected = run(DATASET, epochs=2, validation_data=(INPUTS[:6], TARGETS[:6]))
    assert [report.loss for report in result.history] == pytest.approx([report.loss for report in expected.history])
    said = [event.consequence for event in result.events if isinstance(event, Notice)]
    assert said == [
        "The list that is passed as data is read as a dataset, as a DataLoader reads it",
        "The list that is passed as validation_data is read as a dataset, as a DataLoader reads it",
    ]
    assert told(expected) == []
    with pytest.warns(AutoaccumWarning, match="as a DataLoader reads it"):
        autoaccum.fit(nn.Linear(4, 3), SAMPLES, effective_batch=8, loss_fn=cross_entropy, progress=False)


def test_whoever_collates_or_has_batches_is_told_nothing() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])

    batches = [(INPUTS[:12], TARGETS[:12]), (INPUTS[12:], TARGETS[12:])]
    for result in (run(SAMPLES, collate_fn=collate), run(batches), run(DataLoader(batches, batch_size=None))):  # type: ignore[arg-type]
        assert told(result) == []
        assert result.history[-1].num_samples == 22


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATASET, batch_size=4, drop_last=True),
        DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, drop_last=True)),
    ],
)
def test_drop_last_of_a_loader_leaves_out_the_short_window(loader: Any) -> None:
    result = run(loader, epochs=2)
    assert [report.effective_batch for report in result.history] == [8, 8] * 2
    assert told(result) == []


def test_a_loader_without_it_leaves_out_nothing() -> None:
    assert [report.effective_batch for report in run(DataLoader(DATASET, batch_size=8)).history] == [8, 8, 6]


def test_a_loader_that_would_leave_out_all() -> None:
    with pytest.raises(ArgumentError, match="That of a DataLoader counts too"):
        run(DataLoader(DATASET, batch_size=8, drop_last=True), effective_batch=64)


class Counting(Dataset[Any]):
    """Samples of a kind of its own, and how often each was read."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.reads = make, list[int]()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.make(index)


class Windows:
    """Counts the windows of a run."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, record: object) -> None:
        self.number += isinstance(record, StepReport)


class TestValidationDataOfAnotherKind:
    def test_a_loss_fn_that_it_cannot_be_called_with_is_an_error_before_the_first_window(self) -> None:
        windows = Windows()
        with pytest.raises(DataError, match=r"^validation_data: with loss_fn, batches are \(inputs, targets\), but"):
            run(DATASET, validation_data=TensorDataset(INPUTS), callbacks=[windows])
        assert windows.number == 0

    def test_nothing_is_read_here_of_what_workers_read(self) -> None:
        held_out = Counting(SAMPLES.__getitem__)
        loader = DataLoader(held_out, batch_size=4, num_workers=1)
        run(DATASET, validation_data=loader)
        assert held_out.reads == []

    def test_two_samples_are_read_for_that_and_a_stream_not_at_all(self) -> None:
        held_out = Counting(SAMPLES.__getitem__)
        run(DATASET, validation_data=held_out)
        assert sorted(held_out.reads) == sorted([0, 1, *range(8)])
        begun: list[int] = []

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                begun.append(1)
                return iter(SAMPLES)

        run(DATASET, validation_data=Stream())
        assert len(begun) == 1
