"""Records are frozen values that are made by keyword alone."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_args

import pytest

from autoaccum import events
from autoaccum.events import Event, Finished, Notice, OutOfMemory, Record, Replanned

RECORDS: tuple[type[Any], ...] = get_args(Record)
every_record = pytest.mark.parametrize("record", RECORDS)


def made(record: type[Any]) -> Any:
    return record(**{field.name: (field.name, 1) for field in dataclasses.fields(record)})


def test_every_dataclass_of_the_module_is_a_record() -> None:
    defined = {value for _, value in inspect.getmembers(events, dataclasses.is_dataclass)}
    assert defined == set(RECORDS)
    assert set(get_args(Event)) == defined - {events.StepReport}


@every_record
def test_frozen(record: type[Any]) -> None:
    value = made(record)
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, 0)
        assert getattr(value, field.name) == (field.name, 1)
    assert not hasattr(value, "__dict__")


@every_record
def test_by_keyword_alone_and_without_defaults(record: type[Any]) -> None:
    count = len(dataclasses.fields(record))
    assert count > 0
    with pytest.raises(TypeError, match="positional"):
        record(*range(count))
    with pytest.raises(TypeError, match="missing"):
        record()


@every_record
def test_a_value(record: type[Any]) -> None:
    first = dataclasses.fields(record)[0].name
    assert made(record) == made(record)
    assert hash(made(record)) == hash(made(record))
    assert made(record) != dataclasses.replace(made(record), **{first: 0})


def test_the_fields_that_users_rely_on() -> None:
    def names(record: type[Any]) -> list[str]:
        return [field.name for field in dataclasses.fields(record)]

    assert names(Replanned) == ["step", "old", "new", "reason"]
    assert names(OutOfMemory) == ["step", "phase", "micro_batch"]
    assert names(events.Saved) == ["step", "path", "seconds"]
    assert names(events.Resumed) == ["step", "num_samples", "checkpoint"]
    assert names(Finished) == ["step", "reason", "stopped_by"]
    assert names(events.StepReport) == [
        "step",
        "epoch",
        "num_samples",
        "effective_batch",
        "micro_batches",
        "loss",
        "lr",
        "grad_norm",
        "seconds",
        "peak_bytes",
        "limit_bytes",
        "replays",
        "noise_scale",
        "gradient_squared",
        "gradient_variance",
        "outputs",
        "memory_saving",
    ]


def test_a_notice_reads_as_cause_consequence_and_cure() -> None:
    notice = Notice(cause="It rains", consequence="You get wet", cure="Take an umbrella")
    assert str(notice) == "It rains. You get wet. Take an umbrella."
