"""The first screen of a run says what its records say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoaccum.events import Finished, Record
from autoaccum.reporting import load_run, write_json
from autoaccum.reporting.facts import Best, facts_of
from tests.reporting.synthetic import MIB, report, started, validated, write


def test_the_numbers(of: Any, tmp_path: Path) -> None:
    write(tmp_path / "run")
    write_json(tmp_path / "run" / "config.json", {"model": "MLP", "effective_batch": "8, 10:16"})
    write_json(tmp_path / "run" / "environment.json", {"device": "cpu x86_64"})
    windows = [report(step, seconds=0.5) for step in range(1, 41)]
    facts = of(started(), *windows, validated(20, 0.2), validated(40, 0.3), Finished(step=40, reason="budget"))
    assert (facts.name, facts.state, facts.model, facts.device) == ("run", "finished", "MLP", "cpu x86_64")
    assert facts.effective_batch == "8, 10:16"
    assert (facts.num_steps, facts.num_samples, facts.seconds, facts.samples_per_second) == (40, 320, 20.0, 16.0)
    assert facts.loss == pytest.approx((2 / 39 + 2 / 40) / 2)
    assert facts.best == Best(metric="loss", value=0.2, step=20, epoch=0)
    assert (facts.peak_bytes, facts.limit_share) == (40 * MIB, 40 / 1024)


def test_what_no_configuration_tells_is_taken_from_the_records(of: Any) -> None:
    facts = of(started(), report(1), report(2, (5, 5)), report(3, (3, 3)))
    assert (facts.model, facts.effective_batch, facts.device) == ("", "", "cpu")


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (Finished(step=1, reason="budget"), "finished"),
        (Finished(step=1, reason="interrupted"), "interrupted"),
        (Finished(step=1, reason="stopped"), "stopped"),
        (Finished(step=1, reason="stopped", stopped_by="EarlyStopping"), "stopped by EarlyStopping"),
        (Finished(step=1, reason="interrupted", stopped_by="EarlyStopping"), "interrupted"),
        (Finished(step=1, reason="NothingFitsError"), "failed (NothingFitsError)"),
        (report(2, loss=math.nan), "diverged"),
        (report(2, loss=1e6), "running or killed (last record 1 min 15 s ago)"),
    ],
)
def test_the_state(last: Record, state: str, tmp_path: Path) -> None:
    run = load_run(write(tmp_path, started(), report(1), last))
    assert run.last_time is not None
    assert facts_of(run, now=run.last_time + 75.2).state == state


def test_a_run_without_a_window(of: Any) -> None:
    facts = of()
    assert facts.rows() == {"state": "nothing recorded yet"}
    assert facts.state == "nothing recorded yet"
    assert (facts.loss, facts.samples_per_second, facts.limit_share) == (None, None, None)
    assert of(started()).device == "cpu"


def test_the_title_has_model_batch_and_outcome(of: Any, tmp_path: Path) -> None:
    assert of(started(), report(1), Finished(step=1, reason="interrupted")).title == "run: interrupted"
    write_json(tmp_path / "run" / "config.json", {"model": "CharGPT", "effective_batch": 256})
    facts = of(report(2), Finished(step=2, reason="budget"))
    assert facts.title == "CharGPT, effective batch 256: finished"
    assert facts.started == 1_700_000_000.0


def test_a_loss_that_ended_as_nan_has_no_mean(of: Any) -> None:
    windows = [report(step, loss=math.nan if step == 40 else 1.0) for step in range(1, 41)]
    assert of(*windows).loss is None


def test_the_best_validation_is_that_of_keep_best(of: Any, tmp_path: Path) -> None:
    metrics = [validated(1, 0.5, accuracy=0.25), validated(2, 0.25, accuracy=0.75), validated(3, 0.75, accuracy=0.75)]
    facts = of(report(1), report(2), report(3), *metrics, validated(4, math.nan, accuracy=math.nan))
    assert facts.best == Best(metric="loss", value=0.25, step=2, epoch=0)
    best = Best(metric="accuracy", value=0.75, step=2, epoch=0)
    for mode, step, value in (("max", 2, 0.75), ("min", 1, 0.25)):
        write_json(tmp_path / "run" / "config.json", {"keep_best": {"metric": "accuracy", "mode": mode}})
        assert of().best == replace(best, step=step, value=value)
    write_json(tmp_path / "run" / "config.json", {"keep_best": {"metric": "f1", "mode": "max"}})
    assert of().best is None
