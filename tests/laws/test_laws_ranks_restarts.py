"""Ranks that torchrun starts anew go on from the checkpoint, as if none of them had ever been killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import in_turn

pytestmark = in_turn
SCRIPT = '''
import os, signal, sys
import torch
from torch import nn
import autoaccum

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def killed(record):
    """Kill one rank or the other, three windows later after each restart."""
    at = 5 + 3 * restart
    if isinstance(record, autoaccum.StepReport) and restart < int(sys.argv[2]) and (record.step, rank) == (at, restart % 2):
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 5)).double()
generator = torch.Generator().manual_seed(1)
data = torch.randn(101, 6, generator=generator).double(), torch.randint(0, 5, (101,), generator=generator)
result = autoaccum.fit(
    model, data, effective_batch=23, micro_batch=4, epochs=16, loss_fn=nn.functional.cross_entropy, lr=0.01,
    run_dir=sys.argv[1] + "/run", checkpoint_every=2, progress=False, callbacks=[killed], device="cpu", cache=False,
)
torch.save((restart, result.num_steps, model.state_dict()), sys.argv[1] + f"/{rank}.pt")
'''


def trained(folder: Path, kills: int) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(kills), str(folder / "train.py"), str(folder), str(kills)]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run(command, env=environment, check=True, timeout=60 + 30 * kills, capture_output=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_ranks_that_are_killed_and_started_anew_leave_the_same_weights(kills: int, tmp_path: Path) -> None:
    whole, again = trained(tmp_path / "whole", 0), trained(tmp_path / "again", kills)
    for (restarts, steps, weights), (restarts_again, steps_again, weights_again) in zip(whole, again, strict=True):
        assert (restarts, restarts_again) == (0, kills)
        assert steps == steps_again == 80
        assert all(torch.equal(value, weights_again[name]) for name, value in weights.items()), "to the bit"


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_fewer_ranks_and_with_all_again() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "rank_elastic.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), "--case", "2", "--json"]
    told = subprocess.run(command, env=environment, check=True, timeout=900, capture_output=True, text=True).stdout
    (found,) = json.loads(told.splitlines()[-1])
    assert found["ranks"] == [2, 1, 2]
    assert found["codes"] == [0, 0]
    assert found["off"] < 1e-10
    assert found["is alike"], "each window once, of as many samples"
