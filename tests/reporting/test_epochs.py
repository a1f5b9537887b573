"""The line of an epoch: what it adds up, when it is printed."""

from __future__ import annotations

import pytest

from autoaccum.events import Finished, Resumed, Validated
from autoaccum.reporting.epochs import EpochLines
from tests.reporting.synthetic import report, started


def validated(step: int, loss: float, **metrics: float) -> Validated:
    return Validated(step=step, epoch=0, loss=loss, metrics=metrics, num_samples=5, micro_batch=3, seconds=1.0)


def test_a_line_adds_up_the_windows_of_its_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    tell(started())
    tell(report(1, (4, 4), loss=1.0, seconds=0.5))
    tell(report(2, (2,), loss=6.0, seconds=0.5))  # a shorter window counts for less: (8 x 1 + 2 x 6) / 10
    tell(validated(2, 0.25, accuracy=0.75))
    assert capsys.readouterr().err == "", "another validation may follow"
    tell(report(3, (4, 4), epoch=1, loss=0.5, seconds=0.0))
    line = "epoch 0: loss 2.0000, validation loss 0.2500, accuracy 0.75, 10 samples/s, micro-batch 4 x 2\n"
    assert capsys.readouterr() == ("", line)
    tell(Finished(step=3, reason="budget"))
    assert capsys.readouterr() == ("", "epoch 1: loss 0.5000, micro-batch 4 x 2\n")


def test_an_epoch_of_which_an_earlier_process_has_trained_a_part_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss that stands there is not the epoch's."""
    tell = EpochLines()
    resumed = Resumed(step=1, num_samples=8, checkpoint="x")
    for record in (started(), resumed, report(2, loss=6.0), report(3, epoch=1), Finished(step=3, reason="budget")):
        tell(record)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 0 since it was resumed: loss 6.0000, ")
    assert second.startswith("epoch 1: loss ")


def test_the_last_validation_of_an_epoch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    for record in (report(1), validated(1, 3.0), report(2), validated(2, 0.5), Finished(step=2, reason="budget")):
        tell(record)
    assert ", validation loss 0.5000, " in capsys.readouterr().err


def test_a_second_run_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    for record in (report(1, loss=100.0), started(), report(1, loss=1.0), Finished(step=1, reason="budget")):
        tell(record)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 0: loss 100.0000, ")
    assert second.startswith("epoch 0: loss 1.0000, ")


def test_that_a_signal_ends_it_is_told_at_once_and_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    tell(report(1))
    tell.ending(may_repeat=True)
    assert capsys.readouterr().err == "stopping after this step; press Ctrl-C again to stop now\n"
    with tell.validating():
        tell.ending(may_repeat=False)
    assert capsys.readouterr().err == "stopping after this validation\n"
    tell(Finished(step=1, reason="interrupted"))
    line, end = capsys.readouterr().err.splitlines()
    assert line.startswith("epoch 0: loss ")
    assert end == f"interrupted: 1 step, {report(1).num_samples} samples"


def test_a_validation_that_is_made_up_for_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    tell(started())
    tell(validated(3, 0.25, accuracy=0.75))
    tell(Finished(step=3, reason="budget"))
    line = "epoch 0: validation loss 0.2500, accuracy 0.75\n"
    assert capsys.readouterr().err == line
    for record in (started(), validated(3, 0.25, accuracy=0.75), report(4, epoch=1)):
        tell(record)
    assert capsys.readouterr().err == line, "it is none of the epoch that begins"
    tell(Finished(step=4, reason="budget"))
    assert "validation" not in capsys.readouterr().err


def test_a_run_that_has_trained_nothing_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EpochLines()
    tell(started())
    tell(Finished(step=3, reason="budget"))
    assert capsys.readouterr().err == ""
