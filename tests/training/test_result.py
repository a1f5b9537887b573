"""What a run leaves to its caller."""

from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import AutoaccumWarning
from autoaccum.events import StepReport
from autoaccum.testing import oom_at
from autoaccum.training.result import FitResult, cut_last
from tests.models import classes, mlp


def test_it_is_what_fit_returns_and_cannot_be_changed() -> None:
    model = mlp()
    result = autoaccum.fit(
        model, classes(20), effective_batch=8, micro_batch=3, loss_fn=cross_entropy, device="cpu", progress=False
    )
    assert type(result) is autoaccum.FitResult is FitResult
    assert (result.num_steps, result.num_samples, len(result.history)) == (3, 20, 3)
    assert result.plan.sizes == (3, 3, 2)
    assert result.model is model
    assert {id(p) for group in result.optimizer.param_groups for p in group["params"]} == set(
        map(id, model.parameters())
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_steps = 4  # type: ignore[misc]


def run(**options: Any) -> FitResult:
    given: dict[str, Any] = {"model": mlp(), "data": classes(20), "effective_batch": 8, "loss_fn": cross_entropy}
    return autoaccum.fit(**{**given, "device": "cpu", "progress": False, "cache": False, **options})


def test_the_plan_is_the_one_that_ran_last() -> None:
    recorded = [(8,), (8,), (4,), (8,), (5, 3), (3, 1)]
    result = run(micro_batch=recorded, epochs=2)
    assert [report.micro_batches for report in result.history] == recorded
    assert result.plan.sizes == (5, 3), "that of the last full window, and not what the largest would do"
    assert run(micro_batch=[(8,), (2, 6)], steps=2).plan.sizes == (2, 6)


def test_a_window_that_was_cut_smaller_at_the_very_end_shows_in_the_plan() -> None:
    def fit() -> FitResult:
        return run(micro_batch=8, steps=2, verify=False)

    with oom_at(None) as count:
        fit()
    with oom_at(count.operations // 4 * 3) as fault:
        result = fit()
    assert fault.operations > count.operations // 4 * 3
    assert [report.replays for report in result.history] == [0, 1]
    assert result.plan.sizes == result.history[-1].micro_batches == (4, 4)


def test_where_no_window_was_full_it_is_the_last_one() -> None:
    assert run(micro_batch=3, samples=5).plan.sizes == (3, 2)


def test_a_run_that_is_over_tells_the_same_plan_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"micro_batch": [(8,), (1, 7), (4,)], "run_dir": tmp_path}
    first = run(**options)
    with pytest.warns(AutoaccumWarning, match="is finished"):
        again = run(**options)
    assert again.num_steps == first.num_steps == 3
    assert again.plan == first.plan
    assert again.plan.sizes == (1, 7)


def test_before_any_window_there_is_none() -> None:
    assert cut_last({}) is None
    assert cut_last({False: (2,)}) == (2,)
    assert cut_last({True: (4, 4), False: (1,)}) == (4, 4)


def test_a_notebook_shows_a_few_facts_of_it_and_not_all_that_it_holds() -> None:
    data = classes(20)
    options = {"effective_batch": 8, "loss_fn": cross_entropy, "device": "cpu"}
    result = autoaccum.fit(mlp(), data, micro_batch=3, progress=False, **options)
    loss = f"{result.history[-1].loss:.6g}"
    shown = f"ended=finished, num_steps=3, num_samples=20, loss={loss}, plan=3 x 2 + 2 x 1, model=Sequential"
    assert repr(result) == f"FitResult({shown})"
    assert f"<th>loss</th><td>{loss}</td>" in result._repr_html_()
    probed = autoaccum.probe(mlp(), data, max_micro_batch=4, memory_limit="8GiB", **options)
    assert repr(probed).startswith(f"ProbeReport(max_micro_batch=4, trials={len(probed.trials)}, limit=")
    assert repr(probed).endswith("plan=4 x 2)")
    assert "<th>max_micro_batch</th><td>4</td>" in probed._repr_html_()
    checked = autoaccum.check(mlp(), (data[0][:8], data[1][:8]), loss_fn=cross_entropy, device="cpu")
    assert repr(checked) == "<CheckReport: EXACT: split batches have the gradient of the full batch>"
    assert checked._repr_html_().startswith("<pre>EXACT")


def stopping(record: Any) -> None:
    if isinstance(record, StepReport) and record.step == 2:
        raise autoaccum.StopTraining


def interrupting(record: Any) -> None:
    if isinstance(record, StepReport) and record.step == 2:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore:The loss of window")
@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ({}, "finished"),
        ({"callbacks": [stopping]}, "stopped"),
        ({"callbacks": [interrupting]}, "interrupted"),
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=math.inf)}, "diverged"),
        (
            {"optimizer": lambda params: torch.optim.SGD(params, lr=math.inf), "callbacks": [interrupting]},
            "interrupted",
        ),
    ],
)
def test_it_says_how_the_run_ended_and_so_does_the_summary(
    options: dict[str, Any], ended: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ({}, {"run_dir": tmp_path}):
        result = run(**{"epochs": 4, "progress": True, **options, **place})
        assert result.ended == ended
        assert f"FitResult(ended={ended}, " in repr(result)
        summary = capsys.readouterr().err.splitlines()[-3]
        assert summary.startswith("done: " if ended == "finished" else ended)
        assert result.divergence == ("the loss is nan since step 2" if ended == "diverged" else "") or (
            ended == "interrupted" and "optimizer" in options
        )


def test_a_validation_loss_alone_is_no_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = classes(4)
    data = torch.full_like(inputs, torch.inf), targets
    result = run(validation_data=data, progress=True)
    assert (result.ended, result.divergence) == ("finished", "")
    done, losses, _ = capsys.readouterr().err.splitlines()[-3:]
    assert done.startswith("done: ")
    assert losses.endswith("; validation nan")


@pytest.mark.filterwarnings("ignore:Nothing in window")
def test_a_window_in_which_nothing_counts_has_not_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = classes(16)
    targets[8:] = -100
    result = autoaccum.fit(
        mlp(), (inputs, targets), effective_batch=8, loss_fn=cross_entropy, device="cpu", shuffle=False, cache=False
    )
    assert math.isnan(result.history[-1].loss)
    assert (result.ended, result.divergence) == ("finished", "")
    assert capsys.readouterr().err.splitlines()[-3].startswith("done: ")
