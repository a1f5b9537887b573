"""Law 3 for models that FSDP2 shards: a run goes on from its checkpoint, whatever killed it, on any number of ranks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.distributed.group import join
from autoaccum.errors import AutoaccumError
from autoaccum.events import Notice, StepReport
from autoaccum.runs import checkpoint, parted
from autoaccum.runs.checkpoint import Checkpoints
from tests.distributed.launching import Ended, launch
from tests.distributed.test_fsdp import Block, data, net, rank, shard
from tests.processes import in_turn
from tests.step.test_sharding import Trained, outcome_of

pytestmark = in_turn
STEPS = 6


def train(
    folder: Path | None, *, until: int | None = None, dropout: float = 0.0, shards: bool = True, copies: int = 1
) -> tuple[Trained, Any]:
    """Train to the end, or to a step; return what the run leaves, and its result."""
    model = net()
    for block in model:  # type: ignore[attr-defined]
        if isinstance(block, Block):
            block.up = nn.Sequential(block.up, nn.Dropout(dropout))  # type: ignore[assignment]
            block.register_buffer("kept", torch.ones(3))
    if shards:
        join(torch.device("cpu"))
        shard(model, copies=copies)

    def stop(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == until:
            raise autoaccum.StopTraining

    result = autoaccum.fit(
        model,
        data(24),
        effective_batch=7,
        micro_batch=2,
        steps=STEPS,
        loss_fn=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        run_dir=folder,
        checkpoint_every=None if folder is None else 2,
        callbacks=[stop],
        device="cpu",
        progress=False,
        cache=False,
    )
    return outcome_of(model, result), result


def in_one_launch(folder: Path) -> dict[str, Any]:
    """Return the weights of a run that was never stopped, and of those that were."""
    found = {"whole": train(None)[0].weights, "dropout": train(None, dropout=0.2)[0].weights}
    train(folder / "b", until=3)
    train(folder / "a", until=3, dropout=0.2)
    _meet(lambda: _spoilt(folder))
    found["again"] = train(folder / "a", dropout=0.2)[0].weights
    torn, result = train(folder / "torn", dropout=0.2)
    causes = [event.cause for event in result.events if isinstance(event, Notice)]
    return {**found, "torn": torn.weights, "causes": causes}


def _meet(function: Any) -> None:
    """Call a function on the first rank, while the others wait."""
    group = join(torch.device("cpu"))
    assert group is not None
    group.from_first(function)


def _spoilt(folder: Path) -> None:
    """Copy a run, and change a byte of the second rank's weights in its newest checkpoint."""
    shutil.copytree(folder / "a", folder / "torn")
    path = folder / "torn" / "checkpoints" / "step-00000003" / parted.file_of(1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def weights_of(folder: Path | None, options: dict[str, Any] | None = None) -> torch.Tensor:
    return train(folder, **(options or {}))[0].weights


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first, second = launch(in_one_launch, 2, tmp_path)
    for name, weights in first.items():
        assert name == "causes" or torch.equal(weights, second[name])
    assert not torch.equal(first["whole"], first["dropout"])
    for name in ("again", "torn"):
        assert torch.equal(first[name], first["dropout"]), f"{name}: to the bit"
    assert any("was changed after it was written" in cause for cause in first["causes"])
    # The last two, and nothing that was not ended.
    there = tmp_path / "a" / "checkpoints"
    assert [one.step for one in checkpoint.every(there)[0]] == [6, 4]
    assert {path.name for path in there.iterdir()} == {".lock", "step-00000004", "step-00000006"}
    names = {path.suffix for path in (there / "step-00000006").rglob("*") if path.is_file()}
    assert names == {".pt", ".json"}
    for weights in launch(weights_of, 3, tmp_path / "b"):
        torch.testing.assert_close(weights, first["whole"], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (2, 1), (1, 2), (4, 3, 1, 2)], ids=str)
def test_a_run_goes_on_on_any_number_of_ranks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    whole = launch(weights_of, 2, None)[0]
    for number, size in enumerate(sizes):
        # One has all of the model.
        until = None if number == len(sizes) - 1 else number + 2
        for weights in launch(weights_of, size, tmp_path, {"until": until, "shards": size > 1}):
            assert until or torch.testing.assert_close(weights, whole, rtol=1e-10, atol=1e-12) is None


