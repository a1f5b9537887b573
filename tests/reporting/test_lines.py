"""The wording: every event says its facts, and what is no news says nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from autoaccum.events import (
    Compiled,
    Event,
    Finished,
    Joined,
    MemorySaving,
    Notice,
    OutOfMemory,
    Recomputed,
    Replanned,
    Resumed,
    Saved,
    StepSkipped,
    Validated,
    Waiting,
)
from autoaccum.reporting.lines import Narrator, counted, is_scheduled, line, state_text
from autoaccum.testing import manual_clock
from tests.reporting.synthetic import planned, report, shared, started, verified

LINES: dict[Any, str | None] = {
    started(): None,
    planned(4, 4, predicted_bytes=2**30): "plan: 4 x 2 (r); memory: 1.00 GiB predicted, limit 1.00 GiB",
    Replanned(step=2, old=(4, 4), new=(3, 3, 2), reason="out of memory"): ("step 2: out of memory: 4 x 2 -> 2-3 x 3"),
    OutOfMemory(step=2, phase="training", micro_batch=4): None,
    OutOfMemory(step=2, phase="validation", micro_batch=4): (
        "step 2: out of memory in validation at a micro-batch of 4"
    ),
    MemorySaving(step=2, old="off", new="checkpoint, every Block", reason="out of memory", blocks=4): (
        "step 2: memory saving off -> checkpoint, every Block: out of memory"
    ),
    Recomputed(step=3, saving="checkpoint, every Block", blocks=12): (
        "step 3: activation checkpointing has the same gradient (checked on 12 blocks)"
    ),
    Validated(step=2, epoch=1, loss=0.5, num_samples=5, micro_batch=3, seconds=1.0): "epoch 1: validation loss 0.5000",
    Validated(
        step=2, epoch=1, loss=0.25, metrics={"accuracy": 0.953, "f1": 1 / 3}, num_samples=5, micro_batch=3, seconds=1.0
    ): "epoch 1: validation loss 0.2500, accuracy 0.953, f1 0.3333",
    Waiting(step=2, phase="training", micro_batch=1, needed_bytes=2**30, limit_bytes=2**29, seconds=60.0): (
        "step 2: out of memory at the smallest micro-batch (1): waiting up to 60 s for memory; it needs at least "
        "1.00 GiB, the limit is 512.00 MiB"
    ),
    Waiting(step=2, phase="validation", micro_batch=1, needed_bytes=2, limit_bytes=1, seconds=0.5): (
        "step 2: out of memory in validation at the smallest micro-batch (1): waiting up to 0.5 s for memory; it needs "
        "at least 2 B, the limit is 1 B"
    ),
    Compiled(
        step=2, micro_batch=16, compilations=1, seconds=2.5
    ): "step 2: 1 compilation at a micro-batch of 16, in 2.5 s",
    Compiled(step=2, micro_batch=16, compilations=0, seconds=2.5): None,
    StepSkipped(step=3, reason="overflow"): "step 3: skipped (overflow)",
    Notice(cause="A", consequence="B", cure="C"): "A. B. C.",
    verified(1.4e-7, tensor="net.bias"): (
        "step 1: micro-batches are weighted: exact, relative error 1.4e-07 (2e-05 allowed; 6 samples split 1+2+3, 3+2+1, 2+2+2; "
        "the loss is a mean over its items)"
    ),
    # One that a further measurement has shown to be rounding.
    dataclasses.replace(verified(3.4e-5), tolerance=3.4e-5): (
        "step 1: micro-batches are weighted: exact, relative error 3.4e-05 (within measured rounding; 6 samples split 1+2+3, "
        "3+2+1, 2+2+2; the loss is a mean over its items)"
    ),
    verified(0.27, step=3, tensor="net.bias"): (
        "step 3: micro-batches are weighted: not exact, relative error 2.7e-01 in net.bias (2e-05 allowed; 6 samples split 1+2+3, "
        "3+2+1, 2+2+2; the loss is a mean over its items)"
    ),
    Joined(
        step=3,
        reason="samples meet",
        error=1e-7,
        tolerance=2e-5,
        tensor="net.bias",
        samples=7,
        held=0.06,
        opened=("head",),
        seconds=0.1,
    ): (
        "step 3: micro-batches are joined: exact, relative error 1.0e-07 (2e-05 allowed; 7 samples); a step holds 6% of what "
        "the full batch holds for backward, and a micro-batch. Reason: samples meet"
    ),
    Joined(
        step=3,
        reason="samples meet",
        error=1e-7,
        tolerance=2e-5,
        tensor=None,
        samples=7,
        held=0.8,
        opened=("stem", "norm", "head"),
        seconds=0.1,
    ): (
        "step 3: micro-batches are joined: exact, relative error 1.0e-07 (2e-05 allowed; 7 samples); a step holds 80% of what "
        "the full batch holds for backward, and a micro-batch, for the full batch runs through stem, norm, others (if these are "
        "BatchNorm layers, accumulate='weighted' saves more). Reason: samples meet"
    ),
    shared(): "step 3: 2 ranks: 5 + 3; waiting: 20% to 50% of the time",
    shared(4): "step 3: 8 ranks: 3 to 5 samples each; waiting: 20% to 50% of the time",
    Saved(step=3, path="a/b", seconds=0.25): "step 3: saved a/b in 0.25 s",
    Resumed(step=3, num_samples=24, checkpoint="a/b"): "step 3: resumed from a/b, 24 samples in",
    Finished(step=3, reason="budget"): None,
}


def test_every_event_is_here() -> None:
    assert {type(event) for event in LINES} == set(get_args(Event))


@pytest.mark.parametrize(("event", "text"), LINES.items())
def test_what_each_event_says(event: Any, text: str | None) -> None:
    assert line(event) == text
    assert Narrator()(event) == text


def test_a_window_says_how_things_stand() -> None:
    assert state_text(report(2, (3, 3, 2))) == "loss 1.0000, split 2-3 x 3, 2.00 MiB of 1.00 GiB"
    assert state_text(report(2, (3,)), (4, 4)) == "loss 1.0000, split 4 x 2, 2.00 MiB of 1.00 GiB", "a short one"
    assert state_text(report(2, (3, 3, 2)), (4, 4)) == "loss 1.0000, split 2-3 x 3, 2.00 MiB of 1.00 GiB"


def test_a_window_says_what_is_beside_its_loss() -> None:
    outputs: dict[str, Any] = {"accuracy": 0.95312, "losses": torch.ones(2), "n": 1e6}
    assert state_text(report(2, outputs=outputs)) == (
        "loss 1.0000, accuracy 0.9531, n 1e+06, split 4 x 2, 2.00 MiB of 1.00 GiB"
    )
    many = {f"m{n}": float(n) for n in range(6)}
    assert state_text(report(2, outputs=many)).startswith("loss 1.0000, m0 0, m1 1, m2 2, m3 3, ..., split 4 x 2")


def test_the_end_of_a_run_says_what_is_beside_its_loss() -> None:
    tell = Narrator()
    for record in (started(), report(1), report(2, outputs={"accuracy": 0.75, "losses": torch.ones(2)})):
        tell(record)
    assert "\nloss 2.0000 -> 1.0000, accuracy 0.75\n" in str(tell(Finished(step=2, reason="budget")))


def test_a_narrator_knows_the_last_window_and_the_last_plan() -> None:
    tell = Narrator()
    with manual_clock(100.0) as clock:
        assert [tell(record) for record in (started(), report(1), report(2, replays=1), planned(8))][:3] == [None] * 3
        clock.advance(2.0)
        told = tell(Finished(step=2, reason="stopped"))
    assert tell.last == report(2, replays=1)
    assert told == (
        "stopped: 2 steps, 16 samples in 2.0 s (8 samples/s)\n"
        "loss 2.0000 -> 1.0000\n"
        "micro-batches 8 x 1, 1 replay, peak 2.00 MiB of 1.00 GiB"
    )


def test_of_windows_by_length_the_summary_has_the_sizes_of_one_that_ran() -> None:
    tell = Narrator()
    for record in (started(), report(1, (2, 6)), planned(1, 3, 4, step=1)):
        tell(record)
    assert "micro-batches 2-6 x 2, " in str(tell(Finished(step=1, reason="budget")))


def test_what_is_measured_again_is_told_once_unless_it_comes_to_something_else() -> None:
    tell = Narrator()
    told = [tell(verified(error, step=step)) for step, error in enumerate((1e-9, 1e-8, 0.5, 0.5, 1e-9), start=1)]
    assert [line is not None for line in told] == [True, False, True, True, True]


def test_samples_of_before_a_resume_are_not_this_runs_speed() -> None:
    tell = Narrator()
    with manual_clock(100.0) as clock:
        for record in (started(), Resumed(step=10, num_samples=80, checkpoint="c"), report(11)):
            tell(record)
        clock.advance(2.0)
        told = str(tell(Finished(step=11, reason="budget")))
        assert "88 samples, of which 8 now, in 2.0 s (4 samples/s)" in told
        loss, memory = told.splitlines()[1:3]
        assert " since step 10" in loss
        assert memory.endswith(" GiB since step 10"), "replays and the peak are of this process too"


def test_a_schedule_changes_the_batch_and_memory_does_not() -> None:
    assert is_scheduled((4, 4), (5, 4))
    assert not is_scheduled((4, 4), (2, 2, 2, 2))


def test_one_is_singular() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
