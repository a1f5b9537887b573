"""Law 3 on a device, where checkpoints are written while training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Resumed
from autoaccum.runs import checkpoint
from autoaccum.runs.checkpoint import STATE, WEIGHTS, Checkpoints
from tests.models import classes, mlp, noisy, relative_error, same, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")]


def fit(run_dir: Path | None, **options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {
        "model": noisy(),
        "data": classes(46),
        "effective_batch": 12,
        "micro_batch": 5,
        "epochs": 2,
        "clip_norm": 0.5,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "checkpoint_every": run_dir and 2,
        "progress": False,
        "cache": False,
        **options,
    }
    return autoaccum.fit(run_dir=run_dir, loss_fn=cross_entropy, **arguments)


def left_by(result: autoaccum.FitResult) -> list[torch.Tensor]:
    return [*state_of(result), torch.get_device_module().get_rng_state()]


PLACES = ("weights", "state", "rename")
"""Where the process is killed: before each file of the checkpoint of step 4, and before that gets its name."""


def killed(run_dir: Path, place: str) -> None:
    """Train, and kill this process while the checkpoint of step 4 is being written."""
    write, put = checkpoint.write_durably, Checkpoints._put

    def written(path: Path, save: Any) -> Any:
        if "step-00000004" in str(path) and path.name == {"weights": WEIGHTS, "state": STATE}.get(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, save)

    def named(self: Checkpoints, partial: Path, path: Path) -> None:
        if place == "rename" and path.name == "step-00000004":
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, partial, path)

    checkpoint.write_durably, Checkpoints._put = written, named  # type: ignore[method-assign]
    fit(run_dir)


@pytest.mark.parametrize("place", PLACES)
def test_killed_while_a_checkpoint_is_written(place: str, tmp_path: Path) -> None:
    """The run goes on from the one before, and ends as the run that was never killed."""
    code = (
        "import sys; from pathlib import Path; from tests.laws.test_laws_checkpoints import killed; "
        "killed(Path(sys.argv[1]), sys.argv[2])"
    )
    # With as many threads as this process, for sums are added in another order by more.
    command, environment = [sys.executable, "-W", "ignore", "-c", code], {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.run([*command, str(tmp_path / "run"), place], check=False, env=environment)
    assert child.returncode == -signal.SIGKILL
    result = fit(tmp_path / "run")
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [2]
    assert result.num_steps == 8
    assert same(left_by(result), left_by(fit(None)))


@pytest.mark.parametrize(("first", "then"), [(None, "cpu"), ("cpu", None)])
def test_a_run_that_moves_between_a_device_and_the_cpu(first: str | None, then: str | None, tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == 3:
            raise autoaccum.StopTraining

    def run(run_dir: Path | None, device: str | None, *callbacks: Any) -> autoaccum.FitResult:
        options = {"data": classes(46, torch.float64), "device": device, "callbacks": callbacks}
        return fit(run_dir, model=mlp(torch.float64), **options)

    run(tmp_path / "run", first, stop)
    moved = run(tmp_path / "run", then)
    assert [event.step for event in moved.events if isinstance(event, Resumed)] == [3]
    assert (next(moved.model.parameters()).device.type == "cpu") == (then == "cpu")
    expected = run(None, "cpu")
    assert moved.num_steps == expected.num_steps == 8
    for one, other in zip(moved.model.parameters(), expected.model.parameters(), strict=True):
        assert relative_error(one.detach().cpu(), other.detach()) < 1e-12
    assert [report.loss for report in moved.history] == pytest.approx(
        [report.loss for report in expected.history], rel=1e-12
    )