@pytest.mark.slow
def test_copies_of_a_sharded_model_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    whole = launch(weights_of, 4, None, {"copies": 2})[0]
    launch(weights_of, 4, tmp_path, {"copies": 2, "until": 3})
    written = sorted((tmp_path / "checkpoints" / "step-00000003").glob("shard-*"))
    assert [path.stem for path in written] == ["shard-00001", "shard-00002"]
    for weights in launch(weights_of, 4, tmp_path, {"copies": 2}):
        assert torch.equal(weights, whole)


def failing(folder: Path, how: str) -> tuple[str, str]:
    """Train to a checkpoint that a rank fails to write, or dies in; return the error."""
    write, put, count = parted.write, Checkpoints._put, 0

    def spoilt(path: Path, *rest: Any) -> Any:
        nonlocal count
        count += rank() == 1
        if count == 3 and how == "second is killed":
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        if count == 3 and how == "no room":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *rest)

    def killed(self: Checkpoints, partial: Path, path: Path) -> None:
        if path.name == "step-00000004":
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, partial, path)

    parted.write = spoilt
    if how == "first is killed":
        Checkpoints._put = killed  # type: ignore[method-assign]
    try:
        train(folder)
    except AutoaccumError as error:
        return type(error).__name__, str(error)
    return "", ""


def after_all(folder: Path) -> list[torch.Tensor]:
    return [train(None)[0].weights, train(folder)[0].weights]


KILLED = ("first", "second")
ENDS = {
    "second is killed": ("RankError", None),
    "first is killed": (None, "RankError"),
    "no room": ("RankError", "CheckpointWriteError"),
}


@pytest.mark.parametrize("how", ["no room", *(pytest.param(f"{n} is killed", marks=pytest.mark.slow) for n in KILLED)])
def test_a_checkpoint_that_not_all_ranks_have_written_is_none(how: str, tmp_path: Path) -> None:
    found = launch(failing, 2, tmp_path, how)
    assert tuple(None if isinstance(one, Ended) else one[0] for one in found) == ENDS[how]
    whole, skipped = checkpoint.every(tmp_path / "checkpoints")
    assert ([one.step for one in whole], skipped) == ([2, 1], ())
    if how == "no room":
        assert "No space left on device" in found[1][1]
        assert "rank 1 has failed: CheckpointWriteError" in found[0][1]
        assert not list((tmp_path / "checkpoints").glob(".step-*"))
        return
    for whole_weights, weights in launch(after_all, 2, tmp_path):
        assert torch.equal(weights, whole_weights), "to the bit"


SCRIPT = '''
import os, signal, sys
from pathlib import Path
import torch
import autoaccum
from tests.laws import test_laws_ranks_sharded as law

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fit = autoaccum.fit

def killed(record):
    """Kill one rank or the other, a window later after each restart."""
    if isinstance(record, autoaccum.StepReport) and restart < int(sys.argv[2]) and (record.step, rank) == (2 + restart, restart % 2):
        os.kill(os.getpid(), signal.SIGKILL)

autoaccum.fit = lambda *args, callbacks, **rest: fit(*args, callbacks=[*callbacks, killed], **{**rest, "checkpoint_every": 1})
trained, result = law.train(Path(sys.argv[1]) / "run", dropout=0.2)
torch.save((restart, result.num_steps, trained.weights), sys.argv[1] + f"/{rank}.pt")
'''


def started(folder: Path, kills: int) -> list[tuple[int, int, torch.Tensor]]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(kills), str(folder / "train.py"), str(folder), str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, env=environment, check=True, timeout=60 + 40 * kills, capture_output=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_ranks_that_are_killed_and_started_anew_leave_the_same_weights(tmp_path: Path) -> None:
    whole, again = started(tmp_path / "whole", 0), started(tmp_path / "again", 5)
    for (restarts, steps, weights), (restarts_again, steps_again, weights_again) in zip(whole, again, strict=True):
        assert (restarts, restarts_again) == (0, 5)
        assert steps == steps_again == STEPS
        assert torch.equal(weights, weights_again), "to the bit"
