"""When callbacks that write a run elsewhere begin and end, and what they are told in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import StopTraining
from autoaccum.events import Finished, Notice, OutOfMemory, Resumed, Started, Validated
from autoaccum.reporting import LoggingReporter
from autoaccum.reporting.following import (
    Follower,
    heard,
    numbers_of,
    tell_failure,
    text_of,
    validation_of,
)
from tests.reporting.following import Broken, train
from tests.reporting.synthetic import planned, report, started

RESUMED = Resumed(step=1, num_samples=8, checkpoint="c")
NOTICE = Notice(cause="A", consequence="B", cure="C")
DONE = Finished(step=2, reason="budget")


class Noting(Follower):
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        self.noted.append(("begin", resumed))

    def _numbers(self, values: dict[str, float], step: int) -> None:
        self.noted.append("validation" if "validation/loss" in values else step)

    def _text(self, text: str, step: int) -> None:
        self.noted.append((text.split()[0], step))

    def _end(self, reason: str) -> None:
        self.noted.append(("end", reason))


def told(*records: Any) -> list[Any]:
    tell = Noting()
    for record in records:
        tell(record)
    return tell.noted


def test_a_run_begins_with_the_first_thing_that_is_done_and_ends_with_the_last() -> None:
    plan = planned(4, 4)
    assert told(started(), NOTICE, plan, report(1), DONE) == [
        ("begin", None), ("A.", 0), ("plan:", 1), 1, ("Finished", 2), ("end", "budget")
    ]  # fmt: skip
    resumed = told(started(), RESUMED, NOTICE, report(2))
    assert resumed == [("begin", RESUMED), ("step", 1), ("A.", 1), 2]


def test_of_a_run_that_is_finished_nothing_is_written() -> None:
    assert told(started(), RESUMED, NOTICE, DONE) == []
    assert told(started(), RESUMED, DONE, started(), report(1)) == [("begin", None), 1]


def test_a_second_run_ends_one_that_has_not() -> None:
    assert told(report(1), started(), report(1)) == [("begin", None), 1, ("end", "closed"), ("begin", None), 1]


def test_ranks_but_the_first_have_none_that_write() -> None:
    tell = Noting()
    log = LoggingReporter()
    assert heard([print, tell, log], is_first=True) == [print, tell, log]
    assert heard([print, tell, log], is_first=False) == [print]


def test_an_error_ends_it_too() -> None:
    tell = Noting()
    with pytest.raises(Broken):
        train(None, tell, ends=2)
    assert tell.noted[-1] == ("end", "Broken")
    stopped = Noting()
    train(None, stopped, ends=2, how=StopTraining)
    assert stopped.noted[-1] == ("end", "stopped")


def test_one_that_cannot_be_closed_hides_no_error() -> None:
    class Failing(Noting):
        def _end(self, reason: str) -> None:
            raise OSError("no disk")

    tell, error = Failing(), Broken()
    tell(report(1))
    tell_failure([print, tell], error)
    assert error.__notes__ == ["Failing could not be closed: OSError('no disk')"]


def test_numbers() -> None:
    beside = {"accuracy": 0.75, "losses": torch.ones(2)}
    found = numbers_of(report(2, (3, 3, 2), grad_norm=0.5, seconds=0.5, replays=1, outputs=beside))
    assert found == {
        "epoch": 0, "num_samples": 16, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5, "effective_batch": 8, "micro_batch": 3,
        "accumulation_steps": 3, "replays": 1, "seconds": 0.5, "samples_per_second": 16.0, "peak_bytes": 2 * 2**20,
        "limit_bytes": 2**30, "train/accuracy": 0.75,
    }  # fmt: skip
    assert "samples_per_second" not in numbers_of(report(1, seconds=0.0))
    assert numbers_of(report(1, noise_scale=7.0))["noise_scale"] == 7.0
    validated = Validated(step=2, epoch=0, loss=0.25, metrics={"near": 1.0}, num_samples=5, micro_batch=3, seconds=1.0)
    assert validation_of(validated) == {"validation/loss": 0.25, "validation/near": 1.0}


def test_texts_are_lines() -> None:
    assert text_of(NOTICE) == "A. B. C."
    assert text_of(OutOfMemory(step=1, phase="training", micro_batch=4)) == "OutOfMemory"
