"""A list that is read as samples is announced once; a DataLoader's drop_last is that of windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
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
    assert told(result) == ["The DataLoader has drop_last=True, and batches of 4 where a step has 8 samples"]
    (notice,) = [event for event in result.events if isinstance(event, Notice)]
    assert "6 samples, where the loader leaves out 2" in notice.consequence


def test_nothing_is_said_where_both_leave_out_as_many() -> None:
    result = run(DataLoader(DATASET, batch_size=8, drop_last=True))
    assert [report.effective_batch for report in result.history] == [8, 8]
    assert told(result) == []
    assert [report.effective_batch for report in run(DataLoader(DATASET, batch_size=8)).history] == [8, 8, 6]


@pytest.mark.parametrize(
    ("num_samples", "options", "is_told"),
    [
        (17, {}, True),
        (18, {}, False),
        (17, {"drop_last": True}, False),
        (17, {"epochs": None, "steps": 2}, False),
        (17, {"epochs": None, "samples": 17}, True),
        (17, {"model": nn.Linear(4, 3)}, False),
    ],
)
def test_a_last_window_of_one_sample_is_told_beside_batch_norm(
    num_samples: int, options: dict[str, Any], is_told: bool
) -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 3))
    result = run((INPUTS[:num_samples], TARGETS[:num_samples]), **{"model": model, **options})
    cause = "The last window of an epoch has one sample, and the model has BatchNorm layers"
    assert told(result).count(cause) == is_told


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


def by_name(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def named(index: int) -> dict[str, Any]:
    return {"x": INPUTS[index], "y": int(TARGETS[index])}


class Windows:
    """Counts the windows of a run."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, record: object) -> None:
        self.number += isinstance(record, StepReport)


class TestValidationDataOfAnotherKind:
    @pytest.mark.parametrize(
        ("make", "cause"),
        [
            (lambda index: {"x": INPUTS[index]}, "validation_data has no batch['y']"),
            (lambda index: {**named(index), "z": 1.0}, "validation_data has batch['z'] besides"),
            (
                lambda index: {"x": INPUTS[index].double(), "y": "cat"},
                "validation_data has torch.float64 of 2 dimensions for batch['x'], where data has torch.float32 of 2 "
                "dimensions, has list for batch['y'], where data has torch.int64 of 1 dimension",
            ),
            (
                lambda index: {**named(index), "x": INPUTS[index : index + 1]},
                "validation_data has torch.float32 of 3 dimensions for batch['x'], where data has torch.float32 of 2 "
                "dimensions",
            ),
        ],
    )
    def test_is_announced_before_the_first_window(self, make: Any, cause: str) -> None:
        said: list[str] = []
        windows = Windows()

        def listen(record: object) -> None:
            if isinstance(record, Notice) and windows.number == 0:
                said.append(record.cause)

        held_out = Counting(make)
        options: dict[str, Any] = {"loss_fn": None, "training_step": by_name, "callbacks": [listen, windows]}
        with suppress(Exception):  # of the validation, if there is any
            run(Counting(named), validation_data=held_out, **options)
        assert said == [cause]
        assert windows.number == 1, "the end of the epoch is when it is validated"

    def test_a_loss_fn_that_it_cannot_be_called_with_is_an_error_before_the_first_window(self) -> None:
        windows = Windows()
        with pytest.raises(DataError, match=r"^validation_data: with loss_fn, batches are \(inputs, targets\), but"):
            run(DATASET, validation_data=TensorDataset(INPUTS), callbacks=[windows])
        assert windows.number == 0

    def test_of_the_same_kind_nothing_is_told_and_of_another_size_neither(self) -> None:
        convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        pictures, larger = torch.randn(8, 1, 6, 6), torch.randn(4, 1, 9, 9)
        given: dict[str, Any] = {"effective_batch": 4, "loss_fn": cross_entropy, "progress": False, "verify": False}
        found = autoaccum.fit(convolution, (pictures, TARGETS[:8]), validation_data=(larger, TARGETS[:4]), **given)
        assert told(found) == []

    def test_what_may_well_differ_is_not_told(self) -> None:
        def mixed(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            return cross_entropy(model(batch["x"]), batch["y"])

        soft = Counting(lambda index: {"x": INPUTS[index], "y": torch.full((3,), 1 / 3)})
        assert told(run(soft, validation_data=Counting(named), loss_fn=None, training_step=mixed)) == []
        boxes = {"x": INPUTS[:8], "y": TARGETS[:8], "boxes": [torch.zeros(n % 3, 4) for n in range(8)]}
        less = {"x": INPUTS[:6], "y": TARGETS[:6], "boxes": boxes["boxes"][:6]}
        assert told(run(boxes, validation_data=less, loss_fn=None, training_step=by_name)) == []

    def test_nothing_is_read_here_of_what_workers_read(self) -> None:
        held_out = Counting(named)
        loader = DataLoader(held_out, batch_size=4, num_workers=1)
        run(Counting(named), validation_data=loader, loss_fn=None, training_step=by_name)
        assert held_out.reads == []

    def test_two_samples_are_read_for_that_and_a_stream_not_at_all(self) -> None:
        held_out = Counting(named)
        run(DATASET, validation_data=held_out, loss_fn=None, training_step=lambda model, batch: (
            by_name(model, batch) if isinstance(batch, dict) else cross_entropy(model(batch[0]), batch[1])
        ))  # fmt: skip
        assert sorted(held_out.reads) == sorted([0, 1, *range(8)])
        begun: list[int] = []

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                begun.append(1)
                return iter(SAMPLES)

        run(DATASET, validation_data=Stream())
        assert len(begun) == 1
