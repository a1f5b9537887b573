"""The progress bar and the summary, as they stand on standard error."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
import torch
import tqdm
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EarlyStopping
from autoaccum.events import (
    Finished,
    Notice,
    OutOfMemory,
    Planned,
    Record,
    Replanned,
    Resumed,
    Saved,
    StepSkipped,
    Validated,
)
from autoaccum.memory.clock import ManualClock
from autoaccum.reporting import LoggingReporter, ProgressBar
from autoaccum.reporting.lines import cut_text
from tests.models import classes, mlp
from tests.reporting.synthetic import GIB, planned, report, started


def lines(text: str) -> list[str]:
    """What a terminal shows: of what a bar wrote over itself, the last."""
    return [line.split("\r")[-1].rstrip() for line in text.split("\n") if line.strip()]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, work_clock: ManualClock) -> Any:
    """Shows records; returns the lines on standard error, after checking that nothing went to standard output."""
    monkeypatch.setattr(tqdm.std, "time", work_clock.now)

    def show(*records: Record) -> list[str]:
        bar = ProgressBar()
        for record in records:
            work_clock.advance(1 / 64)
            bar(record)
        captured = capsys.readouterr()
        assert captured.out == ""
        return lines(captured.err)

    return show


FINISHED = Finished(step=3, reason="budget")
WINDOWS = (report(1, (3, 3, 2)), report(2, (4, 4), replays=2, peak_bytes=5 * 2**20), report(3, (2, 2), num_samples=20))


def test_the_bar_shows_loss_speed_micro_batches_and_memory(shown: Any) -> None:
    bar = shown(started(), *WINDOWS, FINISHED)[0]
    assert bar.startswith("100%|")
    assert re.search(r"\| 20/20 \[00:00<00:00, +\d+\.\d+ samples/s, ", bar)
    assert bar.endswith(", loss 0.6667, split 2 x 2, 3.00 MiB of 1.00 GiB]")


def test_the_bar_advances_by_the_samples_of_each_window(shown: Any) -> None:
    for count, done in ((1, "8/20"), (2, "16/20"), (3, "20/20")):
        assert f"| {done} [" in shown(started(), *WINDOWS[:count], FINISHED)[0]


def test_the_bar_of_data_of_unknown_length_counts(shown: Any) -> None:
    assert re.match(r"20 samples \[00:00, .* samples/s, loss ", shown(started(None), *WINDOWS, FINISHED)[0])


def test_the_bar_of_a_resumed_run_goes_on_from_there(shown: Any) -> None:
    resumed = Resumed(step=1, num_samples=8, checkpoint="c")
    text = shown(started(), resumed, Saved(step=2, path="p", seconds=0.1), WINDOWS[1], FINISHED)
    assert text[0] == "step 1: resumed from c, 8 samples in"
    assert "| 16/20 [" in text[1]
    assert "saved" not in "".join(text)


def test_the_bar_advances_within_a_window_and_falls_back_where_it_is_run_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, work_clock: ManualClock
) -> None:
    monkeypatch.setattr(tqdm.std, "time", work_clock.now)
    bar = ProgressBar()
    bar(started(num_samples=20))
    bar(WINDOWS[0])
    capsys.readouterr()
    for within, shown in ((4, "12/20"), (8, "16/20"), (2, "10/20")):
        work_clock.advance(20)
        bar.within(within)
        assert f"| {shown} [" in capsys.readouterr().err
    work_clock.advance(20)
    bar(WINDOWS[1])
    assert "| 16/20 [" in capsys.readouterr().err
    bar(FINISHED)


def test_a_bar_that_is_switched_off_by_the_environment_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clusters do; of tqdm's such bars lack most attributes."""
    make = tqdm.tqdm
    monkeypatch.setattr(
        "autoaccum.reporting.progress.tqdm", lambda *args, **options: make(*args, disable=True, **options)
    )
    bar = ProgressBar()
    bar(started(num_samples=20))
    bar.within(4)
    with bar.validating():
        pass
    bar(WINDOWS[0])
    bar.close()
    assert "samples/s" not in capsys.readouterr().err


