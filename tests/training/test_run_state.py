"""A run is put back as it was; what cannot be put back is named, and the older checkpoint is used."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

import autoaccum
from autoaccum.errors import AutoaccumWarning, CheckpointCorruptError, CheckpointError
from autoaccum.events import Notice, Resumed, Started
from autoaccum.runs.checkpoint import Checkpoints
from autoaccum.testing import simulated_memory
from tests.models import classes
from tests.training.test_saving import end_after, fit, made

pytestmark = pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps)


OPTIONS: dict[str, Any] = {
    "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "lr_scheduler": cosine,
    "validation_data": classes(10),
    "micro_batch": 3,
}


def saved(steps: int = 7, **options: Any) -> tuple[Any, Any]:
    """Return the state of a run after some of its ten windows."""
    trainer = made(None, **{**OPTIONS, **options}, callbacks=[end_after(steps)])
    trainer.fit()
    return copy.deepcopy(trainer.state_dict())


@pytest.fixture(scope="module")
def state() -> tuple[Any, Any]:
    return saved()


def test_what_was_loaded_is_what_is_there(state: tuple[Any, Any]) -> None:
    trainer = made(None, **OPTIONS)
    trainer.load_state_dict(*copy.deepcopy(state))
    found = trainer.state_dict()
    # A micro-batch that was passed is taken at its word, whatever was found out by an earlier process.
    for of in (state[1], found[1]):
        of["engine"]["tuner"] = None
    assert repr(found) == repr(state)


def test_the_older_checkpoint_is_gone_on_from_with_a_notice(tmp_path: Path) -> None:
    fit(tmp_path, **OPTIONS, callbacks=[end_after(3)], checkpoint_every=1)
    weights, others = saved(3)
    del others["optimizer"]["param_groups"]
    others["trained"] = json.loads((tmp_path / "config.json").read_text())["trained"]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    writer = Checkpoints(tmp_path / "checkpoints")
    writer.save(step=3, weights=weights, state=others)
    writer.close()
    with pytest.warns(AutoaccumWarning, match="step-00000003: optimizer cannot be put back"):
        result = fit(tmp_path, **OPTIONS)
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [2]
    said = [event for event in result.events if isinstance(event, Notice) and "cannot be read" in event.cause]
    assert "goes on from step-00000002" in said[0].consequence
    whole = made(None, **OPTIONS).fit()
    assert [report.loss for report in result.history] == [report.loss for report in whole.history]


class Failing(LambdaLR):
    """A scheduler of a user's own, which cannot be put back."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("mine")


def test_code_of_a_user_that_fails_is_named_with_its_cause(tmp_path: Path) -> None:
    options = {"lr_scheduler": lambda optimizer, steps: Failing(optimizer, lambda step: 1.0)}
    weights, others = saved(3, **options)
    with pytest.raises(CheckpointCorruptError, match="learning_rate cannot be put back") as caught:
        made(None, **{**OPTIONS, **options}).load_state_dict(weights, others)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_cause_is_kept_where_no_checkpoint_is_left(tmp_path: Path) -> None:
    options = {"lr_scheduler": lambda optimizer, steps: Failing(optimizer, lambda step: 1.0)}
    fit(tmp_path, **options, callbacks=[end_after(3)])
    with pytest.raises(CheckpointCorruptError, match=r"step-00000003: learning_rate cannot be put back") as caught:
        fit(tmp_path, **options)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is None, "its frames hold what was read"


@pytest.mark.parametrize("limit", [90_000, 105_000])
def test_memory_that_runs_out_makes_no_checkpoint_corrupt(limit: int, tmp_path: Path) -> None:
    """At the second limit all but the last thousand bytes of it can be read."""

    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 3))

    fit(tmp_path, model=wide(), callbacks=[end_after(2)])
    with simulated_memory(limit), pytest.raises(CheckpointError, match="memory ran out while a checkpoint") as caught:
        fit(tmp_path, model=wide())
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert isinstance(caught.value.__cause__, MemoryError | torch.OutOfMemoryError)
    with simulated_memory(4 * limit):
        assert fit(tmp_path, model=wide()).num_steps == 10


def test_a_run_that_was_stopped_before_its_first_window_goes_on(tmp_path: Path) -> None:
    def stop(record: object) -> None:
        if isinstance(record, Started):
            raise autoaccum.StopTraining

    def trained(*callbacks: Any) -> int:
        data = torch.ones(12, 3), torch.ones(12, 1)
        return autoaccum.fit(
            nn.Linear(3, 1), data, loss_fn=nn.functional.mse_loss, effective_batch=4, micro_batch=2, device="cpu",
            progress=False, cache=False, run_dir=tmp_path, callbacks=callbacks,
        ).num_steps  # fmt: skip

    assert [trained(stop), trained(stop), trained()] == [0, 0, 3]
