"""A run in a log: events at once, progress every so often."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError
from autoaccum.events import Finished, Notice, Replanned
from autoaccum.memory.clock import ManualClock
from autoaccum.reporting import LoggingReporter
from autoaccum.testing import manual_clock
from tests.models import classes, mlp
from tests.reporting.synthetic import report, started


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock(1000.0) as clock:
        yield clock


def test_progress_is_told_at_most_every_so_often(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autoaccum")
    tell = LoggingReporter(every=10.0)
    tell(started(400))
    for step in range(1, 31):
        tell(report(step, seconds=1.0))
        clock.advance(1.0)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", "step 11", "step 21"]
    first, second, _ = (record.getMessage() for record in caplog.records)
    assert first == "step 1: 8 of 400 samples, loss 2.0000, split 4 x 2, 1.00 MiB of 1.00 GiB, 8 samples/s"
    assert second == "step 11: 88 of 400 samples, loss 0.1818, split 4 x 2, 11.00 MiB of 1.00 GiB, 8 samples/s"


def test_events_are_told_as_they_come(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mine")
    tell = LoggingReporter(logging.getLogger("mine"), every=1e9)
    for record in (
        started(None),
        report(1),
        report(2),
        Replanned(step=3, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory"),
        Notice(cause="A %s", consequence="B", cure="C"),
        Finished(step=2, reason="budget"),
    ):
        tell(record)
    told = [(record.levelname, record.getMessage().split("\n")[0]) for record in caplog.records]
    assert told[0][1].startswith("step 1: 8 samples, ")
    assert told[1:3] == [("INFO", "step 3: out of memory: 4 x 2 -> 2 x 4"), ("WARNING", "A %s. B. C.")]
    assert told[3][1].startswith("done: 2 steps, 16 samples in ")
    assert len(told) == 4
    assert {record.name for record in caplog.records} == {"mine"}


def test_a_period_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="every=-1"):
        LoggingReporter(every=-1)


def test_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autoaccum")
    autoaccum.fit(
        mlp(),
        classes(20),
        effective_batch=8,
        micro_batch=3,
        loss_fn=cross_entropy,
        callbacks=[LoggingReporter(every=0)],
        device="cpu",
        progress=False,
    )
    told = [record.getMessage() for record in caplog.records if record.name == "autoaccum"]
    measured = [text for text in told if "weighted: exact" in text]
    assert measured[0].startswith("step 1: ")
    others = [text for text in told if text not in measured]
    assert [text.split(":")[0] for text in others] == ["plan", "step 1", "step 2", "step 3", "done"]
    assert "20 of 20 samples" in others[3]


def test_that_a_signal_ends_the_run_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = LoggingReporter()
    tell.ending(may_repeat=True)
    assert capsys.readouterr().err == "stopping after this step; press Ctrl-C again to stop now\n"
    with tell.validating():
        tell.ending(may_repeat=False)
    assert capsys.readouterr().err == "stopping after this validation\n"