def test_uneven_micro_batches_are_shown_as_a_range(shown: Any) -> None:
    assert ", split 2-3 x 3, " in shown(started(), WINDOWS[0], FINISHED)[0]


def test_the_summary_tells_counts_losses_plan_replays_and_peak(shown: Any) -> None:
    first, second, third = shown(started(), *WINDOWS, FINISHED)[1:]
    assert re.fullmatch(r"done: 3 steps, 20 samples in \d+\.\d s \(\d+ samples/s\)", first)
    assert second == "loss 2.0000 -> 0.6667"
    assert third == "micro-batches 4 x 2, 2 replays, peak 5.00 MiB of 1.00 GiB", "the last window was a short one"


def test_the_summary_tells_the_plan_rather_than_the_last_windows_cut(shown: Any) -> None:
    planned = Planned(step=0, sizes=(4, 4), reason="r", predicted_bytes=None, prediction_error=None, limit_bytes=GIB)
    replanned = Replanned(step=2, old=(4, 4), new=(3, 3, 2), reason="out of memory")
    one = report(2, (2,), replays=1)
    assert "micro-batches 4 x 2, 1 replay, " in shown(started(), planned, one, FINISHED)[-1]
    assert "micro-batches 2-3 x 3, 1 replay, " in shown(started(), planned, replanned, one, FINISHED)[-1]


def test_the_summary_tells_the_last_validation_and_the_reason(shown: Any) -> None:
    def validated(loss: float, epoch: int) -> Validated:
        return Validated(step=3, epoch=epoch, loss=loss, num_samples=5, micro_batch=3, seconds=1.0)

    stopped = Finished(step=3, reason="interrupted")
    text = shown(started(), *WINDOWS, validated(0.5, 0), validated(0.25, 1), stopped)
    assert "epoch 0: validation loss 0.5000" in text
    assert "epoch 1: validation loss 0.2500" in text
    assert text[-3].startswith("interrupted: 3 steps, ")
    assert text[-2] == "loss 2.0000 -> 0.6667; validation 0.2500"


def test_a_run_without_a_window_has_no_summary(shown: Any) -> None:
    assert [line.split("|")[0] for line in shown(started(), Finished(step=0, reason="stopped"))] == ["  0%"]


def test_plans_and_replans_are_lines_of_their_own(shown: Any) -> None:
    text = shown(
        started(),
        Planned(
            step=0,
            sizes=(100, 100, 56),
            reason="larger micro-batches do not fit",
            predicted_bytes=3 * 2**29,
            prediction_error=0.0123,
            limit_bytes=2 * GIB,
        ),
        Planned(
            step=0,
            sizes=(8,),
            reason="the full batch fits",
            predicted_bytes=None,
            prediction_error=None,
            limit_bytes=GIB,
        ),
        Replanned(step=12, old=(86, 85, 85), new=(43, 43, 43, 43, 42, 42), reason="out of memory"),
    )
    assert text[:3] == [
        "plan: 56-100 x 3 (larger micro-batches do not fit); memory: 1.50 GiB predicted (predictions so far: 1.2% off), limit 2.00 GiB",
        "plan: 8 x 1 (the full batch fits); memory: limit 1.00 GiB",
        "step 12: out of memory: 85-86 x 3 -> 42-43 x 6",
    ]


def test_every_other_event_is_told_with_its_step_and_facts(shown: Any) -> None:
    text = shown(
        started(),
        OutOfMemory(step=5, phase="validation", micro_batch=64),
        StepSkipped(step=6, reason="the gradient overflowed"),
    )
    assert text[0].startswith("step 5: ")
    assert all(fact in text[0] for fact in ("out of memory", "validation", "64"))
    assert text[1].startswith("step 6: ")
    assert "the gradient overflowed" in text[1]


def test_a_notice_is_a_warning_already(shown: Any) -> None:
    notice = Notice(cause="It rains", consequence="You get wet", cure="Take an umbrella")
    assert "umbrella" not in "".join(shown(started(), notice, *WINDOWS, FINISHED))


