"""Law 4 for sweeps: ranks train each trial together, and one study is what comes of it on all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError
from tests.laws.test_laws_ranks import data, rank
from tests.laws.test_laws_ranks_accumulator import environment
from tests.processes import in_turn
from tests.ranks.launching import TIMEOUT, launch

pytestmark = in_turn
fails: str = ""
"""What goes wrong in trial 1, on the second rank."""
calls = 0


def recipe(width: int = 8) -> dict[str, Any]:
    global calls
    calls += 1
    is_faulty = calls == 3 and rank() == 1  # the first call is of a draw that is not kept
    if is_faulty and fails == "the recipe":
        raise ValueError("no such file")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if is_faulty and fails == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cross_entropy(outputs, targets) * (float("nan") if is_faulty and fails == "a loss" else 1.0)

    return {
        "model": nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5)).double(),
        "data": data(60), "validation_data": data(30), "loss_fn": loss, "device": "cpu", "micro_batch": 4, "epochs": 2,
        "cache": False, "patience": 0.0, "verify": False,
    }  # fmt: skip


def swept(directory: str, what: str = "", **options: Any) -> Any:
    global fails
    fails = what
    given: dict[str, Any] = {"num_trials": 3, "sampler": "random", "pruner": "none", "progress": False}
    given |= {"lr": (1e-3, 1e-1), "effective_batch": [8, 12], "directory": directory}
    given["search_space"] = lambda trial: {"width": trial.suggest_int("width", 4, 8)}
    try:
        study = autoaccum.sweep(recipe, **{**given, **options})
    except Exception as error:
        return type(error).__name__, f"{error}", getattr(error, "argument", "")
    return [
        (trial.state.name, trial.params, trial.values, trial.user_attrs.get("not_fitting", {}))
        for trial in study.trials
    ]


def test_a_sweep_of_ranks_is_that_of_one(tmp_path: Path) -> None:
    (one,) = launch(swept, 1, str(tmp_path / "one"))
    first, second = launch(swept, 2, str(tmp_path / "two"))
    assert first == second, "every rank returns the same"
    assert [trial[:2] for trial in first] == [trial[:2] for trial in one]
    assert [trial[0] for trial in first] == ["COMPLETE"] * 3
    for ours, theirs in zip(first, one, strict=True):
        assert ours[2] == pytest.approx(theirs[2], rel=1e-9)
    # The same call again finds the study finished.
    assert launch(swept, 2, str(tmp_path / "two")) == [first, first]


def pruning(directory: str) -> Any:
    return swept(directory, pruner=autoaccum_pruner())


def autoaccum_pruner() -> Any:
    import optuna

    return optuna.pruners.ThresholdPruner(upper=0.0)


def test_a_pruned_trial_is_pruned_on_all_ranks(tmp_path: Path) -> None:
    first, second = launch(pruning, 2, str(tmp_path))
    assert first == second
    assert [trial[0] for trial in first] == ["PRUNED"] * 3


@pytest.mark.parametrize("what", ["memory", "a loss"])
def test_what_ends_a_trial_on_one_rank_ends_it_on_all_and_the_sweep_goes_on(what: str, tmp_path: Path) -> None:
    first, second = launch(swept, 2, str(tmp_path), what)
    assert first == second
    assert [trial[0] for trial in first] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert bool(first[1][3]) == (what == "memory")


def test_an_error_on_one_rank_ends_the_sweep_of_all(tmp_path: Path) -> None:
    first, second = launch(swept, 2, str(tmp_path), "the recipe")
    assert "no such file" in second[1]
    assert first[0] == "RankError"
    assert "no such file" in first[1]


def of_jobs(directory: str) -> Any:
    return swept(directory, jobs=2)


def test_jobs_of_ranks_are_refused(tmp_path: Path) -> None:
    for name, text, argument in launch(of_jobs, 2, str(tmp_path)):
        assert (name, argument) == (ArgumentError.__name__, "jobs")
        assert "one trial after the other" in text


RECIPE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss


def recipe():
    torch.manual_seed(0)
    data = torch.randn(24, 3, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    return {"model": nn.Linear(3, 1).double(), "data": data, "validation_data": data, "loss_fn": mse_loss}
"""


def test_the_command_under_torchrun_prints_once(tmp_path: Path) -> None:
    place = tmp_path / "recipe.py"
    place.write_text(RECIPE)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "autoaccum",
    ]
    command += ["sweep", str(place), "--lr", "1e-3:1e-1", "--effective-batch", "6", "--trials", "2", "--json"]
    command += ["--device", "cpu", "--directory", str(tmp_path / "sweep")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert ended.returncode == 0, ended.stderr
    assert [trial["state"] for trial in json.loads(ended.stdout)["trials"]] == ["complete"] * 2
