"""Windows are measured ever more seldom, which ones follows from their numbers and plans, and costs no plan its size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.planning.noise import is_due, worth


def fit(steps: int = 60, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    data = torch.randn(64, 8), torch.randint(0, 3, (64,))
    arguments: dict[str, Any] = {"effective_batch": 8, "noise_scale": True, "steps": steps} | options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return autoaccum.fit(model, data, loss_fn=cross_entropy, device="cpu", progress=False, **arguments)


def test_a_window_that_fits_is_cut_where_it_is_measured_and_nowhere_else() -> None:
    history = fit(100).history
    measured = [report.step for report in history if report.gradient_squared is not None]
    due = [number + 1 for number in range(100) if is_due(number)]
    assert set(measured) <= set(due)
    # Those that are missing were tried or timed.
    assert [step for step in measured if step > 50] == [step for step in due if step > 50]
    assert {report.micro_batches for report in history[50:] if report.step in due} == {(4, 4)}
    assert {report.micro_batches for report in history[50:] if report.step not in due} == {(8,)}


def test_between_them_the_averages_stand() -> None:
    history = fit(60, micro_batch=3).history
    squared = variance = 0.0
    for report in history:
        assert report.micro_batches == (3, 3, 2)
        if is_due(report.step - 1):
            kept = 0.95 ** worth(report.step - 1)
            squared = kept * squared + (1 - kept) * report.gradient_squared
            variance = kept * variance + (1 - kept) * report.gradient_variance
        else:
            assert (report.gradient_squared, report.gradient_variance) == (None, None)
        assert report.noise_scale == pytest.approx(variance / squared if squared > 0 else float("inf"))


def test_the_plans_of_a_run_repeat_its_figures() -> None:
    """Also those of windows that were tried or timed, and so not cut for it."""
    first = fit(80)
    again = fit(80, micro_batch=[report.micro_batches for report in first.history])
    figures = [[(r.loss, r.noise_scale, r.gradient_squared) for r in run.history] for run in (first, again)]
    assert figures[0] == figures[1]


def test_a_run_that_is_resumed_measures_the_same_windows(tmp_path: Path) -> None:
    whole = fit(90, micro_batch=4)
    fit(45, micro_batch=4, run_dir=tmp_path)
    rest = fit(90, micro_batch=4, run_dir=tmp_path)
    assert [r.noise_scale for r in whole.history] == [r.noise_scale for r in rest.history]


def test_a_size_that_was_passed_is_not_cut() -> None:
    with pytest.raises(autoaccum.AutoaccumWarning, match="Window 1 was one micro-batch"):
        fit(20, micro_batch=8)