@pytest.mark.parametrize(("is_terminal", "seconds"), [(True, 0.1), (False, 10.0)])
def test_a_file_is_written_to_rarely(is_terminal: bool, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setattr(sys, "stderr", Stream())
    bar = ProgressBar()
    bar(started())
    assert bar._bar is not None
    assert (bar._bar.mininterval, bar._bar.maxinterval) == (seconds, seconds)
    bar(FINISHED)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((64, 64, 64), "64 x 3"), ((86, 85, 85), "85-86 x 3"), ((1, 2, 4, 1), "1-4 x 4"), ((7,), "7 x 1")],
)
def test_cut_text(sizes: tuple[int, ...], text: str) -> None:
    assert cut_text(sizes) == text


def test_a_signal_is_acknowledged_at_once(shown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar(started(num_samples=20))
    bar(WINDOWS[0])
    capsys.readouterr()
    bar.ending(may_repeat=True)
    assert "stopping after this step; press Ctrl-C again to stop now" in capsys.readouterr().err
    bar.ending(may_repeat=False)
    assert "again" not in capsys.readouterr().err
    bar(FINISHED)
    assert "stopping: " in capsys.readouterr().err


def test_a_signal_in_the_midst_of_a_write_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reenter(*_: object, **__: object) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr(tqdm.tqdm, "write", reenter)
    ProgressBar().ending(may_repeat=True)


@pytest.mark.parametrize("progress", [True, False])
def test_of_a_run(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    result = autoaccum.fit(
        mlp(),
        classes(20),
        effective_batch=8,
        micro_batch=3,
        loss_fn=cross_entropy,
        validation_data=classes(5),
        device="cpu",
        progress=progress,
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    if not progress:
        assert captured.err == ""
        return
    text = lines(captured.err)
    assert text[0].startswith("plan: 2-3 x 3 (micro_batch is set); memory: ")
    measured = [line for line in text if "weighted: exact" in line]
    assert measured[0].startswith("step 1: ")
    text = [line for line in text if line not in measured]
    assert text[1].startswith("epoch 0: validation loss ")
    assert "| 20/20 [" in text[2]
    assert text[3].startswith("done: 3 steps, 20 samples in ")
    assert text[4].startswith(f"loss {result.history[0].loss:.4f} -> {result.history[-1].loss:.4f}; validation ")
    assert text[5].startswith("micro-batches 2-3 x 3, 0 replays, peak ")


@pytest.mark.parametrize("progress", [True, False])
def test_the_end_names_the_callback_that_has_stopped_it(
    progress: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autoaccum")

    def enough(record: Any) -> None:
        if getattr(record, "step", 0) == 3:
            raise autoaccum.StopTraining

    # Validations of whole windows are the same to the bit: the second is no improvement, and the third is the last.
    stopping: list[tuple[Any, str]] = [(EarlyStopping(2), "EarlyStopping"), (enough, "enough")]
    for callback, name in stopping:
        autoaccum.fit(
            mlp(), classes(8), effective_batch=8, micro_batch=8, epochs=20, loss_fn=cross_entropy, device="cpu",
            validation_data=classes(5), verify=False, cache=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            callbacks=[callback] if progress else [callback, LoggingReporter()], progress=progress,
        )  # fmt: skip
        assert f"stopped by {name}: 3 steps, 24 samples" in (capsys.readouterr().err if progress else caplog.text)


def test_a_ramp_is_told_in_few_lines(shown: Any) -> None:
    ramp = [
        Replanned(step=size, old=(size - 1,), new=(size,), reason=f"the effective batch is {size} now")
        for size in range(101, 201)
    ]
    told = shown(planned(100), *ramp)
    assert [re.findall(r"-> (\d+) x 1", line) for line in told[1:]] == [["120"], ["144"], ["173"]]


def test_what_is_not_the_schedules_is_told_whatever_the_size(shown: Any) -> None:
    told = shown(
        planned(100),
        Replanned(step=2, old=(100,), new=(50, 50), reason="out of memory"),
        planned(100),
        Replanned(step=3, old=(100,), new=(101,), reason="the effective batch is 101 now"),
        Replanned(step=3, old=(101,), new=(51, 50), reason="out of memory"),
    )
    assert len(told) == 4
    assert "50-51 x 2" in told[-1]
